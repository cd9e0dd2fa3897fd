"""Generated kernels in Triton's interpreter, against the graphs that they are generated from."""

from __future__ import annotations

import random

import pytest

from relax_fusion import DynamicDim, make_target
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.generated.plan import GeneratedPlan
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import Chain

from ...support.generated import check, check_plan
from ...support.interpreted import Interpreter
from ...support.matmul_chains import TwoMatmuls
from ...support.slow import quick_if, sampled
from ...support.strange_graphs import KINDS

checked, planned = Interpreter(check), Interpreter(check_plan)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 30))
def test_random_graphs_under_random_schedules(first: int) -> None:
    """Edges that no tile divides, online softmax, three products, split sums, tensor maps."""
    said = checked(list(range(first, first + 30)), (16, 32))
    assert said["wrong"] == []
    assert said["run"] > 20 and said["split"] > 5
    assert all(
        "kept" in why or "elements" in why or "no structure" in why
        for why in said["refused"].values()
    ), said["refused"]


@pytest.mark.parametrize("first", quick_if(lambda first: first == 0, range(0, 12, 4)))
@pytest.mark.parametrize("kind", sampled(KINDS, 2))
def test_strange_graphs_under_random_schedules(kind: str, first: int) -> None:
    """Masks, starts, other dtypes, odd coordinates, numbers, many factors, several results."""
    said = checked(list(range(first, first + 4)), (16, 32), "cpu", kind)
    assert said["wrong"] == []
    assert said["run"] > 1


ROWS = TwoMatmuls(
    *(DynamicDim("n"), 40, 64, 48, ("kn", "nk"), ("gelu",), ("bias", "residual")),
    *("float16", "float16"),
).chain


@pytest.mark.parametrize("split", ["", "j0=2"])
def test_a_kernel_takes_any_number_of_rows(split: str) -> None:
    """Tensors of one row, of edges, of more rows than a tile has; a second launch merges sums."""
    plan = GeneratedPlan(
        *(16, 48, 40),
        num_stages=2,
        num_warps=4,
        family="generated",
        expression="ij0kj1",
        tiles="i=16 j0=32 k=16 j1=48",
        split=split,
    )
    for rows in (1, 3, 16, 17, 100):
        assert planned(ROWS, plan, {"rows": rows}) == ""


def draw_work(choose: random.Random) -> Chain:
    def steps(*more: str) -> tuple[str | float, ...]:
        known = (2.0, "bias", choose.choice(("gelu", "relu", "silu", "tanh")), *more)
        return tuple(choose.sample(known, choose.randint(0, len(known))))

    return TwoMatmuls(
        choose.choice((1, 7, 64, 100, DynamicDim("n"))),
        *(choose.choice((8, 16, 33, 40, 72, 96, 130)) for _ in range(3)),
        (choose.choice(("nk", "kn")), choose.choice(("nk", "kn"))),
        steps(),
        steps("residual"),
        "float16",
        choose.choice(("float16", "float32")),
        choose.choice((None, None, 3, DynamicDim("b"))),
    ).chain


@pytest.mark.parametrize("seed", quick_if(lambda seed: seed in (1, 6), range(8)))
def test_plans_that_are_offered_for_random_chains(seed: int) -> None:
    choose = random.Random(seed)
    work, dev = draw_work(choose), device_of(make_target(choose.choice(("h200", "a100"))))
    found = [p for p in candidates(work, dev, "triton") if isinstance(p, GeneratedPlan)]
    sizes = {n: choose.choice((1, 5, 17)) if n == "rows" else 2 for n in work.graph.dims}
    for plan in choose.sample(found, 2):
        assert planned(work, plan, sizes) == "", plan.text
