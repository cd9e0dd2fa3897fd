"""Functions of kernels of both back ends, run on a GPU at sizes of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from relax_fusion.dlight_rules import FusedRule, ScheduleKernels
from relax_fusion.estimator import candidates, choose
from relax_fusion.estimator.choose import Choice
from relax_fusion.estimator.tile_plan import Box, PlanTable
from relax_fusion.hardware.target import device_of
from relax_fusion.triton_bridge import EmbedTritonKernels, EmitTritonKernels
from relax_fusion.workload import DynamicDim, NormMatmul, Projection, Workload

from ..support.attention_cases import Case as AttentionCase
from ..support.contraction_cases import RMS, Case
from ..support.estimator_cases import CACHE as LARGE
from ..support.gpu import gpu_target, needs_gpu
from ..support.triton_modules import module_of, run_triton

pytestmark = [pytest.mark.gpu, needs_gpu]

STEPS = Projection(256, "nk", ("bias", "residual"))
WORK = NormMatmul(DynamicDim("rows"), 256, (STEPS,), RMS, "float16", "float16")
CACHE = replace(LARGE, q_heads=8, kv_heads=2, head_dim=64, v_dim=64, scale=0.125)


def built(work: Workload, table: PlanTable) -> tvm.runtime.Executable:
    """Compile a function of both back ends."""
    target = gpu_target()
    mod = ScheduleKernels(target, [FusedRule()])(module_of(work, table, outputs=1))
    return tvm.compile(EmbedTritonKernels()(EmitTritonKernels(target)(mod)), target)


def two_plans(work: Workload) -> list:
    """Return a plan of each back end."""
    dev = device_of(gpu_target())
    return [next(iter(candidates(work, dev, backend))) for backend in ("tir", "triton")]


@pytest.mark.parametrize("turned", [False, True], ids=["tir first", "triton first"])
def test_rows_of_each_back_end(turned: bool) -> None:
    first, second = two_plans(WORK)[:: -1 if turned else 1]
    executable = built(WORK, PlanTable(((4, first), (32, second), (70, first), (None, second))))
    for rows in (1, 4, 5, 32, 33, 70, 71, 200):
        case = Case(f"rows {rows}", WORK, rows)
        arrays = case.inputs()
        case.check(arrays, run_triton(executable, list(arrays.values())), stored=True)


def test_the_table_that_the_estimator_chooses() -> None:
    choice = choose(WORK, device_of(gpu_target()), always=True)
    assert isinstance(choice, Choice)
    executable = built(WORK, choice.plans)
    uppers = [box.rows for box, _ in choice.plans.boxes if box.rows is not None]
    for rows in sorted({1, *uppers, *(upper + 1 for upper in uppers)}):
        case = Case(f"rows {rows}", WORK, rows)
        arrays = case.inputs()
        case.check(arrays, run_triton(executable, list(arrays.values())), stored=True)


@pytest.mark.parametrize("turned", [False, True], ids=["tir first", "triton first"])
def test_boxes_of_keys_and_batch(turned: bool) -> None:
    first, second = two_plans(CACHE)[:: -1 if turned else 1]
    boxes = ((Box(1, keys=100, batch=2), first), (Box(16, batch=2), second), (None, first))
    executable = built(CACHE, PlanTable(boxes))
    for batch, queries, keys in ((1, 1, 100), (2, 1, 101), (3, 1, 50), (2, 7, 300), (1, 40, 77)):
        sizes = {"batch": batch, "q_len": queries, "kv_len": keys, "kv_capacity": 320}
        case = AttentionCase(f"{sizes}", CACHE, sizes)
        arrays = case.inputs()
        (got,) = run_triton(executable, [*arrays.values(), keys])
        case.check(arrays, got, stored=True)
