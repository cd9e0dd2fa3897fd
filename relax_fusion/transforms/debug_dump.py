"""The module behind each phase, and what its passes changed, written for people to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tvm import ir
from tvm.ir.transform import Pass
from tvm.target import Target

from ..errors import PipelineError
from ..estimator.family import Backend
from ..files import write_file
from ..hardware.target import device_of
from ..report import Report
from ..report.passes import PASSES, DumpRecord, PassRecord, PhaseRecord, passes_text
from ..report.record import record_of
from ..validation import json_text, shown
from .modules import with_functions
from .record_passes import PassRecorder, functions_by_name, reached
from .running import CALLER, run_pass, running

REPORT = "report.json"
"""The report of a compilation has this name, in dumps and beside libraries."""

_PAGES = ("index.html", "report.html")
"""Pages that are made of a dump."""

_MODULES = (*(f"debug-phase{i}.py" for i in range(6)), "debug-final.py")
"""The modules that dumps have, of our pipeline and of MLC-LLM's."""

PhaseRunner = Callable[[str, str, Sequence[Pass], ir.IRModule], ir.IRModule]


@dataclass(frozen=True)
class Wanted:
    """What is to be dumped."""

    directory: Path | None = None
    """Where to; nothing is dumped without."""
    functions: tuple[str, ...] = ()
    """Names of functions, which are dumped with those that they call; empty for all."""
    phases: tuple[str, ...] = ()
    """What the names of their files have behind ``debug-phase``, or ``final``; empty for all."""

    def check_phases(self, files: Sequence[str]) -> None:
        """Refuse, by a `PipelineError`, phases that have none of these files."""
        known = [_short(file) for file in files]
        for name in self.phases:
            if name not in known:
                raise PipelineError(
                    f"dump_phases names {shown(name)}; there are {', '.join(known)}"
                )

    def check_functions(self, mod: ir.IRModule) -> None:
        """Refuse, by a `PipelineError`, functions that a module does not have."""
        known = functions_by_name(mod)
        for name in self.functions:
            if name not in known:
                some = ", ".join(list(known)[:_MOST_NAMED])
                more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
                told = f"the module has {some}{more}" if known else "the module has none"
                raise PipelineError(f"dump_functions names {shown(name)}; {told}")


_MOST_NAMED = 20


def _short(file: str) -> str:
    """Return what a phase is called by users: ``"1"``, ``"final"``."""
    return file.removeprefix("debug-").removeprefix("phase").removesuffix(".py")


@contextmanager
def phase_runner(
    wanted: Wanted, mod: ir.IRModule, options: Mapping[str, str]
) -> Iterator[PhaseRunner]:
    """Give what runs the passes of a phase; as `DebugDump.run` where there is a directory."""
    if wanted.directory is None:
        yield _run
        return
    dump = DebugDump(wanted.directory, wanted, mod, options)
    try:
        yield dump.run
    except BaseException:
        name, _ = running()
        with suppress(Exception):  # what a pass says is told, and not that its dump failed as well
            dump.write(failed="" if name == CALLER else name)
        raise
    dump.write()


def _run(_file: str, _title: str, passes: Sequence[Pass], mod: ir.IRModule) -> ir.IRModule:
    for one in passes:
        mod = run_pass(one, mod)
    return mod


