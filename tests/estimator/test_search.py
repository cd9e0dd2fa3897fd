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
