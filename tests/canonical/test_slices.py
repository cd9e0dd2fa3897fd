"""MoveSlices: rows that nothing reads are not computed; all others stay, and the numbers do."""

from __future__ import annotations

import pytest
import tvm
from tvm import ir, tirx

from relax_fusion.canonical import MendImports, MoveReshapes, MoveSlices
from relax_fusion.matching.pattern import calls_in

from .common import assert_same_numbers, module, operators

PARAMS = (
    "x: R.Tensor(('b', 's', 8), 'float32'), r: R.Tensor(('b', 's', 8), 'float32'), "
    "w: R.Tensor((8, 8), 'float32'), g: R.Tensor((8,), 'float32'), "
    "m: R.Tensor(('b', 1, 1, 's'), 'float32'), n: R.Tensor(('b', 1, 's', 's'), 'float32'), "
    "i: R.Tensor((1,), 'int64')"
)
HEADS = "h = R.reshape(x, R.shape([b, s, 2, 4]))\n"
LAST = "y = R.strided_slice(z, (1,), (s - 1,), (s,), assume_inbound=True)"
FIRST = "y = R.strided_slice(z, (1,), (0,), (1,), assume_inbound=True)"
PRODUCT = "o = R.matmul(x, w)\n"
ATTENTION = (
    HEADS + "a = R.nn.attention({})\nc = R.reshape(a, R.shape([b, s, 8]))\nz = R.matmul(c, w)\n"
)
WRITTEN_OUT = (
    HEADS
    + """q = R.permute_dims(h, axes=[0, 2, 1, 3])
k = R.permute_dims(h, axes=[0, 2, 3, 1])
e = R.matmul(q, k)
d = R.add(e, {})
p = R.nn.softmax(d, axis=-1)
o = R.matmul(p, q)
a = R.permute_dims(o, axes=[0, 2, 1, 3])
z = R.reshape(a, R.shape([b, s, 8]))
"""
)
MOVED = {
    "a layer behind attention": PRODUCT
    + """c = R.add(r, o)
l = R.nn.layer_norm(c, g, g, axes=[-1], epsilon=1e-5)
u = R.matmul(l, R.concat((w, w), axis=1))
p = R.split(u, 2, axis=-1)
p0 = p[0]
p1 = p[1]
a = R.multiply(R.nn.silu(p0), p1)
z = R.add(c, R.matmul(a, w))
"""
    + LAST,
    "causal attention": ATTENTION.format("h, h, h, causal_mask='BottomRight', window_size=2")
    + LAST,
    "causal attention of as many keys": ATTENTION.format("h, h, h, causal_mask='TopLeft'") + LAST,
    "attention": ATTENTION.format("h, h, h") + FIRST,
    "attention of visible keys": ATTENTION.format("h, h, h, m") + FIRST,
    "attention by a mask": ATTENTION.format("h, h, h, n, causal_mask='TopLeft'") + LAST,
    "attention written out": WRITTEN_OUT.format("n") + LAST,
    "attention of visible keys written out": WRITTEN_OUT.format("m") + FIRST,
    "rows by number": "v = R.concat((x, x, r, r), axis=1)\no = R.matmul(v, w)\n"
    "z = R.add(R.nn.gelu(o), v)\ny = R.take(z, i, axis=1)",
    "a number that drops the axis": "x4 = R.concat((x, x, r, r), axis=1)\n"
    "v = R.strided_slice(x4, (1,), (0,), (4,), assume_inbound=True)\n"
    "o = R.matmul(v, w)\ny = R.take(o, R.const(-1, 'int64'), axis=1)",
    "shapes of all kinds": PRODUCT
    + "e = R.expand_dims(o, axis=[1])\nf = R.broadcast_to(e, R.shape([b, 3, s, 8]))\n"
    "j = R.mean(f, axis=[1])\nt = R.sum(j, axis=[-1], keepdims=True)\nv = R.where("
    "R.greater(t, R.const(0.0, 'float32')), j, r)\nz = R.concat((v, R.flip(v, axis=2)), axis=-1)\n"
    + LAST,
    "batches": "v = R.permute_dims(x, axes=[0, 2, 1])\nz = R.matmul(v, r)\n"
    "y = R.strided_slice(z, (0,), (0,), (1,), assume_inbound=True)",
    "counted from the end": "v = R.reshape(R.concat((x, x), axis=1), R.shape([b, s * 2, 8]))\n"
    "k = R.strided_slice(v, (1,), (0,), (2,), assume_inbound=True)\nz = R.matmul(k, w)\n"
    "y = R.strided_slice(z, (1,), (-1,), (9223372036854775807,))",
    "an operand of all rows, and of some": ATTENTION.format("h, h, h") + "t = R.sum(x, axis=[1])\n"
    "v = R.strided_slice(z, (1,), (0,), (1,), assume_inbound=True)\n"
    "y = R.add(v, R.expand_dims(t, axis=[1]))",
}
ROWS = {"batches": 0}


