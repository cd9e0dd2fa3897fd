"""Random kernels: workloads with legal plans, on this processor and in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import tvm
from tvm import ir
from tvm.runtime import tensor

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator import candidates
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of
from relax_fusion.options import make_options
from relax_fusion.pipeline import schedule_kernels
from relax_fusion.workload import Attention, Chain, DynamicDim

from ..support.quick import loaded, quick_host, quickly
from ..support.workloads import results
from .findings import Failure, Findings
from .workloads import KINDS, Case, Chooser

FAMILIES = ("gemv", "packed_gemv", "pointer")
"""Triton's kernels that its interpreter runs; those in Gluon have tests of their own."""


@dataclass(frozen=True)
class Kernel:
    """A workload with a plan for each range of its rows."""

    seed: int
    case: Case
    plans: PlanTable

    def failed(self, err: Exception) -> Failure:
        """Return the failure of a kernel by an error."""
        said = f"{self.case.work} by {self.plans}: {type(err).__name__}: {str(err)[-300:]}"
        return Failure(self.seed, said)


def draw(seed: int, dev: DeviceSpec, backend: str) -> Kernel | None:
    """Return the kernel of a seed; None if no plan fits its workload."""
    rng = Random(seed)
    kinds = KINDS if backend == "tir" else tuple(k for k in KINDS if k != "chain")
    chooser = Chooser(rng) if backend == "tir" else Chooser(rng, ("float16",))
    case = chooser.case(rng.choice(kinds))
    found = list(islice(candidates(case.work, dev, backend), 400))
    if backend == "triton":
        found = [p for p in found if p.family in FAMILIES]
        found = [p for p in found if p.block_m <= 64 and p.block_n <= 64]
    if not found:
        return None
    work = case.work
    dynamic = work.q_len if isinstance(work, Attention) else work.rows
    uppers = (1, 4, None) if isinstance(dynamic, DynamicDim) and rng.random() < 0.5 else (None,)
    if backend == "triton":
        uppers = (None,)
    return Kernel(seed, case, PlanTable(tuple((u, rng.choice(found)) for u in uppers)))


def label(kernel: Kernel) -> str:
    """Return which workload a kernel computes, by which family."""
    plan = kernel.plans.entries[-1][1]
    return f"{type(kernel.case.work).__name__} {plan.family or 'tir'}"


# --- on this processor -----------------------------------------------------------------------


def explore(seeds: Sequence[int]) -> Findings:
    """Compile kernels together, and compare each with its reference."""
    target = quick_host()
    found = Findings()
    kernels = []
    for seed in seeds:
        found.count += 1
        kernel = draw(seed, device_of(target), "tir")
        if kernel is None:
            found.seen["skipped"]["no plan"] += 1
        else:
            kernels.append(kernel)
    for kernel, run in zip(kernels, compiled(kernels, found), strict=True):
        if run is None:
            continue
        found.seen["kernels"][label(kernel)] += 1
        try:
            check(kernel, run)
        except (AssertionError, ValueError, RuntimeError) as err:
            found.failures.append(kernel.failed(err))
    return found


def compiled(kernels: Sequence[Kernel], found: Findings) -> list[Any]:
    """Return a callable for each kernel: all from one library, or alone where that fails."""
    target = quick_host()
    functions = {}
    for kernel in kernels:
        func = build_prim_func(kernel.case.work, kernel.plans)
        functions[f"f{kernel.seed}"] = func.with_attr("global_symbol", f"f{kernel.seed}")
    if not functions:
        return []
    try:
        mod = schedule_kernels(make_options(target, {}))(ir.IRModule(functions))
        library = loaded(quickly(mod, target=target))
    except (tvm.error.InternalError, RuntimeError, ValueError, TypeError) as err:
        if len(kernels) == 1:
            found.failures.append(kernels[0].failed(err))
            return [None]
        return [run for kernel in kernels for run in compiled([kernel], found)]
    return [library[f"f{kernel.seed}"] for kernel in kernels]


def check(kernel: Kernel, run: Any) -> None:
    """Run a kernel, and compare it with its reference."""
    case = kernel.case
    arrays = case.inputs()
    scalar = [case.lengths[2]] if isinstance(case.work, Attention) and case.work.kv_prefix else []
    outs = [tvm.runtime.empty(shape, dtype) for shape, dtype in results(case.work, sizes_of(case))]
    run(*(tensor(a) for a in arrays.values()), *scalar, *outs)
    judge(case, arrays, [o.numpy() for o in outs], stored=False)


def sizes_of(case: Any) -> dict[str, int]:
    """Return the sizes of the dynamic dimensions of a case, by their names in the graph."""
    found: dict[str, int] = case.named if isinstance(case.work, Attention) else case.sizes
    return found


def judge(case: Any, arrays: Any, found: list[np.ndarray], stored: bool) -> None:
    """Hold results to the limits of their cases."""
    if isinstance(case.work, Attention):
        case.check(arrays, found[0], stored)
    elif isinstance(case.work, Chain):
        case.check(arrays, found[0])
    else:
        case.check(arrays, found, stored)
