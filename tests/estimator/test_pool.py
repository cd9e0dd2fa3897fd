"""A pool of plans for small ranges of rows: what sizes lose to it, and how many kernels it is."""

from __future__ import annotations

import json

import pytest

from benchmarks.suites.matmul.cases import Chain
from relax_fusion.estimator import Choice, Problem, choose, predict
from relax_fusion.estimator.database import Measured, workload_key
from relax_fusion.estimator.registry import options
from relax_fusion.estimator.search import price
from relax_fusion.hardware import device
from relax_fusion.workload import DynamicDim
from relax_fusion.workload.json import to_json

H200 = device("h200")
ROWS = DynamicDim("n")
SIZES = (1, 2, 3, 16, 17, 65, 129, 192, 257, 600, 1024, 1025, 1088, 1500, 2048, 2049, 3000, 4097)
SIZES += (5000, 6144, 8192, 8193, 12000, 16384)
CHAINS = (("down", "llama3.1-8b"), ("gate_up", "gemma2-2b"), ("qkv", "bert-base"))
MOST_LOST = 0.04


def chosen(case: str, model: str, rows: DynamicDim = ROWS) -> tuple:
    (work,) = Chain(case, model).works(rows, "float16")
    choice = choose(work, H200, always=True, backend="triton")
    assert isinstance(choice, Choice)
    return work, choice


@pytest.mark.parametrize(("case", "model"), CHAINS)
def test_no_size_loses_much_to_a_kernel_that_is_chosen_for_it(case: str, model: str) -> None:
    work, choice = chosen(case, model)
    (every,) = price([(list(options(Problem(work, H200), "triton")), SIZES)])
    assert len(choice.predictions) < len(choice.plans.boxes)
    assert len({plan for _, plan in choice.plans.boxes}) <= 30
    for rows, seconds in zip(SIZES, every.seconds, strict=True):
        taken = predict(work, choice.plans.plan_for(rows), H200, rows).seconds
        assert taken <= (1 + MOST_LOST) * min(seconds), rows


def test_predictions_are_of_the_plans_that_serve() -> None:
    work, choice = chosen(*CHAINS[0])
    for p in choice.predictions:
        assert p.fused == predict(work, choice.plans.plan_for(p.size), H200, p.size)


def test_small_ranges_end_where_the_rows_do() -> None:
    _, choice = chosen(*CHAINS[0], DynamicDim("n", 3000))
    uppers = [box.rows for box, _ in choice.plans.boxes]
    assert uppers[-1] is None and max(uppers[:-1]) < 3000 and max(uppers[:-1]) > 1024


def test_a_range_with_measured_times_is_served_by_the_fastest_alone() -> None:
    work, by_price = chosen(*CHAINS[0])
    plan = by_price.plans.plan_for(1025)
    assert len({by_price.plans.plan_for(rows) for rows in (1025, 2048, 9000)}) > 1
    key = workload_key(json.loads(to_json(work)))
    measured = Measured("digest", {key: {4096: {plan: 1e-9}}})
    choice = choose(work, H200, always=True, backend="triton", measured=measured)
    assert {choice.plans.plan_for(rows) for rows in (1025, 2048, 9000, 20000)} == {plan}
    assert choice.plans.plan_for(1000) == by_price.plans.plan_for(1000)
