"""The module behind each phase, and what its passes changed, written for people to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tvm
from tvm import ir
from tvm.ir.transform import Pass
from tvm.target import Target

from ..errors import PipelineError
from ..hardware.target import device_of
from ..report import Report
from ..report.html.dump_page import dump_html
from ..report.passes import PASSES, DumpRecord, PassRecord, PhaseRecord, passes_text
from .record_passes import PassRecorder, name_of

PAGE = "report.html"
"""What the page of a report is called, beside dumps and libraries."""

INDEX = "index.html"
"""What the page of a dump is called."""


PhaseRunner = Callable[[str, str, Sequence[Pass], ir.IRModule], ir.IRModule]


@contextmanager
def phase_runner(
    directory: Path | None, mod: ir.IRModule, options: Mapping[str, str]
) -> Iterator[PhaseRunner]:
    """Give what runs the passes of a phase; where there is a directory, as `DebugDump.run`."""
    if directory is None:
        yield lambda _file, _title, passes, given: tvm.transform.Sequential(passes)(given)
        return
    dump = DebugDump(directory, mod, options)
    try:
        yield dump.run
    finally:
        dump.write()


class DebugDump:
    """The directory of a dump: a module for each phase, and what each pass changed.

    Parameters
    ----------
    directory : Path
        Made if needed; files of an earlier dump are replaced.
    mod : tvm.IRModule
        What the first phase is given.
    options : mapping of str to str
        What the pipeline was told, as text.
    """

    def __init__(self, directory: Path, mod: ir.IRModule, options: Mapping[str, str]):
        self._directory = directory
        self._recorder = PassRecorder(mod)
        self._options = options
        self._phases: list[PhaseRecord] = []
        self._failed = ""

    def run(self, file: str, title: str, passes: Sequence[Pass], mod: ir.IRModule) -> ir.IRModule:
        """Run the passes of a phase, and write the module behind them as TVMScript.

        Parameters
        ----------
        file : str
            The name of the file.
        title : str
            What the phase is doing.
        passes : sequence of Pass
            They run in turn.
        mod : tvm.IRModule
            What the first of them is given.

        Raises
        ------
        PipelineError
            If a file cannot be written.
        """
        records: list[PassRecord] = []
        try:
            mod = self._recorder.run(passes, mod, records)
        finally:
            seconds = sum(record.seconds for record in records)
            self._phases.append(PhaseRecord(file, title, seconds, tuple(records)))
            self._failed = name_of(passes[len(records)]) if len(records) < len(passes) else ""
        _write(self._directory / file, mod.script(show_meta=False) + "\n")
        return mod

    def write(self) -> None:
        """Write ``passes.json``, and the page that shows it."""
        record = DumpRecord(tuple(self._phases), self._options, self._failed)
        _write(self._directory / PASSES, passes_text(record))
        files = [phase.file for phase in self._phases[: -1 if self._failed else None]]
        page = dump_html(record, files, "" if self._failed else PAGE)
        _write(self._directory / INDEX, page)


def _write(path: Path, text: str) -> None:
    """Write a file of a dump, and its directory if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise PipelineError(f"debug_dump: {path} cannot be written ({err.strerror})") from err


@contextmanager
def paged(
    report: Report | None, target: Target, backend: str, directory: Path | None = None
) -> Iterator[None]:
    """Tell a report what is compiled in a context, and how long that took.

    Parameters
    ----------
    report : Report, optional
        Nothing is done where there is none.
    target : Target
        What is compiled for.
    backend : {"tir", "triton", "mixed"}
        Who is to emit fused kernels.
    directory : Path, optional
        Where the page is written in the end.
    """
    start = time.perf_counter()
    if report is not None:
        dev = device_of(target)
        report.device, report.material.spec, report.material.backend = dev.description, dev, backend
    yield
    if report is not None:
        report.material.seconds += time.perf_counter() - start
        if directory is not None:
            write_page(report, directory)


def write_page(report: Report, directory: Path) -> None:
    """Write the page of a report.

    Raises
    ------
    PipelineError
        If the file cannot be written.
    """
    path = directory / PAGE
    try:
        path.write_text(report.to_html(), encoding="utf-8")
    except OSError as err:
        raise PipelineError(f"{path} cannot be written ({err.strerror})") from err
