"""Chains of two matmuls on tensor cores, run on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import candidates
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware.target import device_of

from ..support.chain_cases import ChainCase, tensor_core_chains
from ..support.gpu import gpu_target, needs_gpu, run_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def check(case: ChainCase, plans: PlanTable) -> None:
    arrays = case.inputs()
    outs = [(case.out_shape(), case.work.out_dtype)]
    (result,) = run_on_gpu(case.work, plans, list(arrays.values()), outs)
    case.check(arrays, result)


@pytest.mark.parametrize("name", tensor_core_chains())
def test_plans_match_reference(name: str) -> None:
    case, plan = tensor_core_chains()[name]
    check(case, PlanTable.single(plan))
    found = list(candidates(case.work, device_of(gpu_target())))
    for other in (found[0], found[len(found) // 2], found[-1]):
        check(case, PlanTable.single(other))


@pytest.mark.parametrize("rows", [1, 16, 31, 100])
def test_dynamic_rows_in_every_range(rows: int) -> None:
    case, plan = tensor_core_chains()["dynamic"]
    table = PlanTable(((16, replace(plan, block_m=16, num_warps=1)), (None, plan)))
    check(replace(case, dynamic_rows=rows), table)
