"""The contraction kernels of the TIR path, run on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.few_rows import tiles as few_rows
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import Norm

from ..support.contraction_cases import (
    DYNAMIC_ROWS,
    HALF,
    LAYER,
    RMS,
    ROWS,
    Case,
    cases,
    dynamic_works,
    few_rows_cases,
    tensor_core_cases,
)
from ..support.gpu import gpu_target, needs_gpu, plans_for, run_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES = [c for c in cases() if c.work.k > 1 and not (c.work.norm and c.work.norm.each)]
"""TIR has no plan on a GPU for k = 1, nor for a gamma of each sequence."""


def _check(case: Case, plans: PlanTable) -> None:
    """Compare with the reference; tensor cores multiply rows that are rounded after their norm."""
    stored = any(plan.family for _, plan in plans.entries)
    arrays = case.inputs()
    results = run_on_gpu(case.work, plans, list(arrays.values()), case.out_shapes())
    case.check(arrays, results, stored)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chosen_plan_matches_reference(case: Case) -> None:
    _check(case, plans_for(case.work, gpu_target()))


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_other_plans_match_reference(case: Case) -> None:
    plans = list(candidates(case.work, device_of(gpu_target()), "tir"))
    for plan in (plans[0], plans[len(plans) // 2], plans[-1]):
        _check(case, PlanTable.single(plan))


def _tensor_core_plans(case: Case, family: str = "mma") -> list[TilePlan]:
    found = candidates(case.work, device_of(gpu_target()), "tir")
    return [plan for plan in found if plan.family == family]


@pytest.mark.parametrize("case", tensor_core_cases(), ids=lambda case: case.name)
def test_tensor_cores_match_reference(case: Case) -> None:
    plans = _tensor_core_plans(case)
    groups = _tensor_core_plans(case, "wgmma")  # none for weights [k, n]
    for plan in (plans[0], plans[-1], *groups[:1], *groups[-1:]):
        _check(case, PlanTable.single(plan))


@pytest.mark.parametrize("k", [256, 98])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", [RMS, LAYER], ids=lambda norm: norm.kind)
def test_tensor_cores_match_reference_behind_a_norm(norm: Norm, residual: bool, k: int) -> None:
    norm = replace(norm, residual=residual, returns_sum=residual, returns_norm=residual)
    for dtype in ("float16", "bfloat16"):
        work = replace(HALF, k=k, norm=norm, dtype=dtype, out_dtype=dtype)
        case = Case(dtype, work)
        _check(case, PlanTable.single(_tensor_core_plans(case)[-1]))


@pytest.mark.parametrize("case", few_rows_cases(), ids=lambda case: case.name)
def test_few_rows_match_reference(case: Case) -> None:
    plans = _tensor_core_plans(case, "few_rows")
    of_each_kind = {(plan.split_k > 1, few_rows.normalises(plan)): plan for plan in plans}
    for plan in (plans[0], *of_each_kind.values()):
        _check(case, PlanTable.single(plan))


@pytest.mark.parametrize("family", ["mma", "few_rows"])
def test_no_rows_are_no_work(family: str) -> None:
    case = Case("none", replace(HALF, rows=ROWS, norm=RMS), 0)
    _check(case, PlanTable.single(_tensor_core_plans(case, family)[0]))


@pytest.mark.parametrize("name", dynamic_works())
def test_every_range_matches_reference(name: str) -> None:
    work = dynamic_works()[name]
    plans = plans_for(work, gpu_target())
    for rows in (*DYNAMIC_ROWS, 100, 300):
        _check(Case(name, work, rows), plans)
