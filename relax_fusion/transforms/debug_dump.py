"""The module behind each phase, written for people to read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tvm import ir
from tvm.target import Target

from ..errors import PipelineError
from ..hardware.target import device_of
from ..report import Report

PAGE = "report.html"
"""What the page of a report is called, beside dumps and libraries."""


def dump(mod: ir.IRModule, path: Path) -> None:
    """Write a module as TVMScript, constants left out, making the directory if needed.

    Raises
    ------
    PipelineError
        If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mod.script(show_meta=False) + "\n", encoding="utf-8")
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
