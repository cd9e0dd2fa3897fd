"""Plan tables over boxes of sizes: which plan serves, what is refused, which boxes are chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from relax_fusion.errors import TilePlanError
from relax_fusion.estimator import Choice, choose, predict
from relax_fusion.estimator.registry import candidates, is_launched, table_of
from relax_fusion.estimator.shape import AttentionSize
from relax_fusion.estimator.tile_plan import OPEN, Box, PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.workload import DynamicDim, NormMatmul, Projection

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
