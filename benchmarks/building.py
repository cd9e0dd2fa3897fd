"""Relax modules, compiled by our pipeline as benchmarks run them; many at once in parallel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import tvm
from tvm import ir, relax
from tvm.s_tir import dlight as dl
from tvm.s_tir.dlight.base import ScheduleRule

from benchmarks.sessions import sentence
from relax_fusion import PipelineOptions, Report, make_target
from relax_fusion.dlight_rules import ScalarMatmulRule
from relax_fusion.pipeline import phase0_annotate, phase1_fuse
from relax_fusion.transforms.fuse_dequantize import FuseDequantize

LOWERING = (
    *("LegalizeOps", "AnnotateTIROpPattern", "FoldConstant"),
    *("FuseOps", "FuseTIR", "DeadCodeElimination"),
)
"""The passes of MLC-LLM in front of schedules."""


@dataclass
class Built:
    """A compiled module and what was decided about it."""

    executable: tvm.runtime.Executable
    report: Report
    machines: dict[str, relax.VirtualMachine] = field(default_factory=dict)

    def call(self, function: str, tensors: Iterable[Any]) -> Callable[[], Any]:
        """Return the call of a function on tensors of torch, whose memory it shares."""
        args = [tvm.runtime.from_dlpack(t) for t in tensors]
        device = args[0].device
        if str(device) not in self.machines:  # to make one takes a C compiler
            self.machines[str(device)] = relax.VirtualMachine(self.executable, device)
        main = self.machines[str(device)][function]
        return lambda: main(*args)


def compiled(mod: ir.IRModule, target: str, **options: Any) -> Built:
    """Compile a module with `options` of the pipeline; kernels in the cache are taken from it."""
    chosen, report = make_target(target), Report()
    pipeline = relax.get_pipeline("relax_fusion", target=chosen, report=report, **options)
    # The benchmark captures calls itself
    with tvm.transform.PassContext(opt_level=3, config={"relax.backend.use_cuda_graph": False}):
        executable = tvm.compile(mod, target=chosen, relax_pipeline=pipeline)
    return Built(executable, report)


def compiled_by_tvm(mod: ir.IRModule, target: str) -> Built:
    """Compile a module for a GPU as MLC-LLM does, with none of our passes.

    Of our rules it has the one that keeps matmuls from TVM's tensor-core schedule, which crashes.
    """
    return _scheduled_by([ScalarMatmulRule(), dl.gpu.GEMV()], mod, target)


def compiled_as_mlc(mod: ir.IRModule, target: str, rows: int) -> Built:
    """Compile a module of quantised weights for a GPU as MLC-LLM does, for a number of rows.

    Decoding is fused with the matmul, by our pass for MLC-LLM's.  TVM's rules schedule it: of a
    static row as a GEMV, of a symbolic number as a GEMV of 2 or 4 rows at a time, beyond 8 as a
    matmul.
    """
    few = [dl.gpu.LowBatchGEMV(2 if rows == 2 else 4)] if 1 < rows <= 8 else []
    rules = [dl.gpu.GEMV(), *few, ScalarMatmulRule()]
    return _scheduled_by(rules, FuseDequantize()(mod), target)


def _scheduled_by(rules: Sequence[ScheduleRule], mod: ir.IRModule, target: str) -> Built:
    chosen = make_target(target)
    others = [dl.gpu.Reduction(), dl.gpu.GeneralReduction(), dl.gpu.Fallback()]
    passes = [
        *(getattr(relax.transform, name)() for name in LOWERING),
        dl.ApplyDefaultSchedule(*rules, *others),
        relax.get_default_pipeline(chosen),
    ]
    with chosen, tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": False}):
        pipeline = tvm.transform.Sequential(passes)
        executable = tvm.compile(mod, target=chosen, relax_pipeline=pipeline)
    return Built(executable, Report())


def decided(mod: ir.IRModule, target: str, **chosen: Any) -> Report:
    """Return what our passes, with options, decide about a module, which is not compiled."""
    report = Report()
    options = PipelineOptions(make_target(target), report=report, **chosen)
    tvm.transform.Sequential([*phase0_annotate(options), *phase1_fuse(options)])(mod)
    return report


def fill_cache(build: Callable[[Any], Any], jobs: Iterable[Any]) -> None:
    """Build jobs in processes for the sake of the kernels' cache; say what failed, and the time.

    Parameters
    ----------
    build : callable
        At the top level of a module, as are the jobs' types: both go to other processes.
    jobs : iterable
        What `build` takes; each has a ``name``.
    """
    jobs, began = list(jobs), time.monotonic()
    workers = min(len(jobs), max(1, len(os.sched_getaffinity(0)) // 2))
    if not jobs:
        return
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            said = list(pool.map(partial(why_not_built, build), jobs))
    except (OSError, BrokenProcessPool) as err:
        said = [f"in parallel: {err}; each will be compiled when it is needed"]
    for why in filter(None, said):
        print(f"NOT COMPILED {why}", flush=True)
    print(f"{len(jobs)} jobs compiled in {time.monotonic() - began:.0f} s", flush=True)


def in_halves(
    build: Callable[[list[Any]], dict[Any, Any]], items: Iterable[Any]
) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Build items together, for each takes a linker's time; where that fails, halves of them.

    Returns
    -------
    built : dict
        What `build` returns, of those that can be built.
    failed : dict of item to str
        Why the others cannot.
    """
    items = list(items)
    if not items:
        return {}, {}
    try:
        return build(items), {}
    except Exception as err:
        if len(items) == 1:
            return {}, {items[0]: sentence(err)}
    half = len(items) // 2
    (built, failed), rest = (in_halves(build, part) for part in (items[:half], items[half:]))
    return built | rest[0], failed | rest[1]


def why_not_built(build: Callable[[Any], Any], job: Any) -> str:
    """Build a job; return what went wrong, or nothing."""
    try:
        build(job)
    except Exception as err:
        return f"{job.name}: {sentence(err)}"
    return ""
