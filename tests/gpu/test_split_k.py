"""Matmuls on tensor cores whose reduction is cut into parts, added up by clusters, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import tvm

from relax_fusion.estimator.families.tensor_cores import family
from relax_fusion.estimator.families.tensor_cores import tiles as mma
from relax_fusion.estimator.families.tensor_cores.family import TensorCores
from relax_fusion.estimator.registry import violations
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of

from ..support.contraction_cases import HALF, ROWS, Arrays, Case, plain, tensor_core_cases
from ..support.estimator_cases import plans_of
from ..support.gpu import build_on_gpu, gpu_target, needs_gpu, run_on_gpu

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
    arrays = case.inputs()
    for plan in split_plans(case):
        results = run_on_gpu(
            case.work, PlanTable.single(plan), list(arrays.values()), case.out_shapes()
        )
        case.check(arrays, results)


def test_rows_may_be_dynamic() -> None:
    work = replace(HALF, rows=ROWS, k=2048, outputs=(plain(320, "bias", "residual"),))
    for plan in split_plans(Case("dynamic", work)):
        run = build_on_gpu(work, PlanTable.single(plan), gpu_target())["main"]
        for rows in (0, 1, 64, 77, 300):
            case = Case(f"{plan.key} {rows} rows", work, rows)
            arrays = case.inputs()
            result = _called(run, case, arrays)
            if rows:
                case.check(arrays, [result])


def test_the_same_comes_out_every_time() -> None:
    case = Case("again", replace(HALF, k=4096, outputs=(plain(256),)))
    arrays = case.inputs()
    plan = PlanTable.single(split_plans(case)[-1])
    run = build_on_gpu(case.work, plan, gpu_target())["main"]
    first, *others = (_called(run, case, arrays) for _ in range(5))
    assert all((first == other).all() for other in others)


def _called(run: Callable[..., None], case: Case, arrays: Arrays) -> np.ndarray:
    """Return the one result of a kernel."""
    dev = tvm.cuda(0)
    ((shape, dtype),) = case.out_shapes()
    out = tvm.runtime.empty(shape, dtype, dev)
    run(*(tvm.runtime.tensor(a, dev) for a in arrays.values()), out)
    dev.sync()
    return out.numpy()
