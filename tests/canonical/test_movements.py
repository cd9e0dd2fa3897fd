"""MoveReshapes: what moves behind what, what stays, and that the numbers do."""

from __future__ import annotations

import random

import pytest
import tvm
from tvm import ir, relax, tirx

from relax_fusion.canonical import MoveReshapes

from .common import assert_chains_keep_numbers, assert_same_numbers, module, operators

X = "x: R.Tensor(('b', 's', 8), 'float32')"
W = "w: R.Tensor((8, 6), 'float32')"
FLAT = "h = R.reshape(x, R.shape([b * s, 8]))"

MOVED = {
    "behind a matmul and its bias": (
        f"{X}, {W}, c: R.Tensor((6,), 'float32')",
        f"{FLAT}\na = R.matmul(h, w)\nd = R.add(a, c)\ny = R.reshape(d, R.shape([b, s, 6]))",
        ["matmul", "add", "reshape"],
    ),
    "behind activations": (
        X,
        f"{FLAT}\na = R.nn.gelu(h)\nc = R.tanh(a)\n"
        "d = R.reshape(c, R.shape([b, s, 8]))\ny = R.abs(d)",
        ["nn.gelu", "tanh", "abs"],
    ),
    "of both operands": (
        f"{X}, z: R.Tensor(('b', 's', 8), 'float32')",
        f"{FLAT}\ng = R.reshape(z, R.shape([b * s, 8]))\na = R.multiply(h, g)\n"
        "c = R.reshape(a, R.shape([b, s, 8]))\ny = R.add(c, x)",
        ["multiply", "add"],
    ),
    "of rows and their means": (
        X,
        f"{FLAT}\nm = R.mean(h, axis=[1], keepdims=True)\na = R.subtract(h, m)\n"
        "c = R.reshape(a, R.shape([b, s, 8]))\ny = R.add(c, x)",
        ["mean", "subtract", "add"],
    ),
    "behind a norm by another number of axes": (
        f"{X}, g: R.Tensor((8,), 'float32')",
        f"{FLAT}\na = R.nn.rms_norm(h, g, axes=[1], epsilon=1e-5)\n"
        "c = R.reshape(a, R.shape([b, s, 8]))\ny = R.add(c, x)",
        ["nn.rms_norm", "add"],
    ),
    "behind a LayerNorm": (
        f"{X}, g: R.Tensor((8,), 'float32'), c: R.Tensor((8,), 'float32')",
        f"{FLAT}\na = R.nn.layer_norm(h, g, c, axes=[-1])\n"
        "d = R.reshape(a, R.shape([b, s, 8]))\ny = R.add(d, x)",
        ["nn.layer_norm", "add"],
    ),
    "behind a split": (
        X,
        f"{FLAT}\np = R.split(h, 2, axis=1)\na = p[0]\nc = p[1]\nd = R.multiply(a, c)\n"
        "e = R.reshape(d, R.shape([b, s, 4]))\ny = R.negative(e)",
        ["split", "multiply", "negative"],
    ),
    "behind rows of a table": (
        "i: R.Tensor(('b', 's'), 'int64'), t: R.Tensor((5, 8), 'float32')",
        "j = R.reshape(i, R.shape([b * s]))\nh = R.take(t, j, axis=0)\n"
        "c = R.reshape(h, R.shape([b, s, 8]))\ny = R.negative(c)",
        ["take", "negative"],
    ),
    "a weight expanded to a batch": (
        f"{X}, w: R.Tensor((6, 8), 'float32')",
        "t = R.permute_dims(w)\ne = R.broadcast_to(t, R.shape([b, 8, 6]))\ny = R.matmul(x, e)",
        ["permute_dims", "matmul"],
    ),
    "a weight expanded, then transposed": (
        f"{X}, w: R.Tensor((6, 8), 'float32')",
        "d = R.expand_dims(w, axis=[0])\ne = R.broadcast_to(d, R.shape([b, 6, 8]))\n"
        "t = R.permute_dims(e, axes=[0, 2, 1])\ny = R.matmul(x, t)",
        ["permute_dims", "matmul"],
    ),
    "what has no elements": (
        X,
        "e = R.strided_slice(x, (2,), (0,), (0,))\na = R.concat((x, e), axis=-1)\n"
        "f = R.strided_slice(a, (2,), (0,), (8,))\ny = R.negative(f)",
        ["negative"],
    ),
    "what is broadcast to its own shape": (
        X,
        "a = R.broadcast_to(x, R.shape([b, s, 8]))\ny = R.negative(a)",
        ["negative"],
    ),
}


