"""The contraction kernels of the TIR path, run on a GPU."""

from __future__ import annotations

import pytest

from relax_fusion.estimator import candidates
from relax_fusion.target import device_of
from relax_fusion.tile_plan import PlanTable

from .common import gpu_target, needs_gpu, plans_for, run_on_gpu
from .contraction_cases import DYNAMIC_ROWS, Case, cases, dynamic_works

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES = [case for case in cases() if case.work.k > 1]  # k = 1 has no plan on a GPU


def _check(case: Case, plans: PlanTable) -> None:
    arrays = case.inputs()
    case.check(arrays, run_on_gpu(case.work, plans, list(arrays.values()), case.out_shapes()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chosen_plan_matches_reference(case: Case) -> None:
    _check(case, plans_for(case.work, gpu_target()))


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_other_plans_match_reference(case: Case) -> None:
    plans = list(candidates(case.work, device_of(gpu_target())))
    for plan in (plans[0], plans[len(plans) // 2], plans[-1]):
        _check(case, PlanTable.single(plan))


@pytest.mark.parametrize("name", dynamic_works())
def test_every_range_matches_reference(name: str) -> None:
    work = dynamic_works()[name]
    plans = plans_for(work, gpu_target())
    for rows in (*DYNAMIC_ROWS, 100, 300):
        _check(Case(name, work, rows), plans)
