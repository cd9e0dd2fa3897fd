"""The attention kernels of the TIR path, run on a GPU."""

from __future__ import annotations

import pytest

from relax_fusion.estimator import candidates
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware.target import device_of

from ..support.attention_cases import Case, cases, in_half
from ..support.gpu import gpu_target, needs_gpu, plans_for, run_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def check(case: Case, plans: PlanTable) -> None:
    arrays = case.inputs()
    inputs = [*arrays.values(), *([case.lengths[2]] if case.work.kv_prefix else [])]
    (got,) = run_on_gpu(case.work, plans, inputs, [(case.out_shape(), case.work.out_dtype)])
    case.check(arrays, got)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_attention_matches_reference(case: Case) -> None:
    check(case, plans_for(case.work, gpu_target()))


@pytest.mark.parametrize("largest", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("case", in_half(), ids=lambda case: case.name)
def test_halves_match_reference(case: Case, largest: bool) -> None:
    found = list(candidates(case.work, device_of(gpu_target()), "tir"))
    found.sort(key=lambda plan: (plan.block_m * plan.block_n, plan.num_warps))
    check(case, PlanTable.single(found[-largest]))