@pytest.mark.parametrize("case", MOVED)
def test_moves(case: str) -> None:
    params, body, expected = MOVED[case]
    before = module(params, body)
    after = MoveReshapes()(before)
    assert operators(after) == expected
    assert_same_numbers(before, after)


KEPT = {
    "features change": (X, "h = R.reshape(x, R.shape([b, s * 2, 4]))\ny = R.negative(h)"),
    "an operand differs between rows": (
        f"{X}, z: R.Tensor(('b * s', 8), 'float32')",
        f"{FLAT}\na = R.add(h, z)\ny = R.negative(a)",
    ),
    "a batch of matrices": (f"{X}, w: R.Tensor(('b', 8, 6), 'float32')", "y = R.matmul(x, w)"),
    "one matrix for several rows of a batch": (
        "x: R.Tensor((4, 's', 8), 'float32'), w: R.Tensor((2, 8, 6), 'float32')",
        "e = R.expand_dims(w, axis=[1])\nd = R.broadcast_to(e, R.shape([2, 2, 8, 6]))\n"
        "f = R.reshape(d, R.shape([4, 8, 6]))\ny = R.matmul(x, f)",
    ),
    "a weight that makes the batch": (
        "x: R.Tensor(('s', 8), 'float32'), w: R.Tensor((8, 6), 'float32')",
        "e = R.broadcast_to(w, R.shape([3, 8, 6]))\ny = R.matmul(x, e)",
    ),
    "a mean over rows": (X, f"{FLAT}\nm = R.mean(h, axis=[0], keepdims=True)\ny = R.negative(m)"),
    "a norm over rows": (
        f"{X}, g: R.Tensor(('b * s', 8), 'float32')",
        f"{FLAT}\na = R.nn.rms_norm(h, g, axes=[0, 1], epsilon=1e-5)\ny = R.negative(a)",
    ),
    "a norm of a vector": (
        "x: R.Tensor((8,), 'float32'), g: R.Tensor((8,), 'float32')",
        "h = R.reshape(x, R.shape([1, 8]))\ny = R.nn.rms_norm(h, g, axes=[-1], epsilon=1e-5)",
    ),
    "reversed": (X, "a = R.strided_slice(x, (2,), (7,), (-9,), (-1,))\ny = R.negative(a)"),
}


@pytest.mark.parametrize("case", KEPT)
def test_stays(case: str) -> None:
    params, body = KEPT[case]
    symbols = ", ".join(n for n in ("b", "s") if f"'{n}'" in params or f"'{n} " in params)
    before = module(params, body, symbols)
    after = MoveReshapes()(before)
    assert after.same_as(before)


def test_results_keep_memory_of_their_own() -> None:
    before = module(X, "y = R.reshape(x, R.shape([b, s, 8]))")
    assert operators(MoveReshapes()(before)) == ["reshape"]


def test_what_is_written_is_not_moved() -> None:
    before = tvm.script.from_source(
        """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((2, 3, 8), "float32")):
        with R.dataflow():
            h = R.reshape(x, R.shape([6, 8]))
            a = R.negative(h)
            z = R.call_inplace_packed("zero", h, inplace_indices=[0],
                                      ty_args=[R.Tensor((6, 8), "float32")])
            c = R.negative(h)
            y = R.add(R.add(a, c), z)
            R.output(y)
        return y
"""
    )
    assert MoveReshapes()(before).same_as(before)


