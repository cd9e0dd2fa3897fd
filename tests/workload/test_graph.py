"""Graphs written down by hand, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import GraphError
from relax_fusion.workload import DynamicDim, GatedFFN, Norm, Operand, Packed, in_order
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Block, Graph, Slot, Tensor
from relax_fusion.workload.values import At, Axis, Const, Op, Read, at

ROW, COLUMN, DEPTH = Axis("i", 4), Axis("j", 8), Axis("k", 16)


def matmul() -> GraphBuilder:
    g = GraphBuilder()
    x, w = g.input("x", (4, 16), "float16"), g.input("w", (8, 16), "float16")
    g.output(g.sum("y", (ROW, COLUMN), (DEPTH,), x[ROW, DEPTH] * w[COLUMN, DEPTH], "float16"))
    return g


def test_a_graph_reads_as_it_computes() -> None:
    work = GatedFFN(
        *(DynamicDim("n"), 8, 16, "nk", True, False, "silu", Norm("rms", 1e-5)),
        *("float16", "float16"),
    )
    assert str(work.graph).splitlines() == [
        "square_sum[i]  float32 = sum k: x[i, k] * x[i, k]",
        "x_norm[i, k]   float16 = (x[i, k] * rsqrt(square_sum[i] / 8 + 1e-05)) * gamma[k]",
        "acc0[i, j]     float32 = sum k: x_norm[i, k] * w0[j, k]",
        "acc1[i, j]     float32 = sum k: x_norm[i, k] * w0[j + 16, k]",
        "out0[i, j]     float16 = silu(acc1[i, j]) * acc0[i, j]",
    ]
    assert work.graph.dims == ("rows",)


def test_operands_are_in_the_order_of_the_slots() -> None:
    g = matmul()
    g.scalar("length", DynamicDim("length"))
    graph = g.graph()
    assert [(o.name, o.shape, o.dtype) for o in graph.inputs] == [
        ("x", (4, 16), "float16"),
        ("w", (8, 16), "float16"),
        ("length", None, "int64"),
    ]
    assert [o.name for o in graph.outputs] == ["y"]
    assert in_order(graph.inputs, {"length": 3, "w": 2, "x": 1}) == (1, 2, 3)


@pytest.mark.parametrize("given", [{"x": 1}, {"x": 1, "w": 2, "b": 3}])
def test_operands_that_are_missing_or_unknown_are_named(given: dict[str, int]) -> None:
    with pytest.raises(GraphError, match=f"operands are {', '.join(given)}; must be x, w"):
        in_order(matmul().graph().inputs, given)


def test_packed_weights_are_words_and_scales() -> None:
    form = Packed(4, 32, 7)
    assert form.fields == 8
    assert Tensor("w", (6, 100), "float16", form).operands() == (
        Operand("w", (6, 16), "uint32"),
        Operand("w_scale", (6, 4), "float16"),
    )
    assert Packed(3, 40, 3).fields == 10
    columns = Packed(3, 40, 3, axis=-2).operands("w", (100, 6))
    assert [o.shape for o in columns] == [(12, 6), (3, 6)]
    awq = Packed(4, 128, None, axis=-2, across=True, turns=2).operands("w", (300, 24))
    assert [(o.name, o.shape) for o in awq] == [
        *(("w", (300, 3)), ("w_scale", (3, 24)), ("w_zero", (3, 3)))
    ]
    blocks = Packed(8, 128, 0, "int8", "float32", number="int8", lines=48)
    assert [o.shape for o in blocks.operands("w", (100, 129))] == [(100, 129), (3, 2)]
    every = replace(blocks, group=-1, lines=-1).operands("w", (DynamicDim("n"), 129))
    assert [o.shape for o in every] == [(DynamicDim("n"), 129), (1, 1)]
    assert len(Tensor("w", (6, 100), "float16", replace(blocks, scale_dtype="")).operands()) == 1
    with pytest.raises(GraphError, match=r"w: the packed dimension is .*'n'.*; must be a number"):
        Tensor("w", (6, DynamicDim("n")), "float16", form).operands()


X = Tensor("x", (4, 16), "float32")
Y = Tensor("y", (4,), "float32")
READ = Read("x", (at(ROW), at(DEPTH)))
SUM = Block("y", (at(ROW),), (ROW,), READ, (DEPTH,), "sum")
IN, OUT = Slot("x", "in"), Slot("y", "out")


def built_twice() -> Graph:
    g = GraphBuilder()
    y = g.map("y", (ROW,), Const(1.0), "float32")
    g.output(g.map("y", (ROW,), y[ROW] * 2.0, "float32"))
    return g.graph()


WRONG = {
    "tensor 'x' is declared twice": lambda: Graph((X, X), (), ()),
    "output 'y' is made by no statement": lambda: Graph((X, Y), (), (IN, OUT)),
    "'x' is read before it is made": lambda: Graph((X, Y), (SUM,), (OUT,)),
    "no tensor 'z'; there are x": lambda: Graph((X,), (), ())["z"],
    "x has rank 2, not 1 coordinates": lambda: Graph(
        (X, Y), (Block("y", (at(ROW),), (ROW,), Read("x", (at(ROW),))),), (IN, OUT)
    ),
    "y: x is read along 'k', no axis of it": lambda: Graph(
        (X, Y), (Block("y", (at(ROW),), (ROW,), READ),), (IN, OUT)
    ),
    "reduced axes need a combination": lambda: Graph(
        (X, Y), (Block("y", (at(ROW),), (ROW,), READ, (DEPTH,)),), (IN, OUT)
    ),
    "operand 'x' is declared twice": lambda: Graph((X,), (), (IN, IN)),
    "y: two axes are called": lambda: Graph(
        (X, Y), (Block("y", (at(ROW),), (ROW,), READ, (DEPTH, DEPTH), "sum"),), (IN, OUT)
    ),
    "z is 'float'; must be of float64": lambda: Graph((Tensor("z", (), "float"),), (), ()),
    "tensor 'y' is declared twice": built_twice,
    "words are 'int7'; must be of uint8": lambda: Packed(4, 32, 7, word="int7"),
    "9 bits; must be 1 to 8, as uint8": lambda: Packed(9, 32, 7, word="uint8"),
    "0 bits; must be": lambda: Packed(0, 32, 7),
    "a group is of 0": lambda: Packed(4, 0, 7),
    "turns is 3; must divide the 8 fields": lambda: Packed(4, 32, 7, turns=3),
    "a group is of -2; must be from 1 on, or -1": lambda: Packed(8, 32, 7, lines=-2),
    "elements are 'int4'; must be of float4_e2m1fn, int8": lambda: Packed(8, 32, 0, number="int4"),
    "4 bits; int8 has 8": lambda: Packed(4, 32, 0, number="int8"),
    "words are 'int8'; must be unsigned, or of 'float8": lambda: Packed(
        *(8, 32, 0, "int8"), number="float8_e5m2"
    ),
    "zeros of groups need a scale": lambda: Packed(8, 32, None, scale_dtype=""),
    "axis is 0; must be -1 or -2": lambda: Packed(4, 32, 7, axis=0),
    "no operator 'sin'; there are add": lambda: Op("sin", (READ,)),
    "exp has 2 operands; must have 1": lambda: Op("exp", (READ, READ)),
    "is no coordinate; must be an axis": lambda: at(READ),  # a gather
    "only sums of axes can be added": lambda: At(div=2) + ROW,
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_said_is_refused(message: str) -> None:
    with pytest.raises(GraphError, match=message):
        WRONG[message]()


def test_formulas_have_the_brackets_that_they_need() -> None:
    x = Read("x", (at(ROW), at(3)))
    assert str((x + 1.0) * x - Const(2.0) / (x - x)) == (
        "((x[i, 3] + 1) * x[i, 3]) - (2 / (x[i, 3] - x[i, 3]))"
    )
    assert str(COLUMN * 4 + ROW + -1) == "4*j + i - 1"
    assert str(ROW % 3) == "(i)%3"