def rewritten(body: str) -> tuple[ir.IRModule, ir.IRModule]:
    before = module(PARAMS, body.replace("'", '"'))
    before = MoveReshapes()(MendImports()(before))
    after = MoveSlices()(before)
    assert_same_numbers(before, after)
    assert MoveSlices()(after).same_as(after)
    return before, after


@pytest.mark.parametrize("case", MOVED)
def test_moved(case: str) -> None:
    before, after = rewritten(MOVED[case])
    assert sorted(operators(before)) == sorted(
        name for n, name in enumerate(operators(after)) if n not in moved_slices(before, after)
    )
    bindings = [b for block in after["main"].body.blocks for b in block.bindings]
    rows = [
        b.var.ty.shape[ROWS.get(case, -2)] for b in bindings if calls_in(b.value, "relax.matmul")
    ]
    assert rows and all(int(n) == 1 for n in rows)


def moved_slices(before: ir.IRModule, after: ir.IRModule) -> set[int]:
    """Return the places of slices and lookups that are there more than before."""
    names = operators(after)
    places = [n for n, name in enumerate(names) if name in ("strided_slice", "take")]
    return {*places[: len(names) - len(operators(before))]}


SUM = PRODUCT + "c = R.ccl.allreduce(o, 'sum')\n"
STAYS = {
    "rows by number, of an all-reduce": SUM + "y = R.take(c, i, axis=1)",
    "rows of an all-reduce, by another's size": "c = R.ccl.allreduce(R.matmul(w, w), 'sum')\n"
    "y = R.strided_slice(c, (0,), (b - 1,), (b,), assume_inbound=True)",
    "read elsewhere": PRODUCT + "z = R.add(o, r)\nv = R.sum(z, axis=[1], keepdims=True)\n"
    "q = R.strided_slice(z, (1,), (0,), (1,), assume_inbound=True)\ny = R.add(q, v)",
    "other rows read": PRODUCT + "q = R.strided_slice(o, (1,), (0,), (1,), assume_inbound=True)\n"
    "v = R.strided_slice(o, (1,), (s - 1,), (s,), assume_inbound=True)\ny = R.add(q, v)",
    "no product": "z = R.add(R.nn.gelu(x), r)\n" + LAST,
    "sums of rows": PRODUCT + "z = R.cumsum(o, axis=1)\n" + LAST,
    "softmax over rows": PRODUCT + "z = R.nn.softmax(o, axis=1)\n" + LAST,
    "rows that become others": PRODUCT + "z = R.reshape(o, R.shape([b, s * 2, 4]))\n"
    "y = R.strided_slice(z, (1,), (0,), (1,), assume_inbound=True)",
    "columns": PRODUCT + "y = R.strided_slice(o, (2,), (0,), (4,), assume_inbound=True)",
    "every second": PRODUCT + "y = R.strided_slice(o, (2,), (0,), (8,), (2,))",
    "first rows of causal attention": HEADS
    + "z = R.nn.attention(h, h, h, causal_mask='BottomRight')\n"
    + FIRST,
    "causal attention, by number": HEADS
    + "z = R.nn.attention(h, h, h, causal_mask='BottomRight')\ny = R.take(z, i, axis=1)",
    "fewer keys": HEADS + "k = R.strided_slice(h, (1,), (0,), (1,), assume_inbound=True)\n"
    "z = R.nn.attention(h, k, k, causal_mask='TopLeft')\n" + LAST,
    "as many rows by number": "o = R.matmul(R.strided_slice(x, (1,), (0,), (1,)), w)\n"
    "y = R.take(o, i, axis=1)",
    "written in between": "o = R.matmul(x, w)\nq = R.call_inplace_packed('zero', o, "
    "inplace_indices=[0], ty_args=[R.Tensor((b, s, 8), 'float32')])\n"
    "v = R.strided_slice(o, (1,), (0,), (1,), assume_inbound=True)\ny = R.add(v, q)",
    "parts read elsewhere": "u = R.matmul(x, R.concat((w, w), axis=1))\n"
    "p = R.split(u, 2, axis=-1)\n"
    "p0 = p[0]\np1 = p[1]\nq = R.strided_slice(p0, (1,), (0,), (1,), assume_inbound=True)\n"
    "y = R.add(p1, q)",
    "code of the world outside": "o = R.matmul(x, w)\nz = R.call_pure_packed('f', o, "
    "ty_args=(R.Tensor((b, s, 8), 'float32'),))\n" + LAST,
    "no shape known": "o = R.matmul(x, w)\nz = R.call_pure_packed('f', o, ty_args=(R.Tensor("
    "ndim=3, dtype='float32'),))\ny = R.strided_slice(z, (1,), (0,), (1,))",
}


