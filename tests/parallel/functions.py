"""What the tests run on workers: functions that these can import."""

from __future__ import annotations

import os
import time
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import tvm
import tvm_ffi

from relax_fusion.parallel import Worker, Workers


def rank_times(worker: Worker, factor: int) -> int:
    return worker.rank * factor


def part(rank: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).integers(1, 9, (3, 5)).astype(dtype)


def collective(worker: Worker, name: str, dtype: str, *args: Any) -> np.ndarray:
    sent = tvm.runtime.tensor(part(worker.rank, dtype))
    rows = 3 * worker.count if name == "allgather" else 3
    received = tvm.runtime.empty((rows, 5), dtype)
    shapes = [tvm_ffi.Shape([a]) if type(a) is int else a for a in args]
    tvm_ffi.get_global_func(f"runtime.disco.{name}")(sent, *shapes, received)
    return received.numpy()


def fails_on(worker: Worker, rank: int) -> np.ndarray:
    if worker.rank == rank:
        raise ValueError("it is broken\nand more of it")
    return collective(worker, "allreduce", "float32", 0, True)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def fails_without_a_word(_worker: Worker) -> None:
    raise Speechless


def exits_on(worker: Worker, rank: int, code: int) -> np.ndarray:
    if worker.rank == rank:
        os._exit(code)
    return collective(worker, "allreduce", "float32", 0, True)


def reduce_for_ever(worker: Worker) -> None:
    while True:
        collective(worker, "allreduce", "float32", 0, True)


def sleep_for_ever(_worker: Worker) -> None:
    while True:
        time.sleep(60)


def process_number(_worker: Worker) -> int:
    return os.getpid()


def call_for_ever(work: str) -> None:
    """Start workers, say which processes they are, and wait for what does not end."""
    with Workers(2) as workers:
        print(*workers.call(process_number), flush=True)
        workers.call({"reduce": reduce_for_ever, "sleep": sleep_for_ever}[work])
