"""The attention kernels of the TIR path, run on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.tensor_cores import tiles as mma
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of

from ..support.attention_cases import Case, cases, in_half
from ..support.gpu import gpu_target, needs_gpu, plans_for, run_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def check(case: Case, plans: PlanTable, stored: bool) -> None:
    arrays = case.inputs()
    inputs = [*arrays.values(), *([case.lengths[2]] if case.work.kv_prefix else [])]
    (got,) = run_on_gpu(case.work, plans, inputs, [(case.out_shape(), case.work.out_dtype)])
    case.check(arrays, got, stored)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_attention_matches_reference(case: Case) -> None:
    plans = plans_for(case.work, gpu_target())
    check(case, plans, any(plan.family == mma.FAMILY for _, plan in plans.entries))


def wide(case: Case) -> Case:
    """Return a case with features for many operands of a row, and more positions."""
    work = replace(case.work, head_dim=128, v_dim=128, scale=128**-0.5)
    return replace(case, name=f"{case.name}_wide", work=work)


def tensor_core_plans(case: Case) -> list[TilePlan]:
    """Return the smallest and the largest plan of a case."""
    found = candidates(case.work, device_of(gpu_target()))
    ordered = sorted(
        (plan for plan in found if plan.family == mma.FAMILY),
        key=lambda p: (p.block_m * p.block_n, p.reg_m, p.num_stages),
    )
    whole = [plan for plan in ordered if plan.split_k == 1]
    return [whole[0], whole[-1]]


PARTS = ("window_decode", "cache_dynamic", "sinks_far_apart", "dynamic_3x1x130", "odd_dims")


@pytest.mark.parametrize("case", [c for c in in_half() if c.name in PARTS], ids=lambda c: c.name)
def test_parts_of_the_keys_match_reference(case: Case) -> None:
    plan = replace(tensor_core_plans(case)[0], split_k=5)
    check(case, PlanTable.single(plan), True)


@pytest.mark.parametrize("largest", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("case", in_half(), ids=lambda case: case.name)
def test_tensor_cores_match_reference(case: Case, largest: bool) -> None:
    case = wide(case) if largest and case.work.head_dim == 32 else case
    check(case, PlanTable.single(tensor_core_plans(case)[largest]), True)
