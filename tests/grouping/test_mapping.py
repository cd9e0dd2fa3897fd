"""The mapping of every operator, proved from its body, and the table of pairs."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx

from relax_fusion.grouping.cells import CELLS, Cell
from relax_fusion.grouping.mapping import Kind, operator_of
from relax_fusion.mend.legalize import LEGALIZE_MAP

from ..support.grouped import function

PARAMS = (
    'x: R.Tensor((4, 8, 16), "float32"), y: R.Tensor((4, 8, 16), "float32"), '
    'b: R.Tensor((16,), "float32"), ids: R.Tensor((2, 3), "int64"), '
    'w: R.Tensor((5, 16, 6), "float32"), n: R.Tensor((4, "m", 16), "float32")'
)
OPERATORS: dict[str, tuple[Kind, list[tuple[Kind, float]]]] = {
    "R.exp(x)": (Kind.ONE_TO_ONE, [(Kind.ONE_TO_ONE, 1)]),
    "R.add(x, y)": (Kind.ONE_TO_ONE, [(Kind.ONE_TO_ONE, 1)] * 2),
    "R.nn.silu(n)": (Kind.ONE_TO_ONE, [(Kind.ONE_TO_ONE, 1)]),
    "R.expand_dims(x, 1)": (Kind.ONE_TO_ONE, [(Kind.ONE_TO_ONE, 1)]),
    "R.zeros((2, 3), 'float32')": (Kind.ONE_TO_ONE, []),
    "R.reshape(x, (32, 16))": (Kind.REORGANISE, [(Kind.REORGANISE, 1)]),
    "R.reshape(n, (4 * m, 16))": (Kind.REORGANISE, [(Kind.REORGANISE, 1)]),
    "R.permute_dims(x, [0, 2, 1])": (Kind.SHUFFLE, [(Kind.SHUFFLE, 1)]),
    "R.concat([x, y], axis=1)": (Kind.SHUFFLE, [(Kind.SHUFFLE, 1)] * 2),
    "R.strided_slice(x, (2,), (0,), (4,))": (Kind.SHUFFLE, [(Kind.SHUFFLE, 0.25)]),
    "R.split(x, 2, axis=2)": (Kind.SHUFFLE, [(Kind.SHUFFLE, 1)]),
    "R.add(x, b)": (Kind.ONE_TO_MANY, [(Kind.ONE_TO_ONE, 1), (Kind.ONE_TO_MANY, 32)]),
    "R.broadcast_to(b, (8, 16))": (Kind.ONE_TO_MANY, [(Kind.ONE_TO_MANY, 8)]),
    "R.repeat(x, 2, axis=1)": (Kind.ONE_TO_MANY, [(Kind.ONE_TO_MANY, 2)]),
    "R.take(b, ids, axis=0)": (
        Kind.ONE_TO_MANY,
        [(Kind.ONE_TO_MANY, 6 / 16), (Kind.ONE_TO_ONE, 1)],
    ),
    "R.sum(x, axis=[2])": (Kind.MANY_TO_MANY, [(Kind.MANY_TO_MANY, 1)]),
    "R.nn.softmax(x)": (Kind.MANY_TO_MANY, [(Kind.MANY_TO_MANY, 3)]),
    "R.nn.layer_norm(x, b, b, axes=[-1])": (
        Kind.MANY_TO_MANY,
        [(Kind.MANY_TO_MANY, 3), (Kind.ONE_TO_MANY, 32), (Kind.ONE_TO_MANY, 32)],
    ),
    "R.matmul(x, R.zeros((16, 6), 'float32'))": (
        Kind.MANY_TO_MANY,
        [(Kind.MANY_TO_MANY, 6), (Kind.MANY_TO_MANY, 32)],
    ),
    "R.nn.avg_pool1d(x, 2, 2)": (Kind.MANY_TO_MANY, [(Kind.MANY_TO_MANY, 1)]),
}


def operator(call: str) -> tuple[tirx.PrimFunc, int]:
    """Return the PrimFunc of the last operator of an expression, and how many tensors it reads."""
    mod = function(PARAMS, f"m = T.int64(); y = {call}" if "m," in call else f"y = {call}")
    mod = relax.transform.LegalizeOps(dict(LEGALIZE_MAP))(mod)
    made = mod["main"].body.blocks[0].bindings[-1].value
    return mod[made.args[0]], len(made.args[1].fields)


@pytest.mark.parametrize("call", OPERATORS)
def test_kinds(call: str) -> None:
    found = operator_of(*operator(call))
    kind, edges = OPERATORS[call]
    assert found is not None and found.kind is kind
    assert [(e.kind, e.repeats) for e in found.edges] == edges
    assert found.multiplies == ("matmul" in call)


def test_what_is_not_read_goes_by_its_annotation() -> None:
    func, inputs = operator("R.argmax(x, axis=2)")
    assert operator_of(func, inputs) is None
    annotated = relax.transform.AnnotateTIROpPattern()(tvm.IRModule({"f": func}))["f"]
    found = operator_of(annotated, inputs)
    assert found is not None and found.kind is Kind.MANY_TO_MANY


def test_functions_are_slower_than_arithmetic() -> None:
    slots = [operator_of(*operator(call)).slots for call in ("R.exp(x)", "R.add(x, y)")]
    assert slots == [16 * 512, 2 * 512]


TABLE_3 = {
    Kind.ONE_TO_ONE: "fuse fuse fuse fuse fuse",
    Kind.REORGANISE: "fuse fuse fuse price price",
    Kind.SHUFFLE: "fuse fuse fuse price price",
    Kind.ONE_TO_MANY: "fuse price price ? break",
    Kind.MANY_TO_MANY: "fuse price price price break",
}
"""DNNFusion's, by what its section 3.2 says of colours; of ``?`` it says nothing."""

OTHERS = {
    (Kind.ONE_TO_ONE, Kind.ONE_TO_MANY): Cell.PRICE,  # each read computes it anew
    (Kind.ONE_TO_ONE, Kind.MANY_TO_MANY): Cell.PRICE,
    (Kind.ONE_TO_MANY, Kind.REORGANISE): Cell.FUSE,  # each element is still computed once
    (Kind.ONE_TO_MANY, Kind.SHUFFLE): Cell.FUSE,
    (Kind.ONE_TO_MANY, Kind.MANY_TO_MANY): Cell.PRICE,  # a bias in front of a norm
    (Kind.MANY_TO_MANY, Kind.REORGANISE): Cell.BREAK,  # a sum's kernel writes where it sums
    (Kind.MANY_TO_MANY, Kind.SHUFFLE): Cell.BREAK,
}
"""Where our table is another one."""


def test_the_25_cells_are_those_of_dnnfusion_but_for_what_is_told() -> None:
    theirs = {
        (first, second): color
        for first, row in TABLE_3.items()
        for second, color in zip(Kind, row.split(), strict=True)
    }
    assert len(theirs) == len(CELLS) == 25
    ours = {
        pair: CELLS[pair] if color == "?" else OTHERS.get(pair, Cell(color))
        for pair, color in theirs.items()
    }
    assert ours == CELLS
    assert all(CELLS[pair] is not Cell(theirs[pair]) for pair in OTHERS)


def test_a_kernel_is_of_the_kind_that_constrains_most() -> None:
    order = ("ONE_TO_ONE", "REORGANISE", "SHUFFLE", "ONE_TO_MANY", "MANY_TO_MANY")
    assert tuple(kind.name for kind in sorted(Kind)) == order  # DNNFusion's footnote 1
