"""Matmuls on tensor cores whose reduction is cut into parts, added up by clusters, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from relax_fusion.estimator.families.tensor_cores import family
from relax_fusion.estimator.families.tensor_cores import tiles as mma
from relax_fusion.estimator.families.tensor_cores.family import TensorCores
from relax_fusion.estimator.registry import violations
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of

from ..support.contraction_cases import HALF, ROWS, Case, plain, tensor_core_cases
from ..support.estimator_cases import plans_of
from ..support.gpu import build_on_gpu, call_on_gpu, gpu_target, needs_gpu, results_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES = [c for c in tensor_core_cases() if c.name != "tensor_one_tile"]


def split_plans(case: Case) -> list[TilePlan]:
    """Return plans of both families with several parts, whether or not their tiles pad much."""
    dev = device_of(gpu_target())
    with mock.patch.object(family, "columns_fit", return_value=True):
        found = plans_of(TensorCores(), replace(case.work, rows=ROWS), dev)
    plans = [p for p in found if p.split_k > 1 and not violations(p, case.work, dev)]
    if not plans:
        pytest.skip(f"{dev.label} has no clusters")
    chosen = []
    for name in mma.FAMILIES:
        own = sorted((p for p in plans if p.family == name), key=lambda p: p.split_k)
        chosen += [own[len(own) // 5], own[-1]] if own else []
    return chosen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_the_reduction_add_up(case: Case) -> None:
    """With k that parts and steps do not divide."""
    case = Case(case.name, replace(case.work, k=1032 + case.work.k % 8))
    for plan in split_plans(case):
        case.check(case.inputs(), results_on_gpu(case, plan))


def test_rows_may_be_dynamic() -> None:
    work = replace(HALF, rows=ROWS, k=2048, outputs=(plain(320, "bias", "residual"),))
    for plan in split_plans(Case("dynamic", work)):
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
    plan = PlanTable.single(split_plans(case)[-1])
    run = build_on_gpu(case.work, plan, gpu_target())["main"]
    found = [call_on_gpu(run, arrays.values(), case.out_shapes())[0] for _ in range(5)]
    first, *others = found
    assert all((first == other).all() for other in others)
