"""MoveTransposes: what they move behind, what stops them, and that the numbers stay."""

from __future__ import annotations

import random

import pytest
from tvm import ir, relax, tirx

from relax_fusion.canonical import MoveTransposes

from .common import assert_chains_keep_numbers, assert_same_numbers, module, operators

X = "x: R.Tensor(('b', 's', 2, 8), 'float32')"
HEADS = "t = R.permute_dims(x, axes=[0, 2, 1, 3])\n"

MOVED = {
    "neighbours made one axis": (
        "x: R.Tensor(('b', 's', 4, 8), 'float32')",
        "t = R.permute_dims(x, axes=[0, 3, 1, 2])\na = R.reshape(t, R.shape([b, 8, s * 4]))\n"
        "y = R.permute_dims(a, axes=[0, 2, 1])",
        ["reshape", "reshape"],
    ),
    "an axis made neighbours": (
        "x: R.Tensor(('b', 's', 12, 8), 'float32')",
        "t = R.permute_dims(x, axes=[2, 0, 3, 1])\na = R.reshape(t, R.shape([3, 4, b, 8, s]))\n"
        "y = R.permute_dims(a, axes=[2, 4, 0, 1, 3])",
        ["reshape", "reshape"],
    ),
    "unary": (
        X,
        HEADS + "a = R.tanh(t)\ny = R.permute_dims(a, axes=[0, 2, 1, 3])",
        ["tanh", "reshape"],
    ),
    "by a number": (
        X,
        HEADS + "a = R.multiply(R.const(2.0, 'float32'), t)\ny = R.abs(a)",
        ["multiply", "abs", "permute_dims"],
    ),
    "angles": (
        f"{X}, c: R.Tensor((1, 1, 's', 8), 'float32')",
        HEADS + "a = R.multiply(t, c)\ny = R.abs(a)",
        ["reshape", "multiply", "abs", "permute_dims"],
    ),
    "a bias of every head": (
        f"{X}, c: R.Tensor((2, 's', 1), 'float32')",
        HEADS + "a = R.add(t, c)\ny = R.abs(a)",
        ["reshape", "permute_dims", "add", "abs", "permute_dims"],
    ),
    "both operands": (
        f"{X}, z: R.Tensor(('b', 's', 2, 8), 'float32')",
        HEADS + "u = R.permute_dims(z, axes=[0, 2, 1, 3])\na = R.add(t, u)\ny = R.abs(a)",
        ["add", "abs", "permute_dims"],
    ),
    "halves": (
        X,
        HEADS
        + "h = R.strided_slice(t, (3,), (0,), (4,))\nl = R.strided_slice(t, (-1,), (4,), (8,))\n"
        "a = R.concat((R.negative(l), h), axis=3)\ny = R.abs(a)",
        ["strided_slice", "strided_slice", "negative", "concat", "abs", "permute_dims"],
    ),
    "beside what all heads share": (
        f"{X}, k: R.Tensor(('b', 1, 's', 4), 'float32')",
        HEADS + "w = R.broadcast_to(k, R.shape([b, 2, s, 4]))\na = R.concat((t, w), axis=3)\n"
        "y = R.abs(a)",
        ["reshape", "broadcast_to", "concat", "abs", "permute_dims"],
    ),
    "parts": (
        X,
        HEADS + "p = R.split(t, 2, axis=3)\na = R.add(p[0], p[1])\ny = R.abs(a)",
        ["split", "add", "abs", "permute_dims"],
    ),
    "parts of what was moved": (
        X,
        HEADS + "p = R.split(t, 2, axis=1)\na = R.add(p[0], p[1])\ny = R.abs(a)",
        ["split", "add", "abs", "permute_dims"],
    ),
    "a norm": (
        f"{X}, g: R.Tensor((8,), 'float32')",
        HEADS + "a = R.nn.rms_norm(t, g, axes=[3], epsilon=1e-5)\ny = R.abs(a)",
        ["nn.rms_norm", "abs", "permute_dims"],
    ),
    "a sum": (
        X,
        HEADS + "a = R.sum(t, axis=[-1], keepdims=True)\ny = R.divide(t, a)",
        ["sum", "divide", "permute_dims"],
    ),
    "pairs": (
        X,
        HEADS + "e = R.expand_dims(t, axis=[-1])\na = R.concat((e, R.negative(e)), axis=-1)\n"
        "y = R.reshape(a, R.shape([b, 2, s, 16]))",
        ["expand_dims", "negative", "concat", "reshape", "permute_dims"],
    ),
    "two of them": (
        X,
        HEADS + "u = R.permute_dims(t, axes=[1, 0, 3, 2])\ny = R.abs(u)",
        ["abs", "permute_dims"],
    ),
}


