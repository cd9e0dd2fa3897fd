"""No plan launches more blocks along a dimension of a grid than devices take."""

from __future__ import annotations

import pytest

from relax_fusion.errors import TilePlanError
from relax_fusion.estimator import Choice, Problem, choose, violations
from relax_fusion.estimator.family import Offer, Option
from relax_fusion.estimator.limits import GRID_YZ
from relax_fusion.estimator.ranges import Breaks, ranges
from relax_fusion.estimator.registry import family_of
from relax_fusion.estimator.search import asked_in
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.workload import Attention, Dim, DynamicDim, NormMatmul, Projection

H200 = device("h200")
DOTS = TilePlan(1, 4, 256, num_warps=4, reg_n=1, lanes=4, family="dot_products")
GEMV = TilePlan(1, 2, 256, num_warps=4, family="gemv")
TILES = TilePlan(16, 8, 16, num_warps=2, reg_m=2, reg_n=1, lanes=1, family="fma_tiles")
MANY = GRID_YZ + 1


def work(rows: Dim, n: int = 64, dtype: str = "float32") -> NormMatmul:
    return NormMatmul(rows, 1024, (Projection(n, "nk"),), None, dtype, dtype)


def wrong(plan: TilePlan, rows: Dim, n: int = 64) -> list[str]:
    most = rows if isinstance(rows, int) else rows.upper
    dtype = "float16" if plan is GEMV else "float32"
    return [s for s in violations(plan, work(rows, n, dtype), H200, most) if "blocks along" in s]


def offered(*plans: TilePlan) -> list[TilePlan]:
    """Return the plans that are priced in the open range."""
    many = Problem(work(DynamicDim("n")), H200)
    found = [
        Option(family_of(plan), many, Offer(plan, most=GRID_YZ if plan is DOTS else None))
        for plan in plans
    ]
    return [o.plan for o in asked_in(found, ranges(many.work, Breaks())[-1])[0]]


@pytest.mark.parametrize("plan", [DOTS, GEMV])
def test_a_block_for_each_row(plan: TilePlan) -> None:
    assert wrong(plan, GRID_YZ) == [] == wrong(plan, DynamicDim("n"))
    for rows in (MANY, DynamicDim("n", MANY)):
        (sentence,) = wrong(plan, rows)
        assert f"{MANY} blocks along the rows" in sentence and str(GRID_YZ) in sentence


def test_a_block_for_each_tile_of_columns() -> None:
    assert wrong(TILES, 64, GRID_YZ * 8) == []
    assert "along the columns" in wrong(TILES, 64, GRID_YZ * 8 + 1)[0]
    assert wrong(GEMV, 64, GRID_YZ * 8) == [], "those of a GEMV lie along the first dimension"


def test_heads_and_query_positions_of_attention() -> None:
    plan = TilePlan(16, 32, 64, num_warps=4, family="attention")
    sizes = (1, GRID_YZ * 16 + 1, 128, MANY, MANY, 64, 64)
    many = Attention(*sizes, 0.125, None, None, "float16", "float16")
    found = [s for s in violations(plan, many, H200, many.q_len) if "blocks along" in s]
    assert len(found) == 2 and "query positions" in found[0] and "heads" in found[1]


def test_a_users_plan_for_too_many_rows_is_refused() -> None:
    tiles = TilePlan(*(64, 64, 64), num_warps=4, num_stages=3, family="pointer")
    few = PlanTable(((1, GEMV), (None, tiles)))
    assert isinstance(choose(work(DynamicDim("n", MANY), dtype="float16"), H200, plans=few), Choice)
    for rows in (MANY, DynamicDim("n", MANY)):
        with pytest.raises(TilePlanError, match=f"{MANY} blocks along the rows"):
            choose(work(rows, dtype="float16"), H200, plans=GEMV)


def test_what_is_chosen_can_be_launched() -> None:
    for n in (1, 8, 64):
        for rows in (MANY, DynamicDim("n"), DynamicDim("n", MANY)):
            choice = choose(work(rows, n), H200, always=True)
            assert isinstance(choice, Choice)
            last = choice.plans.entries[-1][1]
            assert not violations(last, work(rows, n), H200, MANY), last
    assert offered(DOTS, TILES) == [TILES]
    assert offered(DOTS) == [DOTS]
