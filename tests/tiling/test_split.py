"""Sums that blocks share."""

from __future__ import annotations

import random

import numpy as np
import pytest

from relax_fusion.errors import TilingError
from relax_fusion.tiling import (
    Schedule,
    iteration_space,
    parse,
    place,
    recomputed,
    split_loops,
    split_sum,
)
from relax_fusion.workload import Attention
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.dims import DynamicDim
from relax_fusion.workload.graph import Graph
from relax_fusion.workload.reference import evaluate
from relax_fusion.workload.values import Axis, AxisValue, apply

from ..support.matmul_chains import TwoMatmuls
from .graphs import chain, norm_mlp, projected_keys, random_graph, softmax, structures
from .simulator import run

HALF = {"dtype": "float16", "out_dtype": "float16"}


def test_a_result_split_over_the_grid_is_recomputed() -> None:
    space = iteration_space(chain(512, 256, 1024, 256))
    assert recomputed(space, place(space, parse("mhnk", space.ordered))) == {"C": ("h",)}
    assert recomputed(space, place(space, parse("mn(k,h)", space.ordered))) == {}


def test_two_products() -> None:
    graph = chain(512, 256, 1024, 128)
    assert split_loops(graph) == ("n", "k")
    two = split_sum(graph, "n", 4)
    assert str(two.partial).splitlines() == [
        "C[part, m, n]        float16 = sum k: A[m, k] * B[k, 256*part + n]",
        "E_parts[part, m, h]  float32 = sum n: C[part, m, n] * D[256*part + n, h]",
    ]
    assert str(two.merging) == "E[m, h]  float16 = sum part: E_parts[part, m, h]"
    assert [o.name for o in two.partial.inputs] == ["A", "B", "D"]
    assert [(o.name, o.shape) for o in two.merging.inputs] == [("E_parts", (4, 512, 128))]
    assert [a.name for a in iteration_space(two.partial).loops if a.batch] == ["part"]


def test_attention_hands_over_what_rescales() -> None:
    work = Attention(1, 16, 4096, 8, 8, 64, 64, 0.1, "none", None, "float16", "float16")
    two = split_sum(work.graph, "t", 16)
    assert [(o.name, o.shape[0], o.dtype) for o in two.partial.outputs] == [
        ("row_max_parts", 16, "float32"),
        ("row_sum_parts", 16, "float32"),
        ("acc_parts", 16, "float32"),
    ]
    (line,) = (x for x in str(two.merging).splitlines() if x.startswith("row_sum["))
    assert "exp(row_max_parts[part, " in line and "finite(row_max[" in line


def test_the_last_steps_stand_behind_the_sum() -> None:
    work = TwoMatmuls(64, 64, 64, 64, ("kn", "kn"), (), ("bias", "residual"), **HALF).chain
    two = split_sum(work.graph, "j0", 2)
    assert [o.name for o in two.partial.inputs] == ["x", "w0", "w1"]
    assert {o.name for o in two.merging.inputs} == {"bias1_0", "residual1_1", "acc1_parts"}


def test_what_multiplies_the_sums_stands_behind_them() -> None:
    two = split_sum(chain(64, 64, 64, 64), "k", 2)
    assert [o.name for o in two.merging.inputs] == ["D", "C_parts"]


def _sum_of_exponentials() -> Graph:
    g = GraphBuilder()
    i, k = Axis("i", 64), Axis("k", 64)
    y = g.input("y", (64, 64), "float32")
    e = g.map("e", (i, k), apply("exp", y[i, k]), "float32")
    g.output(e)
    g.output(g.sum("s", (i,), (k,), e[i, k]))
    return g.graph()


@pytest.mark.parametrize(
    ("graph", "loop", "message"),
    [
        (chain(64, 64, 64, 64), "m", "the loop m cannot be split: no statement combines over it"),
        (softmax(64, 64, False), "t", "the loop t cannot be split: e needs all of top"),
        (_sum_of_exponentials(), "k", "e is stored, which only the parts have"),
    ],
)
def test_what_cannot_be_split(graph: Graph, loop: str, message: str) -> None:
    assert loop not in split_loops(graph)
    with pytest.raises(TilingError, match=message):
        split_sum(graph, loop, 2)


def test_a_loop_of_a_dynamic_size_has_no_parts() -> None:
    """The parts would be those of the size that the graph is looked at with."""
    g = GraphBuilder()
    i, t = Axis("i", 4), Axis("t", DynamicDim("keys"))
    x = g.input("x", (4, t.size), "float32")
    g.output(g.sum("s", (i,), (t,), x[i, t]))
    assert split_loops(g.graph(), {"keys": 64}) == ()
    with pytest.raises(TilingError, match="the loop t cannot be split: keys is known at the call"):
        split_sum(g.graph(), "t", 2, {"keys": 64})


@pytest.mark.parametrize("count", [1, 3, 128])
def test_parts_of_equal_size(count: int) -> None:
    with pytest.raises(TilingError, match=f"n in {count} parts: must be 2 or more that divide 64"):
        split_sum(chain(64, 64, 64, 64), "n", count)


def test_values_of_an_axis_are_those_of_the_whole() -> None:
    g = GraphBuilder()
    i, k = Axis("i", 4), Axis("k", 12)
    x = g.input("x", (4, 12), "float32")
    g.output(g.sum("s", (i,), (k,), x[i, k] * AxisValue("k")))
    assert _merged(g.graph(), random.Random(0)) == 1


def _merged(graph: Graph, choose: random.Random) -> int:
    """Compare a graph with its two for each loop that can be split; return how many there were."""
    draw, count = np.random.default_rng(choose.randrange(1 << 30)), 0
    size = {a.name: a.size for a in iteration_space(graph).loops}
    for loop in split_loops(graph):
        parts = [n for n in range(2, size[loop] + 1) if size[loop] % n == 0]
        two = split_sum(graph, loop, choose.choice(parts))
        given = {o.name: draw.standard_normal(o.shape) for o in graph.inputs}
        partial = evaluate(two.partial, {o.name: given[o.name] for o in two.partial.inputs})
        given_or_made = {**given, **partial}
        found = evaluate(two.merging, {o.name: given_or_made[o.name] for o in two.merging.inputs})
        for name, values in evaluate(graph, given).items():
            np.testing.assert_allclose(found[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
        count += 1
    return count


@pytest.mark.parametrize(
    "graph",
    [
        *(chain(32, 32, 80, 48), chain(32, 32, 48, 32, 48), softmax(32, 80)),
        *(norm_mlp(32, 48, 48, 32), projected_keys(16, 48)),
    ],
    ids=["two", "three", "softmax", "norm", "projected"],
)
def test_two_launches_compute_the_same(graph: Graph) -> None:
    assert _merged(graph, random.Random(1)) >= 1


def test_random_graphs_compute_the_same() -> None:
    choose = random.Random(2)
    assert sum(_merged(random_graph(choose), choose) for _ in range(240)) > 50


def test_schedules_of_split_graphs_run() -> None:
    """What a block reads is there, and each tile is added once."""
    for graph in (chain(32, 32, 64, 48), softmax(32, 64)):
        two = split_sum(graph, split_loops(graph)[0], 2)
        for each in (two.partial, two.merging):
            space = iteration_space(each)
            batch = {a.name for a in space.loops if a.batch}
            for single, structure in structures(space):
                tiles = tuple(
                    1 if a.name in batch else a.size if a.name in single else 16
                    for a in space.loops
                )
                if all(t <= a.size for t, a in zip(tiles, space.loops, strict=True)):
                    run(Schedule(space, structure, tiles))