@pytest.mark.parametrize("case", MOVED)
def test_moves(case: str) -> None:
    params, body, expected = MOVED[case]
    before = module(params, body.replace("'", '"'))
    after = MoveTransposes()(before)
    assert sorted(operators(after)) == sorted(expected)
    assert_same_numbers(before, after)
    assert MoveTransposes()(after).same_as(after)


KEPT = {
    "another order": (
        "x: R.Tensor(('s', 's', 2, 2), 'float32')",
        "t = R.permute_dims(x, axes=[1, 0, 2, 3])\nu = R.permute_dims(x, axes=[0, 1, 3, 2])\n"
        "y = R.add(t, u)",
        "s",
    ),
    "as large an operand": (
        f"{X}, z: R.Tensor(('b', 2, 's', 8), 'float32')",
        HEADS + "y = R.add(t, z)",
        "b, s",
    ),
    "a norm of what was moved": (
        f"{X}, g: R.Tensor(('s',), 'float32')",
        "t = R.permute_dims(x, axes=[0, 2, 3, 1])\ny = R.nn.rms_norm(t, g, axes=[3], epsilon=1e-5)",
        "b, s",
    ),
    "axes that are no neighbours": (
        X,
        "t = R.permute_dims(x, axes=[0, 2, 1, 3])\ny = R.reshape(t, R.shape([b, 2 * s, 8]))",
        "b, s",
    ),
    "a softmax": (X, HEADS + "y = R.nn.softmax(t, axis=2)", "b, s"),
}


@pytest.mark.parametrize("case", KEPT)
def test_stays(case: str) -> None:
    params, body, symbols = KEPT[case]
    before = module(params, body.replace("'", '"'), symbols)
    assert MoveTransposes()(before).same_as(before)


def chain_at_random(seed: int) -> ir.IRModule:
    """Return a module of element-wise operators between transposes at random."""
    draw = random.Random(seed)
    shape = [tirx.Var("b", "int64"), tirx.Var("s", "int64"), 2, 4]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    row = relax.Var("r", relax.TensorType([4], "float32"))
    angles = relax.Var("c", relax.TensorType([shape[1], 1, 4], "float32"))
    steps = (
        lambda v: relax.op.permute_dims(v, draw.sample(range(4), 4)),
        lambda v: relax.op.permute_dims(v, [0, 2, 1, 3]),
        relax.op.tanh,
        lambda v: relax.op.add(v, relax.const([1.0], "float32")),
        lambda v: relax.op.divide(v, relax.op.sum(relax.op.exp(v), axis=[-1], keepdims=True)),
        lambda v: relax.op.multiply(v, relax.op.mean(v, axis=[1], keepdims=True)),
        lambda v: relax.op.concat([v, relax.op.negative(v)], axis=draw.randrange(4)),
        lambda v: relax.op.nn.rms_norm(v, row, axes=[-1]) if _last(v) else relax.op.abs(v),
        lambda v: relax.op.multiply(v, angles) if _rows(v) else relax.op.square(v),
        lambda v: relax.op.strided_slice(v, [draw.randrange(4)], [0], [1]),
    )
    with builder.function("main", [x, row, angles]):
        with builder.dataflow():
            value = x
            for _ in range(draw.randrange(3, 10)):
                value = builder.emit(draw.choice(steps)(value))
            out = builder.emit_output(relax.op.negative(value))
        builder.emit_func_output(out)
    return builder.get()


def _last(value: relax.Expr) -> bool:
    return str(value.ty.shape.values[-1]) in ("T.int64(4)", "4")


def _rows(value: relax.Expr) -> bool:
    return str(value.ty.shape.values[1]) == "s" and _last(value)


@pytest.mark.parametrize("seed", range(0, 120, 12))
def test_chains_at_random(seed: int) -> None:
    assert_chains_keep_numbers(MoveTransposes(), chain_at_random, range(seed, seed + 12))
