"""Matmuls on tensor cores whose reduction is cut into parts, added up by clusters, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of

from ..support.contraction_cases import HALF, ROWS, Case, plain, tensor_core_cases
from ..support.estimator_cases import split_plans
from ..support.gpu import build_on_gpu, call_on_gpu, gpu_target, needs_gpu, results_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES = [c for c in tensor_core_cases() if c.name != "tensor_one_tile"]


def plans(case: Case) -> list[TilePlan]:
    dev = device_of(gpu_target())
    return split_plans(case.work, dev) or pytest.skip(f"{dev.label} has no clusters")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_the_reduction_add_up(case: Case) -> None:
    """With k that parts and steps do not divide."""
    case = Case(case.name, replace(case.work, k=1032 + case.work.k % 8))
    for plan in plans(case):
        case.check(case.inputs(), results_on_gpu(case, plan))


def test_rows_may_be_dynamic() -> None:
    work = replace(HALF, rows=ROWS, k=2048, outputs=(plain(320, "bias", "residual"),))
    for plan in plans(Case("dynamic", work)):
        run = build_on_gpu(work, PlanTable.single(plan), gpu_target())["main"]
        for rows in (0, 1, 64, 77, 300):
            case = Case(f"{plan.key} {rows} rows", work, rows)
            arrays = case.inputs()
            results = call_on_gpu(run, arrays.values(), case.out_shapes())
            if rows:
                case.check(arrays, results)


def test_the_same_comes_out_every_time() -> None:
    case = Case("again", replace(HALF, k=4096, outputs=(plain(256),)))
    arrays = case.inputs()
    plan = PlanTable.single(plans(case)[-1])
    run = build_on_gpu(case.work, plan, gpu_target())["main"]
    found = [call_on_gpu(run, arrays.values(), case.out_shapes())[0] for _ in range(5)]
    first, *others = found
    assert all((first == other).all() for other in others)