class DebugDump:
    """The directory of a dump: a module for each phase, and what each pass changed.

    A thread compares what passes changed and writes modules, in turn, while the main thread goes on
    with the next passes.  `write` waits for it, so that a pass that fails leaves a whole dump; a
    process that is killed can lack what was not written yet.

    `directory`: made if needed; files of an earlier dump are removed, and no others.
    `wanted`: what is dumped.
    `mod`: what the first phase is given.
    `options`: what the pipeline was told, as text.
    Raises `PipelineError` if the module lacks a function that is wanted, if the directory holds a
    report or a page of something else, or if a file cannot be removed.
    """

    def __init__(
        self, directory: Path, wanted: Wanted, mod: ir.IRModule, options: Mapping[str, str]
    ):
        wanted.check_functions(mod)
        _check_names(directory)
        for name in (*_MODULES, PASSES, REPORT, *_PAGES):
            _remove(directory / name)
        self._directory = directory
        self._wanted = wanted
        self._options = options
        self._recorder: PassRecorder | None = None
        self._phases: list[tuple[str, str, list[Future[PassRecord]]]] = []
        self._queue = ThreadPoolExecutor(1, "debug_dump")
        self._written: list[Future[None]] = []

    def run(self, file: str, title: str, passes: Sequence[Pass], mod: ir.IRModule) -> ir.IRModule:
        """Run the passes of a phase, and write the module behind them as TVMScript into `file`.

        Raises `PipelineError` if the file of an earlier phase could not be written.
        """
        for each in self._written:
            if each.done():
                each.result()
        if self._wanted.phases and _short(file) not in self._wanted.phases:
            self._recorder = None
            return _run(file, title, passes, mod)
        recorder = self._recorder or PassRecorder(mod, self._queue, self._wanted.functions)
        self._recorder = recorder
        records: list[Future[PassRecord]] = []
        self._phases.append((file, title, records))
        mod = recorder.run(passes, mod, records)
        part = _part(mod, self._wanted.functions)
        self._written.append(self._queue.submit(_write_module, self._directory / file, part))
        return mod

    def write(self, failed: str = "") -> None:
        """Write ``passes.json``, with the name of the pass that failed, if one did.

        Raises `PipelineError` if it or the file of a phase cannot be written.
        """
        self._queue.shutdown()
        for each in self._written:
            each.result()
        phases = tuple(_phase(*each) for each in self._phases)
        record = DumpRecord(phases, self._options, failed)
        _write(self._directory / PASSES, passes_text(record))


def _phase(file: str, title: str, records: Sequence[Future[PassRecord]]) -> PhaseRecord:
    passes = tuple(each.result() for each in records)
    return PhaseRecord(file, title, sum(each.seconds for each in passes), passes)


def _part(mod: ir.IRModule, functions: Sequence[str]) -> ir.IRModule:
    """Return a copy with some functions, and what they call; without names, with all."""
    kept = reached(functions_by_name(mod), functions)
    return with_functions(mod, {}, [g for g in mod.get_global_vars() if g.name_hint not in kept])


def _write_module(path: Path, mod: ir.IRModule) -> None:
    _write(path, mod.script(show_meta=False) + "\n")


def _check_names(directory: Path) -> None:
    """Refuse a directory of something else whose report or pages would be replaced."""
    found = [name for name in (REPORT, *_PAGES) if (directory / name).is_file()]
    if found and not any((directory / name).exists() for name in (PASSES, *_MODULES)):
        raise PipelineError(
            f"debug_dump: {directory} is no earlier dump, and its {found[0]} would be replaced; "
            "give another directory"
        )


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return  # writing will say so
    except OSError as err:
        raise PipelineError(f"debug_dump: {path} cannot be removed ({err.strerror})") from err


def _write(path: Path, text: str) -> None:
    """Write a file of a dump, and its directory if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as err:
        raise PipelineError(f"debug_dump: {path} cannot be written ({err.strerror})") from err


@contextmanager
def reported(
    report: Report | None, target: Target, backend: Backend, directory: Path | None = None
) -> Iterator[None]:
    """Tell a report what is compiled in a context, and write it into a dump in the end.

    Raises `PipelineError` if the file cannot be written.
    """
    if report is not None:
        dev = device_of(target)
        report.device, report.material.spec, report.material.backend = dev.description, dev, backend
    yield
    if report is not None and directory is not None:
        record = {"target": str(target), **record_of(report, sources=True)}
        _write(directory / REPORT, json_text(record) + "\n")