def test_slices_within_bounds_have_the_size_that_they_say() -> None:
    func = """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("s", 8), "float32")):
        s = T.int64()
        R.func_attr({"tir_var_lower_bound": {"s": 2}})
        with R.dataflow():
            a = R.strided_slice(x, (0,), (0,), (1,))
            c = R.strided_slice(x, (0,), (1,), (s,))
            d = R.strided_slice(x, (0,), (0,), (3,))
            y = R.concat((R.add(a, c), d), axis=0)
            R.output(y)
        return y
"""
    after = MoveReshapes()(tvm.script.from_source(func))
    bindings = {b.var.name: b.var.ty.shape for b in after["main"].body.blocks[0].bindings}
    assert int(bindings["a"].values[0]) == 1
    assert str(bindings["c"].values[0]) == "s - T.int64(1)"
    assert "min" in str(bindings["d"].values[0])
    empty = tvm.script.from_source(func.replace('"s": 2', '"s": 0'))
    assert MoveReshapes()(empty).same_as(empty)


def test_shapes_are_simplified_by_the_bounds_of_their_sizes() -> None:
    before = tvm.script.from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("s", 8), "float32")):
        s = T.int64()
        R.func_attr({"tir_var_upper_bound": {"s": 64}})
        with R.dataflow():
            a = R.reshape(x, R.shape([1, T.min(s, 128), 8]))
            c = R.broadcast_to(x, R.shape([T.min(s, 128), 8]))
            d = R.add(a, c)
            y = R.negative(d)
            R.output(y)
        return y
""")
    after = MoveReshapes()(before)
    bindings = after["main"].body.blocks[0].bindings
    inner = [b.var for b in bindings if isinstance(b.var, relax.DataflowVar)]
    assert inner and all("min" not in str(var.ty) for var in inner)


def chain_at_random(seed: int) -> ir.IRModule:
    """Return a module of operators on rows, between which the rows are regrouped at random."""
    draw = random.Random(seed)
    b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([b, s, 8], "float32"))
    weight = relax.Var("w", relax.TensorType([8, 8], "float32"))
    row = relax.Var("r", relax.TensorType([8], "float32"))
    groupings = ([b, s], [b * s], [s, b], [1, b * s], [b, 1, s])

    def regrouped(value: relax.Expr) -> relax.Expr:
        return relax.op.reshape(value, [*draw.choice(groupings), 8])

    steps = (
        regrouped,
        regrouped,
        lambda v: relax.op.matmul(v, weight),
        lambda v: relax.op.add(v, row),
        lambda v: relax.op.subtract(row, v),
        lambda v: relax.op.multiply(v, relax.const(0.5, "float32")),
        relax.op.nn.silu,
        lambda v: relax.op.nn.rms_norm(v, row, axes=[-1]),
        lambda v: relax.op.maximum(v, relax.op.negative(v)),
        lambda v: relax.op.concat([v, v], axis=-1),
        lambda v: relax.op.divide(v, relax.op.sum(relax.op.exp(v), axis=[-1], keepdims=True)),
        lambda v: relax.op.permute_dims(v),
    )
    with builder.function("main", [x, weight, row]):
        with builder.dataflow():
            values = [x]
            for _ in range(draw.randrange(3, 12)):
                value = builder.emit(draw.choice(steps[:9])(draw.choice(values[-2:])))
                same = [v for v in values if _alike(v, value)]
                if same and draw.random() < 0.4:
                    value = builder.emit(relax.op.add(draw.choice(same), value))
                values.append(value)
            end = draw.choice(steps)(values[-1])
            out = builder.emit_output(builder.emit(end))
        builder.emit_func_output(out)
    return builder.get()


def _alike(a: relax.Expr, b: relax.Expr) -> bool:
    return str(a.ty.shape) == str(b.ty.shape)


@pytest.mark.parametrize("seed", range(0, 120, 12))
def test_chains_at_random(seed: int) -> None:
    assert_chains_keep_numbers(MoveReshapes(), chain_at_random, range(seed, seed + 12))
