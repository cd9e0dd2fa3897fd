"""Measuring the plans of a module: what to measure, in which order, and for how long."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import tvm
from tvm import ir
from tvm.target import Target

from ..entry import check_module
from ..errors import TuningError
from ..estimator.database import Database
from ..hardware.target import device_of
from ..options import PipelineOptions, make_options
from ..pipeline import phase0_annotate, phase1_fuse
from ..report import Report
from ..validation import shown
from ..workload.checks import without_zeros
from .contests import MOST, Tuning, shortlist
from .device import open_device
from .trial import Subject, Trial


def tune(
    mod: ir.IRModule,
    database: Path | str,
    target: Target | str | None = None,
    *,
    seconds: float | None = None,
    rpc: str | None = None,
    again: bool = False,
    most: int = MOST,
    **pipeline: Any,
) -> Tuning:
    """Measure the best-priced plans of every chain that the pipeline fuses.

    What has a time in the database is not measured again.  The most expensive chains come first:
    calls times predicted seconds.  Every time is kept as soon as it is known, so that an
    interrupted run loses nothing.

    Parameters
    ----------
    mod : tvm.IRModule
        What the pipeline is to compile; it is not modified.
    database : Path or str
        File of times; made if there is none.  Compile with it:
        ``relax.get_pipeline("relax_fusion", target=target, database=database)``.
    target : Target or str, optional
        As for the pipeline.
    seconds : float, optional
        Of compiling and measuring plans, after which nothing more is begun.
    rpc : str, optional
        ``"host:port"`` of TVM's RPC server on the machine that has the device, or
        ``"host:port/key"`` of a tracker; this machine by default.
    again : bool
        Measure also what has a time.
    most : int
        Plans for each range of rows, or query positions.
    **pipeline
        Other arguments of the pipeline, as it will be compiled with.

    Returns
    -------
    Tuning
        By how much the fastest plans are faster than those chosen by price.

    Raises
    ------
    TuningError
        If there is no such device, `seconds` is negative, or `most` is less than 1.
    DatabaseError
        If the file is damaged or cannot be written.
    ModuleTypeError, PipelineError, TargetError
        If `mod` is no module, or an argument is refused.
    """
    check_module(mod)
    if seconds is not None and not seconds >= 0:
        raise TuningError(f"seconds is {shown(seconds)}; must be from 0 on")
    if type(most) is not int or most < 1:
        raise TuningError(f"most is {shown(most)}; must be an integer from 1 on")
    report = Report()
    options = make_options(target, {**pipeline, "report": report})
    where, store, tuning = open_device(options.target, rpc), Database(Path(database)), Tuning()
    store.create()
    known = store.measured(str(options.target))
    subjects = _subjects(mod, options, report, most)
    deadline = time.monotonic() + seconds if seconds is not None else float("inf")
    for number, subject in enumerate(subjects, 1):
        if time.monotonic() >= deadline:
            tuning.left.append(subject.name)
            continue
        trial = Trial(options.target, where, store, deadline, tuning)
        if options.progress is not None:
            options.progress(f"{subject.name}, {number} of {len(subjects)} workloads")
            trial.progress = options.progress
        times = trial.run(subject, {} if again else known.of(subject.work))
        tuning.outcomes += subject.outcomes(times)
    return tuning


def _subjects(
    mod: ir.IRModule, options: PipelineOptions, report: Report, most: int
) -> list[Subject]:
    """Return the workloads of fused chains, each once, the most expensive first."""
    with options.target:
        passes = [*phase0_annotate(options), *phase1_fuse(options)]
        tvm.transform.Sequential(passes)(mod)
    fused = [d for d in report.fused if d.workload is not None]
    calls = Counter(d.workload for d in fused)
    chains = {d.workload: f"{d.pattern} {d.spelling}".strip() for d in reversed(fused)}
    dev, backend = device_of(options.target), options.fuse.backend
    found = [
        Subject(work, chains[work], count, tuple(shortlist(work, dev, backend, most)))
        for work, count in calls.items()
        if work is not None and without_zeros(work) == work
    ]
    return sorted(found, key=lambda subject: -subject.expense)
