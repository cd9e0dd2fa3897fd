"""Adapters of the matmul kernel in CUDA C++: the plan of what makes x A, prices, who takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import Problem, choose, predict, violations
from relax_fusion.estimator.choose import Choice
from relax_fusion.estimator.families.cuda_matmul import adapters, cost
from relax_fusion.estimator.families.cuda_matmul.family import NARROW_COLUMNS, CudaMatmul
from relax_fusion.estimator.families.matmuls import NEXT_LAUNCH_S
from relax_fusion.estimator.registry import FAMILIES, candidates, families
from relax_fusion.hardware import device
from relax_fusion.workload import Adapter, DynamicDim, Norm, NormMatmul, Projection, narrow_matmuls

from ..support.estimator_cases import plans_of

H200 = device("h200")
FAMILY = next(f for f in FAMILIES if isinstance(f, CudaMatmul))
SIZES = [(n, rank, rows) for n in (2048, 14336) for rank in (16, 64) for rows in (16, 1024)]


def work(n: int, *ranks: int | None, k: int = 4096, norm: Norm | None = None) -> NormMatmul:
    outputs = (Projection(n, "nk", adapter=Adapter(r, "nk", 2.0) if r else None) for r in ranks)
    return NormMatmul(DynamicDim("rows"), k, tuple(outputs), norm, "float16", "float16")


def test_nothing_else_takes_adapters() -> None:
    adapted = work(4096, 16)
    assert families(Problem(adapted, H200), "triton") == [FAMILY]
    assert families(Problem(adapted, H200), "tir") == []
    assert {o.family for o in candidates(adapted, H200)} == {"cuda"}
    assert len(families(Problem(work(4096, None), H200), "triton")) > 1


@pytest.mark.parametrize("rank", [8, 16, 40, 64, 128])
@pytest.mark.parametrize("rows", [1, 64, 4096, None])
def test_narrow_plans_read_x_once(rank: int, rows: int | None) -> None:
    low = narrow_matmuls(work(4096, rank), [Adapter(rank, "nk")])
    plan = adapters.narrow_plan(FAMILY, low, H200, rows)
    assert list(violations(plan, low, H200)) == []
    assert min(rank, 64) <= plan.block_n and plan.multiplying == 1
    assert plan.cluster == plan.split_k


def test_narrow_weights_have_tiles_with_rows_tall_and_k_split() -> None:
    narrow, wide = (work(n, None) for n in (NARROW_COLUMNS, NARROW_COLUMNS + 8))
    for of, expected in ((narrow, {1, 2, 4, 8}), (wide, {1, 2, 4})):
        assert {p.split_k for p in plans_of(FAMILY, of, H200) if p.swapped} == expected


@pytest.mark.parametrize(("n", "rank", "rows"), SIZES)
def test_an_adapter_costs_less_than_its_matmuls_apart(n: int, rank: int, rows: int) -> None:
    adapted, plain = work(n, rank), work(n, None)
    for plan in list(candidates(adapted, H200, "triton"))[::17]:
        with_it = predict(adapted, plan, H200, rows).seconds
        assert with_it > predict(plain, plan, H200, rows).seconds
    chosen = choose(replace(adapted, rows=rows), H200, backend="triton")
    assert isinstance(chosen, Choice)
    (price,) = chosen.predictions
    assert price.fused.seconds < 1.02 * price.unfused.seconds


def test_the_launch_in_front_is_waited_for() -> None:
    """Where it takes longer than what is done beside it; else it takes multiprocessors away."""
    of = work(4096, None)
    whole = predict(of, next(iter(plans_of(FAMILY, of, H200))), H200, 16)
    short, long = replace(whole, seconds=H200.launch_s + 1e-6), replace(whole, seconds=1e-3)
    waited = adapters.priced(whole, [(0.1, long)], H200).seconds
    assert waited == pytest.approx(1e-3 + cost.RATES.start_s)
    beside = adapters.priced(whole, [(0.1, short)], H200).seconds
    assert beside == pytest.approx(whole.seconds + NEXT_LAUNCH_S + 1e-7)


def test_launches_are_of_adapters_with_as_many_steps() -> None:
    many = work(4096, 16, 40, 72, None)
    assert [len(low.outputs) for low in adapters.narrow_works(many)] == [2, 1]
    assert adapters.longer(many).k == 4096 + 2 * 64
    assert adapters.longer(work(4096, 8, k=72)).k == 2 * 64 + 64


def test_a_rank_that_cannot_be_copied_is_refused() -> None:
    assert FAMILY.refuses(Problem(work(4096, 12), H200)) == (
        "an adapter has rank 12, lines are copied by 8 elements"
    )
