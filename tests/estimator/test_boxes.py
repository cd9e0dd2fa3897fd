"""Plan tables over boxes: which plan serves, what is refused, and what no launch can do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from relax_fusion.errors import TilePlanError
from relax_fusion.estimator import Choice, Problem, choose, predict, violations
from relax_fusion.estimator.family import Offer, Option
from relax_fusion.estimator.limits import GRID_YZ
from relax_fusion.estimator.ranges import Breaks, ranges
from relax_fusion.estimator.registry import candidates, family_of, is_launched, table_of
from relax_fusion.estimator.search import asked_in
from relax_fusion.estimator.shape import AttentionSize
from relax_fusion.estimator.tile_plan import OPEN, Box, PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.workload import Attention, Dim, DynamicDim, NormMatmul, Projection

from ..support.estimator_cases import CACHE

H200 = device("h200")
A, B, C = (TilePlan(n, 16, 16, family="words") for n in (1, 2, 4))


def test_the_first_box_that_holds_decides() -> None:
    table = PlanTable(((Box(1, keys=1024), A), (16, B), (None, C)))
    assert table.plan_for(1, keys=1024) == A
    assert table.plan_for(1, keys=1025) == B
    assert table.plan_for(17, keys=1) == C
    assert table_of(table.to_attr()) == table
    assert [str(box) for box, _ in table.boxes] == [
        "rows <= 1, keys <= 1024",
        "rows <= 16",
        "any size",
    ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (((16, A),), "the last range must be open"),
        ((), "the last range must be open"),
        (((None, A), (16, B), (None, C)), "rows <= 16 comes behind any size, which serves it"),
        (((16, A), (8, B), (None, C)), "rows <= 8 comes behind rows <= 16"),
        (((16, A), (Box(16, keys=8), B), (None, C)), "rows <= 16, keys <= 8 comes behind"),
        (((None, A), (OPEN, B)), "any size comes behind any size"),
    ],
)
def test_tables_that_are_refused(entries: tuple, message: str) -> None:
    with pytest.raises(TilePlanError, match=message):
        PlanTable(entries)


@pytest.mark.parametrize("bound", [0, -1, 1.5, "8", 2**80])
def test_bounds_that_are_no_sizes(bound: object) -> None:
    with pytest.raises(TilePlanError, match="box: keys is "):
        Box(16, keys=bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["tir", "triton"])
def test_few_kernels_serve_all_batches_and_numbers_of_keys(backend: str) -> None:
    choice = choose(CACHE, H200, backend=backend, always=True)
    assert isinstance(choice, Choice)
    plans = {plan for _, plan in choice.plans.boxes}
    assert len(plans) <= 12
    found = [o for o in candidates(CACHE, H200, backend) if o.block_m <= 128]
    losses = []
    for batch, keys in product((1, 8, 64), (128, 1024, 8192)):
        size = AttentionSize(batch, 1, keys)
        best = min(predict(CACHE, p, H200, size).seconds for p in found)
        served = choice.plans.plan_for(1, keys=keys, batch=batch)
        losses.append(predict(CACHE, served, H200, size).seconds / best)
    assert max(losses) < 1.4 and sum(losses) / len(losses) < 1.12
    one = choose(replace(CACHE, batch=1, kv_len=1024), H200, backend=backend, always=True)
    assert isinstance(one, Choice)
    assert all(box == Box(box.rows) for box, _ in one.plans.boxes)


def test_families_compete_by_price_where_they_are_no_fallback() -> None:
    work = NormMatmul(
        DynamicDim("rows"), 4096, (Projection(4096, "nk"),), None, "float16", "float16"
    )
    both, tir, triton = (
        choose(work, H200, backend=b, always=True) for b in ("auto", "tir", "triton")
    )
    assert isinstance(both, Choice) and isinstance(tir, Choice) and isinstance(triton, Choice)
    assert {is_launched(p) for _, p in both.plans.entries} == {False, True}
    assert {p.family for _, p in both.plans.entries if not is_launched(p)} == {"few_rows"}
    for size in (1, 16, 64, 512, 1024):
        rivals = (tir, triton) if size <= 16 else (triton,)
        least = min(predict(work, c.plans.plan_for(size), H200, size).seconds for c in rivals)
        assert predict(work, both.plans.plan_for(size), H200, size).seconds <= least * 1.001


DOTS = TilePlan(1, 4, 256, num_warps=4, reg_n=1, lanes=4, family="dot_products")
GEMV = TilePlan(1, 2, 256, num_warps=4, family="gemv")
TILES = TilePlan(16, 8, 16, num_warps=2, reg_m=2, reg_n=1, lanes=1, family="fma_tiles")
MANY = GRID_YZ + 1


def matmul_of(rows: Dim, n: int = 64, dtype: str = "float32") -> NormMatmul:
    return NormMatmul(rows, 1024, (Projection(n, "nk"),), None, dtype, dtype)


def too_long(plan: TilePlan, rows: Dim, n: int = 64) -> list[str]:
    most = rows if isinstance(rows, int) else rows.upper
    dtype = "float16" if plan is GEMV else "float32"
    return [
        s for s in violations(plan, matmul_of(rows, n, dtype), H200, most) if "blocks along" in s
    ]


def offered(*plans: TilePlan) -> list[TilePlan]:
    """Return the plans that are priced in the open range."""
    many = Problem(matmul_of(DynamicDim("n")), H200)
    found = [
        Option(family_of(plan), many, Offer(plan, most=GRID_YZ if plan is DOTS else None))
        for plan in plans
    ]
    return [o.plan for o in asked_in(found, ranges(many.work, Breaks())[-1])[0]]


@pytest.mark.parametrize("plan", [DOTS, GEMV])
def test_a_block_for_each_row(plan: TilePlan) -> None:
    assert too_long(plan, GRID_YZ) == [] == too_long(plan, DynamicDim("n"))
    for rows in (MANY, DynamicDim("n", MANY)):
        (sentence,) = too_long(plan, rows)
        assert f"{MANY} blocks along the rows" in sentence and str(GRID_YZ) in sentence


def test_a_block_for_each_tile_of_columns() -> None:
    assert too_long(TILES, 64, GRID_YZ * 8) == []
    assert "along the columns" in too_long(TILES, 64, GRID_YZ * 8 + 1)[0]
    assert too_long(GEMV, 64, GRID_YZ * 8) == [], "those of a GEMV lie along the first dimension"


def test_heads_and_query_positions_of_attention() -> None:
    plan = TilePlan(16, 32, 64, num_warps=4, family="attention")
    sizes = (1, GRID_YZ * 16 + 1, 128, MANY, MANY, 64, 64)
    many = Attention(*sizes, 0.125, None, None, "float16", "float16")
    found = [s for s in violations(plan, many, H200, many.q_len) if "blocks along" in s]
    assert len(found) == 2 and "query positions" in found[0] and "heads" in found[1]


def test_a_users_plan_for_too_many_rows_is_refused() -> None:
    tiles = TilePlan(*(64, 64, 64), num_warps=4, num_stages=3, family="pointer")
    few = PlanTable(((1, GEMV), (None, tiles)))
    assert isinstance(
        choose(matmul_of(DynamicDim("n", MANY), dtype="float16"), H200, plans=few), Choice
    )
    for rows in (MANY, DynamicDim("n", MANY)):
        with pytest.raises(TilePlanError, match=f"{MANY} blocks along the rows"):
            choose(matmul_of(rows, dtype="float16"), H200, plans=GEMV)


def test_what_is_chosen_can_be_launched() -> None:
    for n in (1, 8, 64):
        for rows in (MANY, DynamicDim("n"), DynamicDim("n", MANY)):
            choice = choose(matmul_of(rows, n), H200, always=True)
            assert isinstance(choice, Choice)
            last = choice.plans.entries[-1][1]
            assert not violations(last, matmul_of(rows, n), H200, MANY), last
    assert offered(DOTS, TILES) == [TILES]
    assert offered(DOTS) == [DOTS]
