"""Loops and statements of block graphs, and graphs that have none that can be tiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from relax_fusion.errors import GraphError, TilingError
from relax_fusion.tiling import iteration_space
from relax_fusion.workload import Attention, DynamicDim, GatedFFN, Packed
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Slot
from relax_fusion.workload.values import Axis, Const, apply

from ..support.matmul_chains import TwoMatmuls
from .graphs import chain, norm_mlp, softmax


def test_a_chain() -> None:
    space = iteration_space(chain(1024, 512, 768, 256, batch=4))
    assert str(space) == (
        "loops: b 4 (batch), m 1024, n 768, k 512, h 256\nC[b, m, n] over k\nE[b, m, h] over n"
    )
    assert space.ordered == ("m", "n", "k", "h")
    assert space.spatial == {"b", "m", "h"} and space.common == {"b", "m"}
    assert space.step["E"].waits == {"C"} and space.step["C"].dtype == "float16"


def test_axes_of_other_names_are_one_loop() -> None:
    g = GraphBuilder()
    i, j, k = Axis("i", 32), Axis("j", 48), Axis("k", 64)
    a, b, d = (
        g.input(n, s, "float16") for n, s in (("a", (32, 64)), ("b", (64, 48)), ("d", (48, 16)))
    )
    c = g.sum("c", (i, j), (k,), a[i, k] * b[k, j])
    p, q, r = Axis("p", 32), Axis("q", 48), Axis("i", 16)  # another i, of another size
    g.output(g.sum("e", (p, r), (q,), c[p, q] * d[q, r]))
    assert str(iteration_space(g.graph())) == (
        "loops: i 32, j 48, k 64, i_2 16\nc[i, j] over k\ne[i, i_2] over j"
    )


def test_swapped_names_stay_two_loops() -> None:
    g = GraphBuilder()
    i, j = Axis("i", 32), Axis("j", 32)
    x = g.input("x", (32, 32), "float32")
    y = g.map("y", (i, j), apply("exp", x[i, j]), "float32")
    g.output(g.map("z", (i, j), y[j, i] * x[i, j], "float32"))
    space = iteration_space(g.graph())
    assert str(space) == "loops: i 32, j 32\ny[i, j]\nz[j, i]"
    assert [str(read) for read in space.step["z"].reads] == ["y[i, j]", "x[j, i]"]


def test_named_workloads() -> None:
    work = TwoMatmuls(
        DynamicDim("n"), 64, 256, 64, ("nk", "kn"), ("bias",), ("gelu",), "float16", "float16"
    ).chain
    space = iteration_space(work.graph, {"rows": 512})
    assert {a.name: a.size for a in space.loops} == {"i": 512, "j0": 256, "k": 64, "j1": 64}
    assert space.final == {"acc1", "out1"}
    with pytest.raises(GraphError, match="size of rows is missing"):
        iteration_space(work.graph)
    heads = Attention(2, 64, 96, 8, 2, 64, 32, 0.1, "bottom_right", None, "float16", "float16")
    space = iteration_space(heads.graph)
    assert [a.name for a in space.loops if a.batch] == ["b", "n", "e"]
    assert space.ordered == ("i", "t", "d", "c")


def test_online_softmax_does_not_wait_for_its_maximum() -> None:
    steps = iteration_space(softmax(64, 64)).step
    assert not steps["e"].waits and not steps["acc"].waits
    assert steps["y"].waits == {"acc", "total"}
    steps = iteration_space(softmax(64, 64, divided_late=False)).step
    assert steps["e"].waits == {"top"} and steps["y"].waits == {"top", "total"}


def test_a_norm_is_waited_for() -> None:
    steps = iteration_space(norm_mlp(64, 64, 64, 64)).step
    assert steps["n"].waits == steps["q"].waits | {"q"} and steps["s"].waits == {"q", "a"}


def _waits_for_the_maximum(change: Callable) -> bool:
    """Tell whether exp(x - top) waits for top in a graph that `change` writes."""
    g = GraphBuilder()
    i, t = Axis("i", 64), Axis("t", 64)
    change(g, i, t, g.input("x", (64, 64), "float32"))
    return "top" in iteration_space(g.graph()).step["e"].waits


def test_when_a_maximum_has_to_be_complete() -> None:
    def usual(g, i, t, x, reduce="max", least=lambda x, top: x, read=lambda e: e, over="t", **how):
        top = getattr(g, reduce)("top", (i,), (t,), x[i, t])
        e = g.map("e", (i, t), apply("exp", least(x[i, t], top[i]) - top[i]), "float32")
        at = (i, t) if over == "t" else (t, i)  # the names are swapped: a sum over rows
        how = {name: make(e[at]) for name, make in how.items()}
        g.output(g.sum("s", (i,), (t,), read(e[at]), **how))
        return e

    assert not _waits_for_the_maximum(usual)
    for different in (
        {"reduce": "sum"},
        {"least": lambda x, top: x * top},
        {"read": lambda e: apply("tanh", e)},
        {"read": lambda e: e * e},
        {"over": "rows"},
        {"start": lambda _: Const(1)},
        {"where": lambda e: e},
    ):
        assert _waits_for_the_maximum(partial(usual, **different)), different
    assert _waits_for_the_maximum(lambda g, *given: g.output(usual(g, *given)))


def _packed(graph):
    packed = Packed(4, 32, 7)
    return replace(
        graph,
        tensors=tuple(replace(t, format=packed) if t.name == "B" else t for t in graph.tensors),
    )


def _float64(graph):
    return replace(
        graph,
        tensors=tuple(replace(t, dtype="float64") if t.name == "C" else t for t in graph.tensors),
    )


def _in_place(graph):
    return replace(
        graph, slots=tuple(Slot(s.name, "inout") if s.name == "A" else s for s in graph.slots)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [(_packed, "B is packed"), (_float64, "C is float64"), (_in_place, "A is changed in place")],
)
def test_refused_tensors(change: Callable, message: str) -> None:
    with pytest.raises(TilingError, match=message):
        iteration_space(change(chain(64, 64, 64, 64)))


def _refused(write: Callable[[GraphBuilder], None]) -> str:
    g = GraphBuilder()
    write(g)
    with pytest.raises(TilingError) as raised:
        iteration_space(g.graph())
    return str(raised.value)


def test_refused_statements() -> None:
    i, j = Axis("i", 64), Axis("j", 64)

    def shifted(g: GraphBuilder) -> None:
        x = g.input("x", (65, 64), "float32")
        y = g.map("y", (Axis("r", 65), j), apply("exp", x[Axis("r", 65), j]), "float32")
        g.output(g.map("z", (i, j), y[i + 1, j] * 2.0, "float32"))

    def diagonal(g: GraphBuilder) -> None:
        x = g.input("x", (64, 64), "float32")
        y = g.map("y", (i,), apply("exp", x[i, 0]), "float32")
        g.output(g.map("z", (i, j), y[i] * y[j], "float32"))

    def prefix(g: GraphBuilder) -> None:
        x = g.input("x", (64,), "float32")
        y = g.map("y", (i,), apply("exp", x[i]), "float32")
        g.output(g.map("z", (Axis("s", 32),), y[Axis("s", 32)] * 2.0, "float32"))

    def parts(g: GraphBuilder) -> None:
        x = g.input("x", (64,), "float32")
        y = g.tensor("y", (128,), "float32")
        g.part(y[i], (i,), x[i])
        g.part(y[i + 64], (i,), x[i])
        g.output(y)

    assert "z: y[i + 1, j] has the coordinate i + 1" in _refused(shifted)
    assert "z: the axes 'i' and 'j' run over the same axis" in _refused(diagonal)
    assert "z reads 32 of the 64 elements of y along 's'" in _refused(prefix)
    assert "y is made in 2 parts" in _refused(parts)


def test_too_many_loops_and_none() -> None:
    g = GraphBuilder()
    axes = [Axis(name, 32) for name in "abcdefg"]
    x = g.input("x", [32] * 7, "float32")
    g.output(g.map("y", axes, apply("exp", x[tuple(axes)]), "float32"))
    with pytest.raises(TilingError, match=r"there are 7 loops \(a, b, c, d, e, f, g\); at most 6"):
        iteration_space(g.graph())
    with pytest.raises(TilingError, match="the loop n has no element"):
        iteration_space(chain(64, 64, 0, 64))
    with pytest.raises(TilingError, match="the graph has no statement"):
        iteration_space(GraphBuilder().graph())


def test_convolutions_are_refused() -> None:
    g = GraphBuilder()
    i, k, o = Axis("i", 62), Axis("k", 3), Axis("o", 32)
    x, w = g.input("x", (64,), "float16"), g.input("w", (3, 32), "float16")
    g.output(g.sum("y", (i, o), (k,), x[i + k] * w[k, o]))
    with pytest.raises(TilingError, match=r"y reads x\[i \+ k\] in windows along i \+ k"):
        iteration_space(g.graph())


def test_strides_that_only_look_like_windows() -> None:
    g = GraphBuilder()
    i, z, j = Axis("i", 32), Axis("z", 1), Axis("j", 2)
    x = g.input("x", (64,), "float32")
    g.output(g.map("y", (i, z, j), apply("exp", x[i * 2 + z * 4 + j]), "float32"))
    assert iteration_space(g.graph()).ordered == ("i", "j")


def test_parts_of_one_operand_are_different() -> None:
    work = GatedFFN(64, 64, 96, "nk", True, True, "silu", None, "float16", "float16")
    steps = iteration_space(work.graph).steps
    halves = [str(read) for step in steps for read in step.reads if read.tensor.startswith("w")]
    assert halves == ["w0[j, k]", "w0[j + 96, k]"]
