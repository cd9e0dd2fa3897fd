"""The chain engine's plans: what they are, which fit, and their prices against measured times."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_fusion import DynamicDim, make_target
from relax_fusion.errors import TilePlanError
from relax_fusion.estimator import Choice, Problem, choose, predict, violations
from relax_fusion.estimator.families.generated.family import Generated
from relax_fusion.estimator.families.generated.plan import GeneratedPlan, launches
from relax_fusion.estimator.families.generated.space import descended, plans
from relax_fusion.estimator.registry import plan_of
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import Chain

from ..support.estimator_cases import GPU, plans_of
from ..support.matmul_chains import TwoMatmuls

FILE = Path(__file__).parents[1] / "data" / "2026-11-23-generated.json"
TIMED: dict[str, list[list[Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
"""Expression, tiles, warps, stages, tensor maps, and microseconds on an H200 (graph replays)."""

SIZES = {
    **{f"G{i}": (1, 512, 256, 64, h) for i, h in ((1, 64), (2, 128), (3, 256))},
    **{f"G{i}": (1, 512, 512, k, 256) for i, k in ((4, 256), (5, 512), (6, 1024))},
    **{f"G{i}": (1, m, 512, 128, 128) for i, m in ((7, 512), (8, 1024), (9, 2048))},
    **{f"G{i}": (b, 1024, 1024, 128, 128) for i, b in ((10, 1), (11, 4), (12, 8))},
}


def work_of(name: str, rows: DynamicDim | None = None, dtype: str = "float16") -> Chain:
    b, m, n, k, h = SIZES[name]
    batch = b if b > 1 else None
    return TwoMatmuls(rows or m, k, n, h, ("kn", "kn"), (), (), dtype, dtype, batch).chain


PLAN = GeneratedPlan(
    *(64, 64, 256),
    num_stages=3,
    num_warps=4,
    family="generated",
    expression="ij1j0k",
    tiles="i=64 j0=128 k=64 j1=64",
)


def timed_plan(row: list[Any]) -> GeneratedPlan:
    expression, tiles, warps, stages, maps, _ = row
    made = {"num_warps": warps, "num_stages": stages, "tensor_maps": maps}
    return replace(PLAN, expression=expression, tiles=tiles, **made)


def ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(n)) for n in range(len(values))]


def test_prices_rank_what_was_measured() -> None:
    found, errors, lost = [], [], []
    for name, rows in TIMED.items():
        work = work_of(name)
        prices = [1e6 * predict(work, timed_plan(row), GPU, work.rows).seconds for row in rows]
        times = [row[-1] for row in rows]
        found.append(statistics.correlation(ranks(prices), ranks(times)))
        errors += [math.log(p / t) ** 2 for p, t in zip(prices, times, strict=True)]
        first = sorted(range(len(rows)), key=prices.__getitem__)[:8]
        lost.append(min(times[n] for n in first) / min(times))
    assert len(TIMED) == 12
    assert statistics.mean(found) > 0.8
    assert math.sqrt(statistics.mean(errors)) < 0.2
    assert statistics.geometric_mean(lost) < 1.02  # of the best eight by price, the fastest


def test_plans_are_written_and_read() -> None:
    attr = replace(PLAN, split="j0=4").to_attr()
    assert plan_of(attr) == replace(PLAN, split="j0=4")
    assert PLAN.text == "generated ij1j0k: i=64 j0=128 k=64 j1=64"


def test_a_users_plan_is_taken() -> None:
    found = choose(work_of("G2"), GPU, plans=replace(PLAN, split="j0=2", expression="ij0kj1"))
    assert isinstance(found, Choice)
    first, second = launches(work_of("G2").graph, found.plans.entries[0][1])
    assert [o.name for o in second.graph.inputs] == ["acc1_parts"]
    assert first.schedule.blocks == 2 * 8 * 2 and second.schedule.blocks == 64 * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tiles": "i=64 j0=128"}, "the loop k has no tile"),
        ({"tiles": "i = 64"}, "tiles are 'i = 64'; must be loops with numbers"),
        ({"expression": "ijk"}, "tiling expression 'ijk': no loop 'j' of i, j0, k, j1"),
        ({"split": "j0=3"}, "j0 in 3 parts: must be 2 or more that divide 256"),
        ({"split": "i=2"}, "the loop i cannot be split: no statement combines over it"),
        ({"tiles": "i=64 j0=128 k=64 j1=32"}, "acc1 has tiles of 32 columns behind another"),
        ({"tiles": "i=128 j0=256 k=64 j1=256"}, "a thread has"),
        ({"tiles": "i=48 j0=128 k=64 j1=64"}, "the loop i has tiles of 48; blocks of Triton are"),
        ({"tiles": "i=64 j0=128 k=8 j1=64"}, "the loop k has tiles of 8; blocks of Triton are"),
        ({"tiles": "i=512 j0=256 k=64 j1=64"}, "acc0 has tiles of 131072 elements; at most 65536"),
        ({"tiles": "i=1 j0=128 k=64 j1=512"}, "acc1 is computed in tiles of 65536 elements that"),
        ({"expression": "ij0(k,j1)"}, "tiles of acc1 are kept for all iterations of j1"),
        ({"tiles": "i=64 j0=128 k=64 j1=64 z=1"}, "z has a tile and is no loop; there are i, j0"),
        ({"tiles": "i=64 i=32 j0=128 k=64 j1=64"}, "must be one number for each loop"),
        ({"tiles": f"i={'9' * 5000}"}, "must be loops with numbers"),
        ({"split": "j0=2 k=2"}, "split is 'j0=2 k=2'; must be of one loop"),
        ({"num_warps": 0}, "num_warps is 0; must be a power of two, at most 32"),
        ({"num_warps": 6}, "num_warps is 6; must be a power of two, at most 32"),
        ({"num_stages": 65, "tiles": "i=64 j0=256 k=64 j1=128"}, "num_stages is 65; at most 64"),
    ],
)
def test_what_is_no_plan(change: dict[str, Any], words: str) -> None:
    plan = replace(PLAN, **change)
    assert any(words in sentence for sentence in violations(plan, work_of("G2"), GPU))
    with pytest.raises(TilePlanError):
        choose(work_of("G2"), GPU, plans=plan)


def test_tensor_maps_are_used_or_not() -> None:
    with pytest.raises(TilePlanError, match="tensor_maps is 2; must be less than or equal to 1"):
        replace(PLAN, tensor_maps=2)


def test_tensor_maps_are_for_devices_that_have_them() -> None:
    old = device_of(make_target("a100"))
    plan = replace(PLAN, tensor_maps=1)
    assert any("tensor_maps is 1" in s for s in violations(plan, work_of("G2"), old))
    assert not any(p.tensor_maps for p in plans_of(Generated(), work_of("G2"), old))


def test_dynamic_rows_have_plans_for_their_ranges() -> None:
    work = work_of("G7", DynamicDim("n"))
    found = choose(work, GPU, backend="triton", always=True)
    assert isinstance(found, Choice)
    assert all(isinstance(plan, GeneratedPlan) for _, plan in found.plans.entries)
    assert not any("i" in plan.split for _, plan in found.plans.entries)


def test_an_old_gpu_has_no_plan() -> None:
    volta = replace(GPU, capabilities=replace(GPU.capabilities, async_copies=False))
    assert "no asynchronous copies" in (Generated().refuses(Problem(work_of("G1"), volta)) or "")


def test_float32_is_left_to_kernels_that_multiply_it_exactly() -> None:
    work = work_of("G1", dtype="float32")
    said = "products are of float32, generated kernels have float16 and bfloat16"
    assert Generated().refuses(Problem(work, GPU)) == said
    assert Generated().refuses(Problem(work_of("G1"), GPU)) is None


@pytest.mark.parametrize("name", ["G4", "G6", "G12"])
def test_the_cheapest_tiling_is_found_by_pricing_about_half(name: str) -> None:
    work, dev = work_of(name), GPU
    every, priced = list(plans(work.graph)), 0

    def seconds(plan: GeneratedPlan) -> float:
        nonlocal priced
        priced += 1
        return predict(work, plan, dev, SIZES[name][1]).seconds

    first = seconds(descended(every, seconds)[0])
    assert priced < 0.55 * len(every)
    assert first == min(map(seconds, every))
