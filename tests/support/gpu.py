"""What the GPU tests share: is there a GPU, and running one PrimFunc on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.errors import TargetError
from relax_fusion.estimator import candidates, choose
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import Workload


@cache
def gpu() -> bool:
    """Tell whether TVM sees an NVIDIA GPU here."""
    try:
        return bool(tvm.cuda(0).exist)
    except RuntimeError:
        return False


needs_gpu = pytest.mark.skipif(not gpu(), reason="needs an NVIDIA GPU and its driver")


@cache
def gpu_target() -> Target:
    """Return the target of the GPU at hand: its device of the table, else its architecture."""
    name = str(tvm.cuda(0).device_name).lower()
    known = next((n for n in ("h200", "h100", "a100") if n in name), None)
    try:
        if known:
            return make_target(known)
    except TargetError:
        pass
    return Target({"kind": "cuda", "arch": f"sm_{tvm.cuda(0).compute_version.replace('.', '')}"})


def plans_for(work: Workload, target: Target) -> PlanTable:
    """Return the estimator's plans; where it would not fuse, the first candidate."""
    dev = device_of(target)
    choice = choose(work, dev, backend="tir")
    return getattr(choice, "plans", None) or PlanTable.single(next(candidates(work, dev, "tir")))


def build_on_gpu(work: Workload, plans: PlanTable, target: Target) -> tvm.runtime.Executable:
    """Schedule and build the PrimFunc of a workload."""
    func = build_prim_func(work, plans).with_attr("global_symbol", "main")
    schedule = FusedRule().apply(func, target, False)
    assert schedule is not None, "no rule of ours schedules this workload"
    return tvm.compile(schedule.mod, target=target)


def run_on_gpu(
    work: Workload,
    plans: PlanTable,
    inputs: list[np.ndarray | int],
    outputs: list[tuple[tuple[int, ...], str]],
) -> list[np.ndarray]:
    """Build the kernel of a workload and run it once."""
    return call_on_gpu(build_on_gpu(work, plans, gpu_target())["main"], inputs, outputs)


def results_on_gpu(case: Any, plan: TilePlan) -> list[np.ndarray]:
    """Return what the kernel of a case makes of its inputs under a plan."""
    inputs = list(case.inputs().values())
    return run_on_gpu(case.work, PlanTable.single(plan), inputs, case.out_shapes())


def call_on_gpu(
    run: Callable[..., None],
    inputs: Iterable[np.ndarray | int],
    outputs: Iterable[tuple[tuple[int, ...], str]],
) -> list[np.ndarray]:
    """Call a kernel with arrays, and with room for results of these shapes and dtypes."""
    dev = tvm.cuda(0)
    args = [a if isinstance(a, int) else tvm.runtime.tensor(a, dev) for a in inputs]
    outs = [tvm.runtime.empty(shape, dtype, dev) for shape, dtype in outputs]
    run(*args, *outs)
    dev.sync()
    return [o.numpy() for o in outs]
