"""Schedules of the chain engine as loops on a CPU, against the numbers of the graph."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
import tvm

from relax_fusion.compute.scheduled_chain import scheduled_chain
from relax_fusion.errors import LoweringError
from relax_fusion.tiling import Schedule, expressions, iteration_space, parse, place
from relax_fusion.workload import DynamicDim
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Band, Graph
from relax_fusion.workload.reference import evaluate
from relax_fusion.workload.values import Axis, Const, apply

from ..support.generated import draw_values, wrong
from ..support.quick import loaded, quickly
from ..support.slow import sampled
from ..support.strange_graphs import KINDS
from . import graphs

Sizes = dict[str, int]
TOLERANCES = {"float32": (2e-5, 2e-6), "float16": (2e-3, 1e-3), "bfloat16": (2e-2, 1e-2)}


def inputs_of(graph: Graph, sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    found = {}
    for operand in graph.inputs:
        shape = [d if isinstance(d, int) else sizes[d.name] for d in operand.shape]
        found[operand.name] = draw.normal(0, 0.5, shape).astype(operand.dtype)
    return found


def compare(graph: Graph, schedule: Schedule, sizes: Sizes, at: Sizes | None = None) -> None:
    """Compare the function that a schedule for `sizes` becomes at the sizes `at`."""
    at = at or sizes
    inputs = inputs_of(graph, at, 0)
    func = scheduled_chain(graph, schedule, sizes).with_attr("global_symbol", "main")
    run = loaded(quickly(func))["main"]
    shapes = [[d if isinstance(d, int) else at[d.name] for d in o.shape] for o in graph.outputs]
    pairs = zip(shapes, graph.outputs, strict=True)
    outputs = [tvm.runtime.tensor(np.full(s, np.nan, o.dtype)) for s, o in pairs]
    run(*(tvm.runtime.tensor(inputs[o.name]) for o in graph.inputs), *outputs)
    expected = evaluate(graph, inputs)
    for operand, got in zip(graph.outputs, outputs, strict=True):
        relative, absolute = TOLERANCES[operand.dtype]
        want = expected[operand.name]
        scale = np.abs(want[np.isfinite(want)]).max(initial=0)
        np.testing.assert_allclose(got.numpy(), want, relative, absolute * max(scale, 1))


def schedules(graph: Graph, sizes: Sizes, choose: random.Random, dynamic: bool = False):
    """Yield schedules of random expressions and tiles."""
    space = iteration_space(graph, sizes)
    found = expressions(space)
    while True:
        tiles = tuple(
            a.size if a.size == 1 else 1 if a.batch else choose.choice((16, 32, a.size))
            for a in space.loops
        )
        single = [a.name for a, t in zip(space.loops, tiles, strict=True) if t >= a.size]
        single = [] if dynamic else single
        yield Schedule(space, place(space, choose.choice(found), single), tiles)


GRAPHS = {
    "two products": graphs.chain(40, 24, 50, 33),
    "whole register tiles": graphs.chain(64, 40, 64, 96),
    "three products in a batch": graphs.chain(20, 24, 17, 33, 20, batch=2),
    "norm and mlp": graphs.norm_mlp(20, 40, 24, 33),
    "softmax divided late": graphs.softmax(20, 70),
    "softmax divided early": graphs.softmax(20, 40, divided_late=False),
    "projected keys": graphs.projected_keys(20, 50),
    "row sums": graphs.row_sums("k", "k", "j"),
}


@pytest.mark.parametrize("name", sampled(GRAPHS, 2))
def test_a_graph_has_the_numbers_of_its_reference(name: str) -> None:
    graph = GRAPHS[name]
    for schedule in islice(schedules(graph, {}, random.Random(name)), 4):
        compare(graph, schedule, {})


@pytest.mark.parametrize("seed", sampled(range(12), 2))
def test_random_graphs(seed: int) -> None:
    choose = random.Random(seed)
    graph = graphs.random_graph(choose)
    for schedule in islice(schedules(graph, {}, choose), 2):
        compare(graph, schedule, {})


@pytest.mark.parametrize("kind", ["twice_scaled", "numbers", "factors", "repeated"])
@pytest.mark.parametrize("seed", sampled(range(4), 2))
def test_strange_graphs(kind: str, seed: int) -> None:
    """Two exponentials of one maximum, numbers without shape, many factors."""
    choose = random.Random(seed)
    graph = KINDS[kind](choose)
    for schedule in islice(schedules(graph, {}, choose), 4):
        if not schedule.structure.kept:
            check_strange(graph, schedule)


def check_strange(graph: Graph, schedule: Schedule) -> None:
    given = draw_values(graph, 0, {})
    func = scheduled_chain(graph, schedule, {}).with_attr("global_symbol", "main")
    run = loaded(quickly(func))["main"]
    made = [tvm.runtime.tensor(np.full(o.shape, np.nan, o.dtype)) for o in graph.outputs]
    run(*(tvm.runtime.tensor(given[o.name].astype(o.dtype)) for o in graph.inputs), *made)
    pairs = zip(graph.outputs, made, strict=True)
    assert wrong(graph, {o.name: each.numpy().astype("float64") for o, each in pairs}, given) == ""


def attention() -> Graph:
    """Return online softmax of dynamic rows; a band hides some keys, and all keys of late rows."""
    g = GraphBuilder()
    rows, columns, d = DynamicDim("n", 256), 70, 24
    i, t, j, c = Axis("i", rows), Axis("t", columns), Axis("j", d), Axis("c", 20)
    q, k = g.input("q", (rows, d), "float16"), g.input("k", (columns, d), "float16")
    v = g.input("v", (columns, 20), "float16")
    s = g.sum("s", (i, t), (j,), q[i, j] * k[t, j])
    band = Band("t", "i", least=Const(20))
    top = g.max("top", (i,), (t,), s[i, t], band=band)
    p = g.map("p", (i, t), apply("exp", s[i, t] - apply("finite", top[i])), "float16")
    total = g.sum("total", (i,), (t,), p[i, t], band=band)
    acc = g.sum("acc", (i, c), (t,), p[i, t] * v[t, c], band=band)
    g.output(g.map("y", (i, c), apply("ratio", acc[i, c], total[i]), "float16"))
    return g.graph()


@pytest.mark.parametrize("rows", sampled([70, 1, 20]))
def test_rows_of_any_number_under_a_band(rows: int) -> None:
    graph = attention()
    found = schedules(graph, {"n": 40}, random.Random(3), dynamic=True)
    for _ in range(2):
        compare(graph, next(found), {"n": 40}, {"n": rows})


def kernel_text(graph: Graph, order: str, tiles: tuple[int, ...]) -> str:
    space = iteration_space(graph)
    single = [a.name for a, t in zip(space.loops, tiles, strict=True) if t >= a.size]
    return scheduled_chain(
        graph, Schedule(space, place(space, parse(order, space.ordered), single), tiles)
    ).script()


@pytest.mark.parametrize("rows", [64, 50])
def test_sums_stay_in_registers_whether_or_not_tiles_divide_the_rows(rows: int) -> None:
    graph = graphs.chain(rows, 40, 64, 96, dtype="float32")
    text = kernel_text(graph, "mnkh", (32, 64, 32, 96))
    assert text.count("T.alloc_local((T.int64(8), T.int64(32)))") == 2
    (line,) = (each for each in text.splitlines() if "+ A[" in each)
    assert ("T.min(" in line) == (rows == 50)  # rows of A are read up to the last one


def test_a_narrow_product_has_narrow_register_tiles() -> None:
    text = kernel_text(graphs.chain(64, 40, 16, 96), "mknh", (32, 16, 40, 96))
    assert "T.alloc_local((T.int64(8), T.int64(16)))" in text
    assert "T.alloc_local((T.int64(8), T.int64(32)))" in text


def turned_chain() -> Graph:
    """Return relu(x w^T + b) v, whose first weight lies along its sum."""
    g = GraphBuilder()
    i, k, n, h = Axis("i", 48), Axis("k", 64), Axis("n", 64), Axis("h", 32)
    x, w = g.input("x", (48, 64), "float32"), g.input("w", (64, 64), "float32")
    b, v = g.input("b", (64,), "float32"), g.input("v", (64, 32), "float32")
    acc = g.sum("acc", (i, n), (k,), x[i, k] * w[n, k])
    s = g.map("s", (i, n), apply("relu", acc[i, n] + b[n]), "float32")
    g.output(g.sum("y", (i, h), (n,), s[i, n] * v[n, h]))
    return g.graph()


def test_a_weight_that_lies_along_its_sum_is_copied_in_squares() -> None:
    graph = turned_chain()
    text = kernel_text(graph, "iknh", (16, 64, 64, 32))
    assert 'T.sblock("turned")' in text
    for schedule in islice(schedules(graph, {}, random.Random(0)), 4):
        compare(graph, schedule, {})


def test_maps_behind_a_product_are_done_in_its_registers() -> None:
    """No tile is read back for them, and whole register tiles go where the result lies."""
    text = kernel_text(turned_chain(), "iknh", (16, 64, 64, 32))
    (line,) = (each.strip() for each in text.splitlines() if "T.Select" in each)
    tile, _, value = line.partition(" = ")
    assert value.count(tile) == 2  # once compared, once taken
    assert "T.alloc_local" in text.split(tile.split("[")[0] + " = ")[1][:20]
    (line,) = (each.strip() for each in text.splitlines() if each.strip().startswith("y["))
    assert line.endswith(f"= {tile}")


def test_a_dynamic_size_of_one_tile_is_refused() -> None:
    graph, sizes = attention(), {"n": 16}
    space = iteration_space(graph, sizes)
    tiles = tuple(a.size for a in space.loops)
    schedule = Schedule(space, place(space, expressions(space)[0], space.ordered), tiles)
    with pytest.raises(LoweringError, match="i of the dynamic size n has one tile"):
        scheduled_chain(graph, schedule, sizes)
