"""FuseAttentionChain: what masks, biases, soft-caps and sinks of scores become."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm.tirx import Var

from relax_fusion import DynamicDim
from relax_fusion.matching.pattern import BlockView
from relax_fusion.passes import FuseAttentionChain

from ..support.attention_chains import BASE, QKV, SQUARE, attention, check, const, positions
from ..support.chain_reference import size
from ..support.chains import Chain, Rewrite, assert_numbers, module
from ..support.masks import assert_same_mask
from ..support.typed import Typed

INF, LOW = const(float("-inf")), const(-3.4e38)
SIX = replace(BASE, q_len=6, kv_len=6)
GPT2_MASK = (
    'ones = R.ones((1, 1, 16, 16), "bool"); low = R.tril(ones, 0)\n'
    "m = R.strided_slice(low, axes=[2, 3], begin=[0, 0], end=[6, 6])\n"
)
ROWS = "q[b,4,s,8] k[b,4,n,8] v[b,4,n,8]"
SIZES = {"b": 2, "s": 3, "n": 7}
DYNAMIC = replace(BASE, batch=DynamicDim("b"), q_len=DynamicDim("s"), kv_len=DynamicDim("n"))
ALIBI = (
    positions("6", "6")
    + 'd0 = R.subtract(j, i); d = R.astype(d0, "float32"); w = R.reshape(W, [1, 4, 1, 1])\n'
)
LINEAR = ("arange", "arange", "add", "expand_dims", "expand_dims", "subtract", "astype")
LINEAR += ("multiply", "multiply")
SINK = (
    "c0 = R.reshape(W, [1, 4, 1, 1]); c = R.broadcast_to(c0, [2, 4, 5, 1])\n"
    "j = R.concat((s0, c), axis=-1)\n{shift}p0 = R.nn.softmax({scores}, axis=-1)\n"
    "p = R.strided_slice(p0, axes=[3], begin=[0], end=[7]); o = R.matmul(p, v)"
)
PRODUCT = attention("").split("\n")[0] + "\n"


def by_mask(name: str, steps: str, mask: str, work, inputs: str = SQUARE, args="q k v", **more):
    """Add `mask` to the scores."""
    left = more.pop("left", ())
    body = attention(f"{steps}s = R.add(s0, {mask})")
    return Rewrite(Chain(name, inputs, body, "o", **more), work, args, left)


def kept(name: str, steps: str, where: str, work, inputs: str = SQUARE, args="q k v", **more):
    """Choose scores, or something else, by `where`."""
    left = more.pop("left", ())
    body = attention(f"{steps}s = R.where({where})")
    return Rewrite(Chain(name, inputs, body, "o", **more), work, args, left)


CAUSAL = [
    kept("tril_of_ones", GPT2_MASK, f"m, s0, {LOW}", replace(SIX, causal="top_left")),
    kept(
        "masked_fill_of_not_tril",
        'l = R.tril(R.ones((6, 6), "float32"), 0); m = R.equal(l, R.const(0.0, "float32"))\n',
        f"m, {INF}, s0",
        replace(SIX, causal="top_left"),
    ),
    by_mask(
        "triu_of_very_low_numbers",
        f'f = R.full((6, 6), {LOW}, "float32"); m = R.triu(f, 1)\n',
        "m",
        replace(SIX, causal="top_left"),
    ),
    by_mask(
        "comparison_of_positions",
        positions("6", "6") + f"c = R.less_equal(j, i); m = R.where(c, {const(0.0)}, {LOW})\n",
        "m",
        replace(SIX, causal="top_left"),
    ),
    kept(
        "bottom_right_by_an_offset",
        positions(offset=2) + "c = R.greater_equal(i, j)\n",
        f"c, s0, {INF}",
        replace(BASE, causal="bottom_right"),
        QKV,
    ),
    kept(
        "top_left_of_more_keys",
        positions() + "c = R.greater(j, i)\n",
        f"c, {INF}, s0",
        replace(BASE, causal="top_left"),
        QKV,
    ),
    kept(
        "dynamic_sizes",
        positions("s", "n") + "c = R.less_equal(j, i)\n",
        f"c, s0, {INF}",
        replace(DYNAMIC, causal="top_left"),
        ROWS,
        sizes=SIZES,
    ),
    kept(
        "one_query_sees_all",
        positions("1", "7", 6) + "c = R.less_equal(j, i)\n",
        f"c, s0, {INF}",
        replace(BASE, q_len=1, q_layout="bnsh"),
        QKV.replace("q[2,4,5,8]", "q[2,4,1,8]"),
    ),
    kept(
        "everything_is_seen",
        positions() + f"c = R.greater_equal(i, {const(0, 'int64')})\n",
        f"c, s0, {INF}",
        BASE,
        QKV,
    ),
]
WINDOWS = [
    kept(
        "window_of_a_causal_mask",
        positions("6", "6")
        + f"c0 = R.less_equal(j, i); i2 = R.subtract(i, {const(3, 'int64')})\n"
        + "c1 = R.greater(j, i2); c = R.logical_and(c0, c1)\n",
        f"c, s0, {INF}",
        replace(SIX, causal="top_left", window=3),
    ),
    kept(
        "window_at_the_bottom_right",
        positions(offset=2)
        + f"d = R.subtract(i, j); c0 = R.greater_equal(d, {const(0, 'int64')})\n"
        + f"c1 = R.less(d, {const(3, 'int64')}); c = R.bitwise_and(c0, c1)\n",
        f"c, s0, {INF}",
        replace(BASE, causal="bottom_right", window=3),
        QKV,
    ),
    kept(
        "window_without_a_causal_mask",
        positions("6", "6") + f"i2 = R.subtract(i, {const(3, 'int64')}); c = R.greater(j, i2)\n",
        f"c, s0, {INF}",
        replace(SIX, window=3),
    ),
    kept(
        "window_of_the_last_query",
        positions("1", offset=6)
        + f"i2 = R.subtract(i, {const(3, 'int64')}); c = R.greater(j, i2)\n",
        f"c, s0, {INF}",
        replace(BASE, q_len=1, causal="bottom_right", window=3),
        QKV.replace("q[2,4,5,8]", "q[2,4,1,8]"),
    ),
    kept(
        "window_to_both_sides_stays_a_mask",
        positions("6", "6")
        + f"d = R.subtract(i, j); c0 = R.less(d, {const(3, 'int64')})\n"
        + f"c1 = R.greater(d, {const(-3, 'int64')}); c = R.logical_and(c0, c1)\n",
        f"c, s0, {INF}",
        replace(SIX, mask_dims=(False, False, True, True)),
        args="q k v c",
        left=(*LINEAR[:6], "less", "greater", "logical_and"),
    ),
    kept(
        "two_masks_one_after_the_other",
        positions("6", "6")
        + f"c0 = R.greater(j, i); i2 = R.subtract(i, {const(3, 'int64')})\n"
        + f"s1 = R.where(c0, {INF}, s0); c = R.greater(j, i2)\n",
        f"c, s1, {LOW}",
        replace(SIX, causal="top_left", window=3),
    ),
]
DATA = [
    kept(
        "boolean_mask",
        "",
        f"m, s0, {INF}",
        replace(BASE, mask_dims=(True, False, False, True)),
        QKV + " m[2,1,1,7]:bool",
        "q k v m",
    ),
    kept(
        "boolean_mask_of_what_is_hidden",
        "",
        f"h, {INF}, s0",
        replace(BASE, mask_dims=(True, False, True, True)),
        QKV + " h[2,1,5,7]:bool",
        "q k v made",
        left=("logical_not",),
    ),
    kept(
        "boolean_mask_negated",
        "h = R.logical_not(m)\n",
        f"h, {INF}, s0",
        replace(BASE, mask_dims=(False, False, True, True)),
        QKV + " m[5,7]:bool",
        "q k v m",
    ),
    kept(
        "boolean_mask_whose_rows_were_two_axes",
        "r = R.reshape(m, [6, 6])\n",
        f"r, s0, {INF}",
        replace(SIX, mask_dims=(False, False, True, True)),
        SQUARE + " m[2,3,6]:bool",
        "q k v m",
    ),
    kept(
        "boolean_mask_and_positions",
        positions("6", "6") + "c0 = R.less_equal(j, i); c = R.logical_and(c0, m)\n",
        f"c, s0, {INF}",
        replace(SIX, causal="top_left", mask_dims=(True, False, False, True)),
        SQUARE + " m[2,1,1,6]:bool",
        "q k v m",
    ),
    by_mask(
        "additive_mask_made_of_one_of_head_groups",
        f"a = R.where(m, {const(0.0)}, {LOW}); c = R.expand_dims(a, axis=[2])\n"
        + "w = R.broadcast_to(c, (2, 2, 2, 1, 6)); b = R.reshape(w, R.shape([2, 4, 1, 6]))\n",
        "b",
        replace(SIX, bias_dims=(True, True, False, True)),
        SQUARE + " m[2,2,1,6]:bool",
        "q k v w",
        left=("where", "expand_dims", "broadcast_to"),
    ),
    by_mask(
        "additive_mask_made_of_a_boolean_one",
        f"b0 = R.where(m, {const(0.0)}, {INF}); b = R.expand_dims(b0, axis=[1, 2])\n",
        "b",
        replace(BASE, mask_dims=(True, False, False, True)),
        QKV + " m[2,7]:bool",
        "q k v m",
    ),
    by_mask(
        "bias_and_additive_mask_in_one",
        f"b0 = R.where(m, {const(0.0)}, {INF}); b = R.add(y, b0)\n",
        "b",
        replace(BASE, bias_dims=(False, True, True, True), mask_dims=(True, False, False, True)),
        QKV + " m[2,1,1,7]:bool y[1,4,5,7]",
        "q k v y m",
    ),
    by_mask(
        "bias_hidden_by_a_mask",
        f"b = R.where(m, y, {INF})\n",
        "b",
        replace(BASE, bias_dims=(False, True, True, True), mask_dims=(True, False, False, True)),
        QKV + " m[2,1,1,7]:bool y[1,4,5,7]",
        "q k v y m",
    ),
    by_mask(
        "bias_and_causal_mask_in_one",
        positions("6", "6")
        + f"c = R.less_equal(j, i); m = R.where(c, {const(0.0)}, {INF}); b = R.add(y, m)\n",
        "b",
        replace(SIX, causal="top_left", bias_dims=(False, True, True, True)),
        SQUARE + " y[1,4,6,6]",
        "q k v y",
    ),
    Rewrite(
        Chain(
            "bias_and_then_a_causal_mask",
            SQUARE + " y[4,6,6]",
            attention(
                positions("6", "6")
                + f"c = R.less_equal(j, i); m = R.where(c, {const(0.0)}, {INF})\n"
                + "s1 = R.add(s0, y); s = R.add(m, s1)"
            ),
            "o",
        ),
        replace(SIX, causal="top_left", bias_dims=(False, True, True, True)),
        "q k v y",
    ),
    Rewrite(
        Chain(
            "mask_and_then_a_scale",
            SQUARE,
            attention(
                positions("6", "6")
                + f"c = R.less_equal(j, i); m = R.where(c, {const(0.0)}, {LOW})\n"
                + f"s1 = R.add(s0, m); s = R.multiply(s1, {const(0.125)})"
            ),
            "o",
        ),
        replace(SIX, causal="top_left", scale=0.125),
        "q k v",
    ),
    Rewrite(
        Chain(
            "bias_and_then_a_scale",
            QKV + " y[2,1,1,7]",
            attention(f"s1 = R.subtract(s0, y); s = R.multiply(s1, {const(0.125)})"),
            "o",
        ),
        replace(BASE, bias_dims=(True, False, False, True), scale=0.125),
        "q k v made",
        ("multiply",),
    ),
    Rewrite(
        Chain(
            "mask_taken_off",
            QKV + " y[2,1,1,7]",
            attention("s = R.subtract(s0, y)"),
            "o",
        ),
        replace(BASE, bias_dims=(True, False, False, True)),
        "q k v made",
        ("negative",),
    ),
    Rewrite(
        Chain(
            "minimum_with_a_mask",
            QKV + " y[2,1,5,7]",
            attention(f"s1 = R.maximum(s0, {LOW}); s = R.minimum(s1, y)"),
            "o",
        ),
        replace(BASE, bias_dims=(True, False, True, True), bias_op="min"),
        "q k v y",
    ),
    Rewrite(
        Chain(
            "minimum_with_a_mask_that_bounds_what_is_seen",
            QKV + " m[2,1,1,7]:bool",
            attention(f"b = R.where(m, {const(5.0)}, {LOW}); s = R.minimum(s0, b)"),
            "o",
        ),
        replace(BASE, bias_dims=(True, False, False, True), bias_op="min"),
        "q k v b",
        ("where",),
    ),
    Rewrite(
        Chain(
            "minimum_with_two_masks",
            QKV + " m[2,1,1,7]:bool n[5,7]:bool",
            attention(
                f"c = R.logical_and(m, n); b = R.where(c, {const(3.4e38)}, {LOW})\n"
                "s = R.minimum(s0, b)"
            ),
            "o",
        ),
        replace(BASE, bias_dims=(True, False, True, True), bias_op="min"),
        "q k v b",
        ("logical_and", "where"),
    ),
    Rewrite(
        Chain(
            "minimum_with_positions",
            SQUARE,
            attention(
                positions("6", "6")
                + f"c = R.less_equal(j, i); m = R.where(c, {const(3.4e38)}, {LOW})\n"
                + "s = R.minimum(s0, m)"
            ),
            "o",
        ),
        replace(SIX, causal="top_left"),
        "q k v",
    ),
]
SCORES = [
    Rewrite(
        Chain(
            "soft_cap",
            QKV,
            attention(
                f"s1 = R.multiply(s0, {const(0.25)}); s2 = R.divide(s1, {const(2.0)})\n"
                f"s3 = R.tanh(s2); s = R.multiply(s3, {const(2.0)})"
            ),
            "o",
        ),
        replace(BASE, scale=0.25, softcap=2.0),
        "q k v",
    ),
    kept(
        "soft_cap_bias_and_mask",
        f"s1 = R.tanh(s0); s2 = R.multiply({const(1.5)}, s1); s3 = R.add(s2, y)\n"
        + positions("6", "6")
        + "c = R.less_equal(j, i)\n",
        f"c, s3, {INF}",
        replace(
            SIX, scale=1.5, softcap=1.5, causal="top_left", bias_dims=(False, True, True, True)
        ),
        SQUARE + " y[4,6,6]",
        "q k v y",
    ),
    kept(
        "alibi",
        ALIBI + "m = R.multiply(w, d); s1 = R.add(s0, m); c = R.less_equal(j, i)\n",
        f"c, s1, {INF}",
        replace(SIX, causal="top_left", alibi="float32"),
        SQUARE + " W[4]",
        "q k v W",
    ),
    by_mask(
        "alibi_by_keys",
        ALIBI + 'e = R.astype(j, "float32"); m = R.multiply(e, w)\n',
        "m",
        replace(SIX, alibi="float32"),
        SQUARE + " W[4]",
        "q k v W",
    ),
    by_mask(
        "bias_by_twice_the_distance",
        ALIBI + f"e = R.multiply(d, {const(2.0)}); m = R.multiply(w, e)\n",
        "m",
        replace(SIX, bias_dims=(False, True, True, True)),
        SQUARE + " W[4]",
        "q k v m",
        left=LINEAR,
    ),
    Rewrite(
        Chain(
            "largest_score_taken_off",
            QKV,
            attention("m = R.max(s0, axis=[-1], keepdims=True); s = R.subtract(s0, m)"),
            "o",
        ),
        BASE,
        "q k v",
    ),
    Rewrite(
        Chain(
            "largest_score_by_topk",
            QKV,
            attention(
                'a = R.topk(s0, k=1, axis=-1, ret_type="both", largest=True); m = a[0]\n'
                "s = R.subtract(s0, m)"
            ),
            "o",
        ),
        BASE,
        "q k v",
    ),
    Rewrite(
        Chain(
            "sinks_beside_alibi_from_the_query",
            QKV + " W[4] u[4]",
            PRODUCT
            + positions(offset=2)
            + 'd0 = R.subtract(j, i); d = R.astype(d0, "float32"); w = R.reshape(u, [1, 4, 1, 1])\n'
            + "m = R.multiply(w, d); s1 = R.add(s0, m); e = R.less_equal(j, i)\n"
            + f"s2 = R.where(e, s1, {INF})\n"
            + SINK.format(shift="", scores="j").replace("(s0, c)", "(s2, c)"),
            "o",
        ),
        replace(BASE, causal="bottom_right", alibi="float32", sinks="float32"),
        "q k v u W",
    ),
    Rewrite(
        Chain("sinks", QKV + " W[4]", PRODUCT + SINK.format(shift="", scores="j"), "o"),
        replace(BASE, sinks="float32"),
        "q k v W",
    ),
    Rewrite(
        Chain(
            "sinks_with_the_largest_taken_off",
            QKV + " W[4]",
            PRODUCT
            + SINK.format(
                shift="z = R.max(j, axis=[-1], keepdims=True); y = R.subtract(j, z)\n", scores="y"
            ),
            "o",
        ),
        replace(BASE, sinks="float32"),
        "q k v W",
    ),
    Rewrite(
        Chain(
            "sinks_of_a_softmax_in_float32",
            QKV + " W[4]",
            PRODUCT
            + SINK.format(shift='y = R.astype(j, "float32")\n', scores="y").replace(
                "o = R.matmul(p, v)", 'w = R.astype(p, "float16"); o = R.matmul(w, v)'
            ),
            "o",
            dtype="float16",
        ),
        replace(BASE, dtype="float16", out_dtype="float16", sinks="float16"),
        "q k v W",
    ),
    Rewrite(
        Chain(
            "safe_softmax",
            QKV + " m[2,1,5,7]:bool",
            PRODUCT
            + f"s = R.where(m, s0, {INF}); p0 = R.nn.softmax(s, axis=-1); e = R.equal(s, {INF})\n"
            'n = R.logical_not(e); n8 = R.astype(n, "int8")\n'
            'a8 = R.max(n8, axis=[-1], keepdims=True); a = R.astype(a8, "bool")\n'
            f"x = R.logical_not(a); z = R.full((2, 4, 5, 7), {const(0.0)}, 'float32')\n"
            "p = R.where(x, z, p0)\n"
            "o = R.matmul(p, v)",
            "o",
        ),
        replace(BASE, mask_dims=(True, False, True, True)),
        "q k v m",
    ),
]
MASKS = [r.chain for r in (*CAUSAL, *WINDOWS, *DATA)]
REWRITES = [*CAUSAL, *WINDOWS, *DATA, *SCORES]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    check(case)


@pytest.fixture(scope="module")
def masked():
    return module(MASKS)


@pytest.mark.parametrize("chain", MASKS, ids=lambda c: c.name)
def test_mask_is_that_of_the_graph(masked, chain: Chain) -> None:
    func = masked[chain.name]
    block = func.body.blocks[0]
    named = {b.var.name: b.var for b in block.bindings}
    product, scores = named["s0"], block.bindings[-2].value.args[0]
    given: dict = dict(zip(func.params, chain.arrays(), strict=True))
    given |= {d: chain.sizes[d.name] for p in func.params for d in p.ty.shape if isinstance(d, Var)}
    given[product] = np.zeros([size(d, given) for d in product.ty.shape], "float32")
    match = FuseAttentionChain().match(BlockView(block, masked), named["o"])
    assert match is not None
    assert_same_mask(match, Typed(block.bindings, given), scores)


CHAINS = [r.chain for r in (*CAUSAL[3:6], *WINDOWS[1:3], *DATA[1:9:2], *SCORES)]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
