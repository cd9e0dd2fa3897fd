"""The program as a process: whenever it is asked to end, it does, with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WAITING = """
import pathlib, sys, time, types
import relax_fusion_command
cli, stage = types.ModuleType("relax_fusion.cli"), types.ModuleType("relax_fusion.cli.artifact")
sys.modules |= {{"relax_fusion": types.ModuleType("relax_fusion"), cli.__name__: cli}}
sys.modules[stage.__name__] = stage
def swallow():
    print("ready", flush=True)
    while True:
        try:
            {busy}
        except BaseException as err:
            print("caught", repr(err), flush=True)
cli.main = swallow
stage.remove_stages = lambda: pathlib.Path("half-written").unlink()
sys.exit(relax_fusion_command.main())
"""
"""The program with commands that wait, and are deaf to exceptions."""

BUSY = ("time.sleep(1)", "sum(range(10**4))", "list(map(str, range(10**6)))")


def started(code: str, cwd: Path, ignored: int | None = None) -> subprocess.Popen[str]:
    def before() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)

    (cwd / "half-written").write_text("half")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("busy", BUSY)
@pytest.mark.parametrize(
    "number, code, word",
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "the terminal was closed"),
    ],
)
def test_it_ends_with_one_line(tmp_path: Path, busy: str, number: int, code: int, word: str):
    process = started(WAITING.format(busy=busy), tmp_path)
    process.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", f"relax-fusion: error: {word}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    process = started(WAITING.format(busy="time.sleep(1)"), tmp_path, ignored=signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_while_it_imports(tmp_path: Path) -> None:
    """The package is imported only after the watch has begun."""
    (tmp_path / "relax_fusion.py").write_text(
        "import time\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "import relax_fusion_command; relax_fusion_command.main()"
    process = started(code, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "relax-fusion: error: interrupted\n")
    assert process.returncode == 130