@pytest.mark.parametrize("case", STAYS)
def test_stays(case: str) -> None:
    before = module(PARAMS, STAYS[case].replace("'", '"'))
    assert MoveSlices()(before).same_as(before)


def test_all_workers_reduce_the_rows_that_a_shape_says() -> None:
    before = module(PARAMS, (SUM + "z = R.add(r, c)\n" + LAST).replace("'", '"'))
    after = MoveSlices()(before)
    moved = ["strided_slice", "matmul", "ccl.allreduce", "strided_slice", "add"]
    assert (operators(after), matmul_rows(after)) == (moved, ["1"])


RESULT = ' -> R.Tensor((b, 1, 8), dtype="float32"):'


def test_a_result_stays() -> None:
    text = MOVED["causal attention"].replace("'", '"')
    before = module(PARAMS, text)
    source = before.script().replace("R.output(y)", "R.output(y, z)")
    source = source.replace("return y", "return (y, z)").replace(RESULT, ":")
    before = tvm.script.from_source(source)
    assert MoveSlices()(before).same_as(before)


def attention_of(x: str, name: str) -> str:
    """Return attention of `x` to itself by the mask `n`, with `name` in front of all it names."""
    text = WRITTEN_OUT.format("n").replace("reshape(x,", f"reshape({x},")
    for each in "hqkedpoaz":
        text = text.replace(f"{each} =", f"{name}{each} =").replace(f"({each},", f"({name}{each},")
        text = text.replace(f", {each})", f", {name}{each})")
    return text


def matmul_rows(mod: ir.IRModule) -> list[str]:
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    sizes = [b.var.ty.shape[-2] for b in bindings if calls_in(b.value, "relax.matmul")]
    return [str(n) if isinstance(n, tirx.Var) else str(int(n)) for n in sizes]


def test_attention_stays_whole_where_its_weights_are_read() -> None:
    text = attention_of("x", "f") + "t = R.sum(fp, axis=[1, 2])\nz = R.matmul(fz, w)\n"
    text += LAST.replace("y =", "v =") + "\ny = R.add(v, R.sum(t))"
    before, after = rewritten(text)
    assert matmul_rows(before) == ["s", "s", "s"] and matmul_rows(after) == ["s", "s", "1"]


MASK = """c = R.arange(0, s, 1, 'int64')
i1 = R.reshape(c, R.shape([s, 1]))
i2 = R.reshape(c, R.shape([1, s]))
l = R.less_equal(i2, i1)
f0 = R.where(l, R.const(0.0, 'float32'), R.const(-1e9, 'float32'))
n = R.add(f0, m)
"""


def test_a_mask_of_positions_is_made_for_the_rows_that_are_left() -> None:
    text = MASK + attention_of("x", "f") + attention_of("fz", "g") + LAST.replace("(z,", "(gz,")
    params = PARAMS.replace("n: R.Tensor(('b', 1, 's', 's'), 'float32'), ", "")
    before = module(params, text.replace("'", '"'))
    after = MoveSlices()(before)
    assert_same_numbers(before, after)
    assert matmul_rows(after) == ["s", "s", "1", "1"]
    names = operators(after)
    assert names.count("arange") == 2 and names.count("strided_slice") == 1  # of queries
