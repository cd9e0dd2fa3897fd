"""What many plans cost at once, and a pool of them for small ranges: what sizes lose by it."""

from __future__ import annotations

import json

import pytest

from benchmarks.suites.matmul.cases import Chain
from relax_fusion.estimator import Choice, Problem, choose, predict
from relax_fusion.estimator.database import Measured, workload_key
from relax_fusion.estimator.ranges import Range
from relax_fusion.estimator.registry import options
from relax_fusion.estimator.search import asked_in, price
from relax_fusion.estimator.tile_plan import Box
from relax_fusion.hardware import device
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Projection
from relax_fusion.workload.json import to_json

H200 = device("h200")
ROWS = (1, 7, 64, 777, 16384)
THREE = tuple(Projection(n, "nk", ("bias",)) for n in (2048, 512, 520))
WORKS = {
    "three weights": NormMatmul(DynamicDim("n"), 2056, THREE, None, "float16", "float16"),
    "norm": NormMatmul(
        DynamicDim("n"), 1024, (Projection(96, "nk"),), Norm("rms", 1e-5), "float16", "float16"
    ),
    **{
        case: Chain(case, model).works(DynamicDim("n"), "float16")[0]
        for case, model in (("gate_up", "gemma2-2b"), ("up", "gpt2-124m"), ("down", "llama3.1-8b"))
    },
}


@pytest.mark.parametrize("case", WORKS)
def test_prices_of_many_plans_have_the_bits_of_each(case: str) -> None:
    work = WORKS[case]
    found = list(options(Problem(work, H200), "triton"))
    assert {o.plan.family for o in found} >= {"cuda", "gemv", "pointer"}
    (priced,) = price([(found, ROWS)])
    for row, size in zip(priced.seconds, ROWS, strict=True):
        alone = [predict(work, p, H200, size).seconds for p in (o.plan for o in found)]
        assert row.tolist() == alone


def test_ranges_priced_together_are_as_by_themselves() -> None:
    work = WORKS["down"]
    found = list(options(Problem(work, H200)))
    every = (Range(max(sizes), [(Box(), sizes)], 5) for sizes in ([1], [17, 32], [2048, 4096]))
    asked = [asked_in(found, each) for each in every]
    together = price(asked)
    for each, some in zip(together, asked, strict=True):
        (alone,) = price([some])
        assert (each.seconds == alone.seconds).all()
        assert each.seconds.shape == (len(some[1]), len(some[0]))
    assert len({len(each.options) for each in together}) > 1


DYNAMIC = DynamicDim("n")
AT = (
    *(1, 2, 3, 16, 17, 65, 129, 192, 257, 600, 1024, 1025, 1088, 1500, 2048, 2049, 3000, 4097),
    *(5000, 6144, 8192, 8193, 12000, 16384),
)
CHAINS = (("down", "llama3.1-8b"), ("gate_up", "gemma2-2b"), ("qkv", "bert-base"))
MOST_LOST = 0.04


def pooled(case: str, model: str, rows: DynamicDim = DYNAMIC) -> tuple:
    (work,) = Chain(case, model).works(rows, "float16")
    choice = choose(work, H200, always=True, backend="triton")
    assert isinstance(choice, Choice)
    return work, choice


@pytest.mark.parametrize(("case", "model"), CHAINS)
def test_no_size_loses_much_to_a_kernel_that_is_chosen_for_it(case: str, model: str) -> None:
    work, choice = pooled(case, model)
    (every,) = price([(list(options(Problem(work, H200), "triton")), AT)])
    assert len(choice.predictions) < len(choice.plans.boxes)
    assert len({plan for _, plan in choice.plans.boxes}) <= 30
    for rows, seconds in zip(AT, every.seconds, strict=True):
        taken = predict(work, choice.plans.plan_for(rows), H200, rows).seconds
        assert taken <= (1 + MOST_LOST) * min(seconds), rows


def test_predictions_are_of_the_plans_that_serve() -> None:
    work, choice = pooled(*CHAINS[0])
    for p in choice.predictions:
        assert p.fused == predict(work, choice.plans.plan_for(p.size), H200, p.size)


def test_small_ranges_end_where_the_rows_do() -> None:
    _, choice = pooled(*CHAINS[0], DynamicDim("n", 3000))
    uppers = [box.rows for box, _ in choice.plans.boxes]
    assert uppers[-1] is None and max(uppers[:-1]) < 3000 and max(uppers[:-1]) > 1024


def test_a_range_with_measured_times_is_served_by_the_fastest_alone() -> None:
    work, by_price = pooled(*CHAINS[0])
    plan = by_price.plans.plan_for(1025)
    assert len({by_price.plans.plan_for(rows) for rows in (1025, 2048, 9000)}) > 1
    key = workload_key(json.loads(to_json(work)))
    measured = Measured("digest", {key: {4096: {plan: 1e-9}}})
    choice = choose(work, H200, always=True, backend="triton", measured=measured)
    assert {choice.plans.plan_for(rows) for rows in (1025, 2048, 9000, 20000)} == {plan}
    assert choice.plans.plan_for(1000) == by_price.plans.plan_for(1000)
