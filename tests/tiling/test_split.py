"""Sums that several blocks share."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from relax_fusion.errors import TilingError
from relax_fusion.tiling import (
    Schedule,
    SearchSpace,
    Split,
    handed_over,
    iteration_space,
    parse,
    place,
    recomputed,
    split_loops,
    split_over,
    volumes,
)
from relax_fusion.tiling.space import IterationSpace
from relax_fusion.workload import Attention, MatmulChain
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Graph
from relax_fusion.workload.values import Axis, apply

from .graphs import chain, norm_mlp, random_graph, softmax
from .simulator import run

TWO = iteration_space(chain(512, 256, 1024, 256))
TILES = (64, 64, 64, 128)  # of m, n, k, h: 8, 16, 4 and 2 of them


def _whole(text: str, single: str = "", space: IterationSpace = TWO) -> Schedule:
    size = {a.name: a.size for a in space.loops}
    tiles = [
        size[a.name] if a.name in single else t for a, t in zip(space.loops, TILES, strict=True)
    ]
    return Schedule(space, place(space, parse(text, space.ordered), single), tuple(tiles))


def test_volumes_of_a_split_sum() -> None:
    before = _whole("mhnk", "k")
    after = split_over(before, "n", 4, "launch")
    assert (before.blocks, after.blocks) == (16, 64)
    moved = volumes(before)
    assert volumes(after) == {**moved, "L_A": 4 * moved["L_A"]}  # which each part loads
    assert handed_over(before) == {} and handed_over(after) == {"E": 4 * 2 * 512 * 256}
    assert str(after).splitlines()[0] == (
        "grid m 8 x 64, h 2 x 128; n in 4 parts, merged by a second launch"
    )
    uneven = split_over(before, "n", 6, "cluster")  # 3 each, and 1: 18 are paid for
    assert volumes(uneven)["L_B"] * 16 == moved["L_B"] * 18
    assert "merged in a cluster" in str(uneven)


def test_all_tiles_that_are_kept_are_handed_over() -> None:
    after = split_over(_whole("mn(k,h)"), "n", 2, "launch")
    assert handed_over(after) == {"E": 2 * 2 * 512 * 256} and after.blocks == 16


def test_a_result_split_over_the_grid_is_recomputed() -> None:
    assert recomputed(TWO, _whole("mhnk").structure) == {"C": ("h",)}
    assert recomputed(TWO, _whole("mn(k,h)").structure) == {}


def test_attention_hands_over_what_rescales() -> None:
    work = Attention(1, 16, 4096, 8, 8, 64, 64, 0.1, "none", None, "float16", "float16")
    space = iteration_space(work.graph)
    tiles = tuple(1 if a.batch else min(a.size, 64) for a in space.loops)
    structure = place(space, parse("itdc", space.ordered), ("i", "d", "c"))
    assert split_loops(space, structure) == ("t",)
    after = split_over(Schedule(space, structure, tiles), "t", 16, "launch")
    assert handed_over(after) == {
        "row_max": 4 * 16 * 8 * 16,
        "row_sum": 4 * 16 * 8 * 16,
        "acc": 4 * 16 * 8 * 16 * 64,
    }
    assert after.blocks == 8 * 16


@pytest.mark.parametrize(
    ("text", "single", "loop", "message"),
    [
        ("mhnk", "", "k", "the loop k cannot be split: it is not at the top of grid m h: n("),
        ("mhnk", "n", "k", "the loop k cannot be split: E is a sum that needs all of it"),
        ("mhkn", "", "n", "the loop n cannot be split: it is run more than once"),
        ("mhnk", "", "m", "the loop m cannot be split: it is not at the top"),
    ],
)
def test_what_cannot_be_split(text: str, single: str, loop: str, message: str) -> None:
    with pytest.raises(TilingError) as raised:
        split_over(_whole(text, single), loop, 2, "launch")
    assert message in str(raised.value)


def test_what_only_the_parts_have() -> None:
    space = iteration_space(softmax(64, 512, divided_late=False))
    structure = place(space, parse("itc", space.ordered), "c")
    with pytest.raises(TilingError, match="the loop t cannot be split: it is run more than once"):
        split_over(Schedule(space, structure, (16, 16, 64)), "t", 2, "launch")
    work = MatmulChain(64, 64, 64, 64, ("kn", "kn"), (), ("residual",), "float16", "float16")
    space = iteration_space(work.graph)
    structure = place(space, parse("ij1j0k", space.ordered), "k")
    assert split_loops(space, structure) == ("j0",)  # the residual is loaded behind the loop
    load, inside, *behind = structure.body
    early = replace(structure, body=(load, behind[0], inside, *behind[1:]))
    assert str(behind[0]).startswith("L_residual")
    schedule = Schedule(space, early, (32, 32, 64, 32))
    with pytest.raises(TilingError, match=r"out1 reads residual.*, which only the parts have"):
        split_over(schedule, "j0", 2, "launch")
    with pytest.raises(KeyError):
        run(replace(schedule, split=Split("j0", 2, "launch")))


def test_what_is_stored_behind() -> None:
    g = GraphBuilder()
    i, k = Axis("i", 64), Axis("k", 64)
    x, y = g.input("x", (64,), "float32"), g.input("y", (64, 64), "float32")
    g.output(g.map("e", (i,), apply("exp", x[i]), "float32"))
    g.output(g.sum("s", (i,), (k,), y[i, k]))
    space = iteration_space(g.graph())
    structure = place(space, parse("ik", space.ordered))
    assert str(structure) == "grid i: L_x, C_e, k(L_y, C_s), S_e, S_s"
    with pytest.raises(TilingError, match="e is stored behind it, and only the parts have it"):
        split_over(Schedule(space, structure, (16, 16)), "k", 2, "launch")


def test_limits_of_parts() -> None:
    schedule = _whole("mhnk")
    for parts, merge, message in (
        (1, "launch", "n in 1 parts: must be 2 to 16"),
        (17, "launch", "n in 17 parts: must be 2 to 16"),
        (5, "launch", "n in 5 parts: 16 tiles, 4 a part, leave one empty"),
        (16, "cluster", "n in 16 parts of a cluster: must be 2 to 8"),
    ):
        with pytest.raises(TilingError, match=message):
            split_over(schedule, "n", parts, merge)


def _split_and_run(graph: Graph) -> int:
    """Run all structures of a graph with each loop that can be shared; return how many."""
    space = iteration_space(graph)
    count = 0
    for single, found in SearchSpace(space).distinct.items():
        tiles = tuple(a.size if a.name in single else 16 for a in space.loops)
        for structure in found:
            schedule = Schedule(space, structure, tiles)
            for loop in split_loops(space, structure):
                for parts in {2, schedule.trips[loop]}:
                    run(split_over(schedule, loop, parts, "launch"))
                    count += 1
    return count


@pytest.mark.parametrize(
    "graph",
    [
        *(chain(32, 32, 80, 48), chain(32, 32, 48, 32, 48), softmax(32, 80)),
        norm_mlp(32, 48, 48, 32),
    ],
    ids=["two", "three", "softmax", "norm"],
)
def test_split_schedules_run(graph: Graph) -> None:
    """Each tile is added by one part, and what comes behind finds the sums complete."""
    assert _split_and_run(graph) > 1


def test_random_split_schedules_run() -> None:
    choose = random.Random(2)
    assert sum(_split_and_run(random_graph(choose)) for _ in range(60)) > 100
