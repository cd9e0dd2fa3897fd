"""Calls launchers in processes whose CUDA driver is fake_cuda.c.

Every line of stdin is a job in JSON: a library, a driver or null, environment variables, the
arguments of each call and how many threads make all of them.  The answer, a line of stdout, is the
message of every error and every line that the driver wrote.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import tvm_ffi


def run(job: dict[str, Any], log: Path) -> list[str]:
    """Make the calls of a job; return the errors."""
    os.environ.update(job["environment"], FAKE_CUDA_LOG=str(log))
    if job["driver"]:
        ctypes.CDLL(job["driver"])  # whoever opens libcuda.so.1 now gets this one, by its soname
    launch = tvm_ffi.load_module(job["library"])["launch"]
    errors: list[str] = []

    together = threading.Barrier(job["threads"])

    def calls() -> None:
        together.wait()
        for args in job["calls"]:
            try:
                launch(*args)
            except Exception as err:
                errors.append(f"{type(err).__name__}: {err}")

    threads = [threading.Thread(target=calls) for _ in range(job["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def answer(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Do a job in a process of its own, where neither a library nor a driver is loaded yet."""
    log, result = directory / "log", directory / "result"
    log.write_text("")
    child = os.fork()
    if child == 0:
        result.write_text(json.dumps(run(job, log)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    errors = json.loads(result.read_text()) if status == 0 else [f"it died with status {status}"]
    return {"errors": errors, "log": lines}


def warm_up() -> None:
    """Let an error be traced: reading the debug information of all libraries takes a second."""
    with contextlib.suppress(RuntimeError):
        tvm_ffi.load_module("/no/such/library.so")


def main() -> None:
    warm_up()
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), Path(directory))), flush=True)


main()
