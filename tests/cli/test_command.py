"""The program as a process: whenever it is asked to end, it does, with one line."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import get_args

import pytest

from relax_fusion import QUANTIZATIONS, options
from relax_fusion.cli import argument_types, main
from relax_fusion.cli.console import Console
from relax_fusion.mlc.__main__ import _failed as mlc_failed
from relax_fusion.models import layers, zoo
from relax_fusion.tuning import contests
from relax_fusion.validation import printable

ROOT = Path(__file__).parents[2]

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


IMPORTING = """
import sys
from relax_fusion.cli import main
def imported(*words):
    code = main(words)
    return {name for name in ("numpy", "torch", "triton", "tvm") if name in sys.modules}, code
helps = ((), "demo", "compile", "tune", "run", "bench", "explain", "workloads", "diff", "inspect")
for command in helps:
    assert imported(*[command or "--version"][:1], "--help")[0] == set(), command
assert imported("explain", "nothing", "-q") == ({"numpy", "triton", "tvm"}, 1)
"""


def test_help_waits_for_nothing_and_no_command_for_torch() -> None:
    """TVM imports torch where it can; a command that needs TVM alone does without."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_what_the_parser_knows_by_name_is_all_that_there_is() -> None:
    assert get_args(options.Backend) == argument_types.BACKENDS
    assert argument_types.DTYPES == layers.DTYPES
    assert (*zoo.CONFIGS,) == argument_types.MODELS
    assert argument_types.PLANS == contests.MOST
    assert (*QUANTIZATIONS,) == argument_types.QUANTIZATIONS


def test_no_other_module_is_a_program() -> None:
    """``python -m`` would import TVM with the package, before the watch begins."""
    assert importlib.util.find_spec("relax_fusion.cli.__main__") is None


STUBBED = """
import os, signal, stat, sys, types
import relax_fusion_command
cli, stage = types.ModuleType("relax_fusion.cli"), types.ModuleType("relax_fusion.cli.artifact")
sys.modules |= {"relax_fusion": types.ModuleType("relax_fusion"), cli.__name__: cli}
sys.modules[stage.__name__] = stage
stage.remove_stages = lambda: None
"""


def test_what_fails_because_of_the_interrupt_is_not_told(tmp_path: Path) -> None:
    """The main thread meets files that are gone; neither its words nor its code count."""
    code = STUBBED + (
        "import pathlib, threading\n"
        "half, complained = pathlib.Path('half-written'), threading.Event()\n"
        "def command():\n"
        "    print('ready', flush=True)\n"
        "    while half.exists(): pass\n"
        "    print('no such file', file=sys.stderr, flush=True)\n"
        "    complained.set()\n"
        "    return 1\n"
        "cli.main, stage.remove_stages = command, lambda: half.unlink() or complained.wait()\n"
        "sys.exit(relax_fusion_command.main())"
    )
    process = started(code, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "relax-fusion: error: interrupted\n")
    assert process.returncode == 130


def test_an_interrupt_after_the_end_changes_nothing(tmp_path: Path) -> None:
    code = STUBBED + "cli.main = lambda: 0\ncode = relax_fusion_command.main()\n"
    code += "os.kill(os.getpid(), signal.SIGINT)\nprint('ready', flush=True)\nsys.exit(code)"
    process = started(code, tmp_path)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_are_closed(tmp_path: Path, closed: str) -> None:
    """No other file gets their numbers, and what is printed to one goes to no other."""
    code = STUBBED + (
        "def command():\n"
        "    print('out'), print('err', file=sys.stderr)\n"
        "    return 3 + sum(stat.S_ISCHR(os.fstat(n).st_mode) for n in range(3))\n"
        "cli.main = command\nsys.exit(relax_fusion_command.main())"
    )
    shell = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
    )
    count = closed.count("&-")
    assert done.returncode == 3 + count
    assert done.stdout == ("" if ">&-" in closed.split() else "out\n")
    assert done.stderr == ("" if "2>&-" in closed else "err\n")


class Unreadable(io.StringIO):
    """A stderr whose reader is gone, or whose disk is full."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_progress_that_nobody_reads_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Unreadable())
    console = Console()
    console.step("exporting")
    console.warn("beware")
    for arguments in (["explain", "/nothing"], ["explain", "/nothing", "--traceback"]):
        assert main(arguments) == 1


def test_results_that_the_encoding_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    told = "mod\xe8le \udcff \U0001f600"
    Console().result(told)
    Console().json({"source": told})
    line, document = written.getvalue().split(b"\n", 1)
    assert line == rb"mod\u00e8le \udcff \ud83d\ude00" and json.loads(document)["source"] == told


CONTROLS = "\x1b[2J\x1b]0;owned\x07\r\x08\x7f\x85\x9b31m\u202e\u2066\u2069"
HIDDEN = r"\u001b[2J\u001b]0;owned\u0007\u000d\u0008\u007f\u0085\u009b31m\u202e\u2066\u2069"


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, capsys) -> None:
    """Whatever holds them: a record, an argument, a warning, an exception, a log."""
    phase = {"file": CONTROLS, "title": f"{CONTROLS}\n", "seconds": 1.0, "passes": []}
    record = {"phases": [phase], "options": {}, "failed": CONTROLS, "format": 1}
    (tmp_path / "passes.json").write_text(json.dumps(record))
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count(HIDDEN) == 3 and rf"{HIDDEN}\n" in text
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told)["failed"] == CONTROLS and told.isascii()
    for arguments in (
        ["explain", f"{CONTROLS}\udcff"],
        [CONTROLS],
        ["run", CONTROLS, "--prompt-ids", "1"],
    ):
        assert main([*arguments, *["--traceback"] * (len(arguments) > 1)]) in (1, 2)
    console = Console()
    console.step(f"exporting {CONTROLS}\nrelax-fusion: error: forged")
    with console.listening():
        warnings.warn(CONTROLS, stacklevel=1)
        logging.getLogger("relax_fusion.launch.cache").warning("%s is damaged", CONTROLS)
    mlc_failed(CONTROLS)
    err = capsys.readouterr().err
    assert err.count(r"relax-fusion: warning: \u001b") == 2 and "\\u2069 is damaged\n" in err
    assert all(line.isprintable() for line in err.split("\n"))
    assert "\nrelax-fusion: error: forged" not in err and "relax_fusion.mlc: error: " in err


def test_layout_stays() -> None:
    assert printable("a\n\tb \xe9\u05d0\u200d\U0001f600") == "a\n\tb \xe9\u05d0\u200d\U0001f600"
