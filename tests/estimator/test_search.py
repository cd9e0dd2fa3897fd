"""Prices of many plans at once are those of each by itself."""

from __future__ import annotations

import pytest

from benchmarks.suites.matmul.cases import Chain
from relax_fusion.estimator.registry import candidates, family_of
from relax_fusion.estimator.search import asked_in, price
from relax_fusion.hardware import device
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Projection

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
    found = list(candidates(work, H200, "triton"))
    assert {p.family for p in found} >= {"cuda", "gemv", "pointer"}
    (priced,) = price(work, H200, [(found, ROWS)])
    for row, size in zip(priced.seconds, ROWS, strict=True):
        alone = [family_of(p).predict(p, work, H200, size).seconds for p in found]
        assert row.tolist() == alone


def test_ranges_priced_together_are_as_by_themselves() -> None:
    work = WORKS["down"]
    found = list(candidates(work, H200))
    asked = [asked_in(found, work, H200, [sizes], 5) for sizes in ([1], [17, 32], [2048, 4096])]
    together = price(work, H200, asked)
    for each, some in zip(together, asked, strict=True):
        (alone,) = price(work, H200, [some])
        assert (each.seconds == alone.seconds).all()
        assert each.seconds.shape == (len(some[1]), len(some[0]))
    assert len({len(each.plans) for each in together}) > 1
