"""Rotated heads: FuseRMSNormMatmul and FuseMatmulEpilogue take a rotary embedding along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from relax_fusion import Reason
from relax_fusion.workload import Dim, DynamicDim, Norm, NormMatmul, Projection, Rope

from ..support.chains import (
    Chain,
    Rewrite,
    assert_numbers,
    calls,
    compiled,
    fused,
    module,
    run_pass,
)

MATMUL, NORM_MATMUL = "FuseMatmulEpilogue", "FuseRMSNormMatmul"
RMS = Norm("rms", 1e-5)
H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
END = 9223372036854775807


def turn(source: str, cos: str, sin: str, end: str = "y", axis: int = 3, half: int = 8) -> str:
    """Return the rotation of `source` to `end`, as Hugging Face's models are exported."""
    e = end
    return (
        f"{e}a = R.multiply({source}, {cos})\n"
        f"{e}l = R.strided_slice({source}, axes=[{axis}], begin=[0], end=[{half}])\n"
        f"{e}h = R.strided_slice({source}, axes=[{axis}], begin=[{half}], end=[{END}])\n"
        f"{e}n = R.negative({e}h)\n"
        f"{e}r = R.concat(({e}n, {e}l), axis=-1)\n"
        f"{e}b = R.multiply({e}r, {sin})\n"
        f"{e} = R.add({e}a, {e}b)\n"
    )


def cut(source: str, at: int, end: int = END, axis: int = 3) -> str:
    """Return the cut of the last axis of `source` in two, named with f and k behind it."""
    return (
        f"{source}f = R.strided_slice({source}, axes=[{axis}], begin=[0], end=[{at}])\n"
        f"{source}k = R.strided_slice({source}, axes=[{axis}], begin=[{at}], end=[{end}])\n"
    )


def neighbours(
    source: str, cos: str, sin: str, end: str = "y", shape: Sequence[int] = (2, 6, 4, 16)
) -> str:
    """Return the rotation of neighbours, as GPT-J, GLM and Cohere are exported."""
    e, axis = end, len(shape) - 1
    return (
        f"{e}a = R.multiply({source}, {cos})\n"
        f"{e}l = R.strided_slice({source}, axes=[{axis}], begin=[0], end=[{END}], strides=[2])\n"
        f"{e}h = R.strided_slice({source}, axes=[{axis}], begin=[1], end=[{END}], strides=[2])\n"
        f"{e}n = R.expand_dims(R.negative({e}h), axis=[{axis + 1}])\n"
        f"{e}p = R.concat(({e}n, R.expand_dims({e}l, axis=[{axis + 1}])), axis=-1)\n"
        f"{e}r = R.reshape({e}p, R.shape({[*shape]}))\n"
        f"{e} = R.add({e}a, R.multiply({e}r, {sin}))\n"
    )


WIDE = "c = R.expand_dims(C, axis=[1]); s = R.expand_dims(S, axis=[1])\n"
Q = "m = R.matmul(x, W)\n"
Q4 = Q + "q = R.reshape(m, R.shape([2, 6, 4, 16]))\n" + WIDE
INPUTS = "x[2,6,32] W[32,64] C[6,16] S[6,16]"


def rope(
    features: int, positions: Dim | None = None, dtype: str = "float32", head_dim: int = 16
) -> Rope:
    return Rope(head_dim, features, dtype, positions)


def work(
    turned: Rope | None,
    *steps: str,
    n: int = 64,
    rows: Dim = 12,
    norm: Norm | None = None,
    dtype: str = "float32",
) -> NormMatmul:
    return NormMatmul(rows, 32, (Projection(n, "kn", steps, turned),), norm, dtype, dtype)


ONE = "x[2,6,32] W[32,48] C[6,16] S[6,16]"
ONE_HEAD = (
    Q
    + "p = R.split(m, [16], axis=-1); q = p[0]; v = p[1]\n"
    + turn("q", "C", "S", "qr", axis=2)
    + "y = R.concat((qr, v), axis=-1)"
)
ONE_HEAD_AND_Z = ONE_HEAD.replace("(qr, v)", "(qr, z)")
REWRITES = [
    Rewrite(
        Chain("heads", INPUTS, Q4 + turn("q", "c", "s"), "y"),
        work(rope(64, 6)),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain(
            "transposed_heads",
            "x[2,6,32] W[32,64] C[1,6,16] S[1,6,16]",
            Q
            + "q3 = R.reshape(m, R.shape([2, 6, 4, 16])); q = R.permute_dims(q3, [0, 2, 1, 3])\n"
            + WIDE
            + turn("q", "c", "s"),
            "y",
        ),
        work(rope(64, 6)),
        "x W C S",
        ("expand_dims", "expand_dims", "permute_dims"),
    ),
    Rewrite(
        Chain(
            "angles_of_each_row",
            "x[2,6,32] W[32,64] C[2,6,16] S[2,6,16]",
            Q4.replace("axis=[1]", "axis=[2]") + turn("q", "c", "s"),
            "y",
        ),
        work(rope(64)),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain(
            "one_token_of_each_sequence",
            "x[b,1,32] W[32,64] C[1,16] S[1,16]",
            Q4.replace("[2, 6, 4", "[b, 1, 4") + turn("q", "c", "s"),
            "y",
            {"b": 3},
        ),
        work(rope(64, 1), rows=DynamicDim("b")),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain(
            "symbolic_sizes",
            "x[b,t,32] W[32,64] C[t,16] S[t,16]",
            Q4.replace("[2, 6, 4", "[b, t, 4") + turn("q", "c", "s"),
            "y",
            {"b": 3, "t": 5},
        ),
        work(rope(64, DynamicDim("t")), rows=DynamicDim("b * t")),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain(
            "bias_in_front",
            INPUTS + " b[64]",
            "m0 = R.matmul(x, W); m = R.add(m0, b)\n" + Q4.removeprefix(Q) + turn("q", "c", "s"),
            "y",
        ),
        work(rope(64, 6), "bias"),
        "x W b C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain(
            "turned_in_float32",
            "x[2,6,32] W[32,64] C[6,16]:float32 S[6,16]:float32",
            Q4
            + 'p = R.astype(q, "float32")\n'
            + turn("p", "c", "s", "z")
            + 'y = R.astype(z, "float16")',
            "y",
            dtype="float16",
        ),
        work(rope(64, 6), dtype="float16"),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain("angles_of_the_dtype", INPUTS, Q4 + turn("q", "c", "s"), "y", dtype="float16"),
        work(rope(64, 6, "float16"), dtype="float16"),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain(
            "halves_by_split",
            INPUTS,
            Q4
            + "p = R.split(q, 2, axis=-1); l = p[0]; u = p[1]\n"
            + 'n = R.multiply(u, R.const(-1.0, "float32")); r = R.concat((n, l), axis=3)\n'
            + "a = R.multiply(s, r); d = R.multiply(c, q); y = R.add(a, d)",
            "y",
        ),
        work(rope(64, 6)),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain(
            "one_head",
            "x[6,32] W[32,16] C[6,16] S[6,16]",
            Q + turn("m", "C", "S", axis=1),
            "y",
        ),
        work(rope(16), n=16, rows=6),
        "x W C S",
    ),
    Rewrite(
        Chain(
            "merged_and_split",
            INPUTS.replace("64", "96"),
            Q
            + "p = R.split(m, [32, 64], axis=-1); q0 = p[0]; k0 = p[1]; v = p[2]\n"
            + "q = R.reshape(q0, R.shape([2, 6, 2, 16]))\n"
            + "k = R.reshape(k0, R.shape([2, 6, 2, 16]))\n"
            + WIDE
            + turn("q", "c", "s", "qr")
            + turn("k", "c", "s", "kr"),
            "(qr, kr, v)",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        ("expand_dims", "expand_dims", "split"),
    ),
    Rewrite(
        Chain(
            "merged_and_sliced_by_heads",
            INPUTS.replace("64", "96"),
            Q
            + "w = R.reshape(m, R.shape([2, 6, 6, 16]))\n"
            + "q = R.strided_slice(w, axes=[2], begin=[0], end=[4])\n"
            + "v = R.strided_slice(w, axes=[2], begin=[4], end=[6])\n"
            + WIDE
            + turn("q", "c", "s", "qr"),
            "(qr, v)",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        ("expand_dims", "expand_dims", "strided_slice", "strided_slice"),
    ),
    Rewrite(
        Chain(
            "put_together_again",
            INPUTS.replace("64", "96"),
            Q
            + "p = R.split(m, [64], axis=-1); q0 = p[0]; v = p[1]\n"
            + "q = R.reshape(q0, R.shape([2, 6, 4, 16]))\n"
            + WIDE
            + turn("q", "c", "s", "qr")
            + "f = R.reshape(qr, R.shape([2, 6, 64])); y = R.concat((f, v), axis=-1)",
            "y",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        ("expand_dims", "expand_dims"),
    ),
    Rewrite(
        Chain("one_head_put_together_again", ONE, ONE_HEAD, "y"),
        work(rope(16, 6), n=48),
        "x W C S",
    ),
    Rewrite(
        Chain("put_together_and_returned", ONE, ONE_HEAD, "(y, qr)"),
        work(rope(16, 6), n=48),
        "x W C S",
        ("concat", "split"),
    ),
    Rewrite(
        Chain("put_together_with_another_tensor", ONE + " z[2,6,32]", ONE_HEAD_AND_Z, "y"),
        work(rope(16, 6), n=48),
        "x W C S",
        ("concat", "split"),
    ),
    Rewrite(
        Chain(
            "put_together_in_another_order",
            INPUTS.replace("64", "96"),
            Q
            + "p = R.split(m, [64], axis=-1); q0 = p[0]; v = p[1]\n"
            + "q = R.reshape(q0, R.shape([2, 6, 4, 16]))\n"
            + WIDE
            + turn("q", "c", "s", "qr")
            + "f = R.reshape(qr, R.shape([2, 6, 64])); y = R.concat((v, f), axis=-1)",
            "y",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        ("concat", "expand_dims", "expand_dims", "split"),
    ),
]


HALF_WIDE = "x[2,6,32] W[32,64] C[6,8] S[6,8]"
PARTLY = Q4 + cut("q", 8) + turn("qf", "c", "s", half=4)
BY_PAIR = (
    "y1 = R.subtract(R.multiply(l, c), R.multiply(u, s))\n"
    "y2 = R.add(R.multiply(u, c), R.multiply(s, l))\n"
)
TURNS = (
    Q
    + "w = R.reshape(m, R.shape([2, 6, 2, 48])); p = R.split(w, 3, axis=-1)\n"
    + "q = p[0]; k = p[1]; v = p[2]\n"
    + WIDE
)
GROUPS = (
    Q
    + "w = R.reshape(m, R.shape([2, 6, 2, 4, 16]))\n"
    + "q5 = R.strided_slice(w, axes=[3], begin=[0], end=[-2])\n"
    + "k5 = R.strided_slice(w, axes=[3], begin=[2], end=[3])\n"
    + "v = R.strided_slice(w, axes=[3], begin=[3], end=[4])\n"
    + "q = R.reshape(q5, R.shape([2, 6, 4, 16]))\n"
    + "k6 = R.broadcast_to(k5, R.shape([2, 6, 2, 2, 16]))\n"
    + "k = R.reshape(k6, R.shape([2, 6, 4, 16]))\n"
    + WIDE
)
EXPANDS = ("expand_dims", "expand_dims")
FORMS = [
    Rewrite(
        Chain(
            "part_of_each_head",
            HALF_WIDE,
            PARTLY + "z = R.concat((y, qk), axis=-1)",
            "z",
        ),
        work(replace(rope(64, 6), rotary_dim=8)),
        "x W C S",
        EXPANDS,
    ),
    Rewrite(
        Chain("part_alone", HALF_WIDE, PARTLY, "(y, qk)"),
        work(replace(rope(64, 6), rotary_dim=8)),
        "x W C S",
        (*EXPANDS, "strided_slice", "strided_slice"),
    ),
    Rewrite(
        Chain(
            "part_put_together_and_read",
            HALF_WIDE,
            PARTLY + "z = R.concat((y, qk), axis=-1); e = R.exp(qk)",
            "(z, e)",
        ),
        work(replace(rope(64, 6), rotary_dim=8)),
        "x W C S",
        ("exp", *EXPANDS, "strided_slice"),
    ),
    Rewrite(
        Chain("neighbours", INPUTS, Q4 + neighbours("q", "c", "s"), "y"),
        work(replace(rope(64, 6), pairing="neighbours")),
        "x W C S",
        EXPANDS,
    ),
    Rewrite(
        Chain(
            "neighbours_by_repeated_angles",
            HALF_WIDE,
            Q4
            + "".join(
                f"{a}1 = R.broadcast_to(R.expand_dims({a}, axis=[3]), R.shape([6, 1, 8, 2]))\n"
                f"{a}2 = R.reshape({a}1, R.shape([6, 1, 16]))\n"
                for a in "cs"
            )
            + neighbours("q", "c2", "s2"),
            "y",
        ),
        work(replace(rope(64, 6), pairing="neighbours", by_pair=True)),
        "x W C S",
        ("broadcast_to", "broadcast_to", *EXPANDS, *EXPANDS),
    ),
    Rewrite(
        Chain(
            "neighbours_of_a_further_axis",
            HALF_WIDE,
            Q4
            + "g = R.reshape(q, R.shape([2, 6, 4, 8, 2])); p = R.split(g, 2, axis=-1)\n"
            + "l = R.squeeze(p[0], axis=[4]); u = R.squeeze(p[1], axis=[4])\n"
            + BY_PAIR
            + "j = R.stack((y1, y2), axis=-1); y = R.reshape(j, R.shape([2, 6, 4, 16]))",
            "y",
        ),
        work(replace(rope(64, 6), pairing="neighbours", by_pair=True)),
        "x W C S",
        EXPANDS,
    ),
    Rewrite(
        Chain(
            "halves_by_pair",
            HALF_WIDE,
            Q4
            + "p = R.split(q, 2, axis=-1); l = p[0]; u = p[1]\n"
            + BY_PAIR
            + "y = R.concat((y1, y2), axis=-1)",
            "y",
        ),
        work(replace(rope(64, 6), by_pair=True)),
        "x W C S",
        EXPANDS,
    ),
    Rewrite(
        Chain(
            "halves_of_a_further_axis",
            HALF_WIDE,
            Q4
            + "g = R.reshape(q, R.shape([2, 6, 4, 2, 8]))\n"
            + "l = R.take(g, R.const(0), axis=3); u = R.take(g, R.const(1), axis=3)\n"
            + BY_PAIR
            + "y = R.concat((y1, y2), axis=-1)",
            "y",
        ),
        work(replace(rope(64, 6), by_pair=True)),
        "x W C S",
        EXPANDS,
    ),
    Rewrite(
        Chain(
            "rotated_in_two_shapes",
            "x[6,32] W[32,16] C[6,16] S[6,16]",
            Q
            + "q = R.reshape(m, R.shape([6, 1, 16]))\n"
            + WIDE
            + turn("m", "C", "S", "a", axis=1)
            + turn("q", "c", "s", "b", axis=2),
            "(a, b)",
        ),
        work(rope(16), n=16, rows=6),
        "x W C S",
        EXPANDS,
    ),
    Rewrite(
        Chain(
            "heads_in_turns",
            INPUTS.replace("64", "96"),
            TURNS + turn("q", "c", "s", "qr") + turn("k", "c", "s", "kr"),
            "(qr, kr, v)",
        ),
        work(replace(rope(32, 6), period=48), n=96),
        "x W C S",
        (*EXPANDS, "split"),
    ),
    Rewrite(
        Chain(
            "parts_of_heads_in_turns",
            "x[2,6,32] W[32,96] C[6,4] S[6,4]",
            TURNS
            + "".join(
                cut(p, 4)
                + turn(f"{p}f", "c", "s", f"{p}r", half=2)
                + f"{p}y = R.permute_dims(R.concat(({p}r, {p}k), axis=-1), [0, 2, 1, 3])\n"
                for p in "qk"
            ),
            "(qy, ky, v)",
        ),
        work(replace(rope(32, 6), period=48, rotary_dim=4), n=96),
        "x W C S",
        (*EXPANDS, "permute_dims", "permute_dims", "split"),
    ),
    Rewrite(
        Chain(
            "queries_alone_in_turns",
            INPUTS.replace("64", "96"),
            TURNS + turn("q", "c", "s", "qr"),
            "(qr, k, v)",
        ),
        work(Rope(48, 96, "float32", 6, rotary_dim=16), n=96),
        "x W C S",
        (*EXPANDS, "split"),
    ),
    Rewrite(
        Chain(
            "groups_and_repeated_keys",
            INPUTS.replace("64", "128"),
            GROUPS + turn("q", "c", "s", "qr") + turn("k", "c", "s", "kr"),
            "(qr, kr, v)",
        ),
        work(replace(rope(48, 6), period=64), n=128),
        "x W C S",
        ("broadcast_to", *EXPANDS, "strided_slice", "strided_slice", "strided_slice"),
    ),
    Rewrite(
        Chain(
            "an_axis_of_queries_and_keys",
            INPUTS.replace("64", "96"),
            Q
            + "w = R.reshape(m, R.shape([2, 6, 3, 2, 16]))\n"
            + "q = R.squeeze(R.strided_slice(w, axes=[2], begin=[0], end=[1]), axis=[2])\n"
            + "k = R.take(w, R.const(1), axis=2); v = R.take(w, R.const(2), axis=2)\n"
            + WIDE
            + turn("q", "c", "s", "qr")
            + turn("k", "c", "s", "kr"),
            "(qr, kr, v)",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        (*EXPANDS, "squeeze", "strided_slice", "take", "take"),
    ),
]
REWRITES += FORMS


@pytest.mark.parametrize("rewrite", REWRITES, ids=str)
def test_rewrites(rewrite: Rewrite) -> None:
    rewrite.check(MATMUL)


def test_what_moved_the_heads_follows_the_kernel() -> None:
    func, decision = fused(REWRITES[1].chain, MATMUL)
    assert decision.spelling == "matmul NN rope"
    made = [b for block in func.body.blocks for b in block.bindings]
    names = [b.var.name for b in made]
    assert names[-4:] == ["m_flat", "m", "q3", "y"]
    assert calls(func)[-4:] == ["call_tir", "reshape", "reshape", "permute_dims"]


QKV = Rewrite(
    Chain(
        "norm_and_separate_projections",
        "x[2,6,32] g[32] Wq[64,32] Wk[32,32] Wv[32,32] C[6,16] S[6,16]",
        H
        + "".join(
            f"t{p} = R.permute_dims(W{p}); {p}0 = R.matmul(h, t{p})\n"
            f"{p} = R.reshape({p}0, R.shape([2, 6, {n}, 16]))\n"
            for p, n in (("q", 4), ("k", 2), ("v", 2))
        )
        + WIDE
        + turn("q", "c", "s", "qr")
        + turn("k", "c", "s", "kr"),
        "(qr, kr, v)",
    ),
    NormMatmul(
        12,
        32,
        (
            Projection(64, "nk", (), rope(64, 6)),
            Projection(32, "nk", (), rope(32, 6)),
            Projection(32, "nk"),
        ),
        RMS,
        "float32",
        "float32",
    ),
    "x g Wq C S Wk C S Wv",
    ("expand_dims", "expand_dims"),
)
NORMED = [
    QKV,
    Rewrite(
        replace(
            QKV.chain,
            name="reshaped_before_each_projection",
            body=QKV.chain.body.replace(
                "matmul(h, tq)", "matmul(R.reshape(h, R.shape([12, 32])), tq)"
            )
            .replace("matmul(h, tk)", "matmul(R.reshape(h, R.shape([12, 32])), tk)")
            .replace("matmul(h, tv)", "matmul(R.reshape(h, R.shape([12, 32])), tv)"),
        ),
        QKV.work,
        QKV.args,
        QKV.left,
    ),
    Rewrite(
        Chain(
            "norm_and_merged_projection",
            "x[b,t,32] g[32] W[96,32] C[t,16] S[t,16]",
            H
            + "w = R.permute_dims(W); m = R.matmul(h, w)\n"
            + "p = R.split(m, [64], axis=-1); q0 = p[0]; v = p[1]\n"
            + "q = R.reshape(q0, R.shape([b, t, 4, 16]))\n"
            + WIDE
            + turn("q", "c", "s", "qr")
            + "f = R.reshape(qr, R.shape([b, t, 64])); y = R.concat((f, v), axis=-1)",
            "y",
            {"b": 2, "t": 7},
        ),
        NormMatmul(
            DynamicDim("b * t"),
            32,
            (Projection(96, "nk", (), rope(64, DynamicDim("t"))),),
            RMS,
            "float32",
            "float32",
        ),
        "x g W C S",
        ("expand_dims", "expand_dims"),
    ),
]


@pytest.mark.parametrize("rewrite", NORMED, ids=str)
def test_rewrites_behind_a_norm(rewrite: Rewrite) -> None:
    rewrite.check(NORM_MATMUL)


# --- declines --------------------------------------------------------------------------------

MERGED = INPUTS.replace("64", "96")
SPLIT = (
    Q
    + "p = R.split(m, [32, 64], axis=-1); q0 = p[0]; k0 = p[1]; v0 = p[2]\n"
    + "q = R.reshape(q0, R.shape([2, 6, 2, 16])); k = R.reshape(k0, R.shape([2, 6, 2, 16]))\n"
    + "v = R.reshape(v0, R.shape([2, 6, 2, 16]))\n"
    + WIDE
)
DECLINES = [
    (
        Chain("read_before", INPUTS, Q4 + turn("q", "c", "s"), "(y, q)"),
        Reason.LEAKED,
        "q, which is to be rotated, is a result",
    ),
    (
        Chain("matmul_read_before", INPUTS, Q4 + turn("q", "c", "s") + "z = R.exp(m)", "(y, z)"),
        Reason.MULTI_USE,
        "m is read before its rotation by z",
    ),
    (
        Chain("heads_read_before", INPUTS, Q4 + turn("q", "c", "s") + "z = R.exp(q)", "(y, z)"),
        Reason.MULTI_USE,
        "q is read before its rotation by z",
    ),
    (
        Chain("half_read", INPUTS, Q4 + turn("q", "c", "s") + "z = R.exp(yh)", "(y, z)"),
        Reason.MULTI_USE,
        "yh, a part of the rotation, is also read by z",
    ),
    (
        Chain("product_returned", INPUTS, Q4 + turn("q", "c", "s"), "(y, ya)"),
        Reason.LEAKED,
        "ya, a part of the rotation, is a result",
    ),
    (
        Chain(
            "angles_of_each_head",
            "x[2,6,32] W[32,64] C[6,4,16] S[6,4,16]",
            Q4 + turn("q", "C", "S"),
            "y",
        ),
        Reason.LAYOUT,
        "the angles differ between 4 heads",
    ),
    (
        Chain(
            "angles_of_each_sequence",
            "x[2,6,32] W[32,64] C[2,1,1,16] S[2,1,1,16]",
            Q4.replace(WIDE, "") + turn("q", "C", "S"),
            "y",
        ),
        Reason.LAYOUT,
        "the same along a later dimension",
    ),
    (
        Chain(
            "one_angle_for_all_lanes",
            "x[2,6,32] W[32,64] C[6,1] S[6,1]",
            Q4 + turn("q", "c", "s"),
            "y",
        ),
        Reason.SHAPE,
        "angles of 1 features turn heads of 16",
    ),
    (
        Chain(
            "sines_of_one_position",
            "x[2,6,32] W[32,64] C[6,16] S[1,16]",
            Q4 + turn("q", "c", "s"),
            "y",
        ),
        Reason.SHAPE,
        "cosines of 6 positions, sines of 1",
    ),
    (
        Chain(
            "angles_widen_the_result",
            "x[1,6,32] W[32,64] C[2,6,1,16] S[2,6,1,16]",
            Q4.replace(WIDE, "").replace("[2, 6, 4", "[1, 6, 4") + turn("q", "C", "S"),
            "y",
        ),
        Reason.SHAPE,
        "[1, 6, 4, 16] is rotated to [2, 6, 4, 16]",
    ),
    (
        Chain("last_part_only", MERGED, SPLIT + turn("v", "c", "s"), "(y, q, k)"),
        Reason.LAYOUT,
        "features 64 to 96 are rotated; those before them from 0 on are not",
    ),
    (
        Chain(
            "parts_by_different_angles",
            MERGED + " D[6,16]",
            SPLIT
            + "d = R.expand_dims(D, axis=[1])\n"
            + turn("q", "c", "s", "qr")
            + turn("k", "d", "s", "kr"),
            "(qr, kr, v)",
        ),
        Reason.SHAPE,
        "parts of a projection turn by different angles",
    ),
    (
        Chain(
            "after_an_activation",
            INPUTS,
            "m0 = R.matmul(x, W); m = R.nn.silu(m0)\n" + Q4.removeprefix(Q) + turn("q", "c", "s"),
            "y",
        ),
        Reason.ATTRIBUTE,
        "the heads are rotated after silu",
    ),
    (
        Chain(
            "along_the_rows",
            "x[2,8,32] W[32,64] C[1,1,16,8] S[1,1,16,8]",
            Q
            + "q3 = R.reshape(m, R.shape([2, 8, 4, 16])); q = R.permute_dims(q3, [0, 2, 3, 1])\n"
            + turn("q", "C", "S", half=4),
            "y",
        ),
        Reason.AXIS,
        "q is rotated along axis 3, not a head",
    ),
    (
        Chain(
            "part_that_does_not_divide_the_head",
            INPUTS.replace("6,16", "6,12"),
            Q4 + cut("q", 12, 16) + turn("qf", "c", "s", half=6) + "z = R.concat((y, qk), axis=-1)",
            "z",
        ),
        Reason.SHAPE,
        "12 features are rotated, which do not divide heads of 16",
    ),
    (
        Chain(
            "parts_that_overlap",
            "x[2,6,32] W[32,32] C[6,16] S[6,16]",
            Q
            + "a = R.strided_slice(m, axes=[2], begin=[0], end=[16])\n"
            + "b = R.strided_slice(m, axes=[2], begin=[8], end=[24])\n"
            + "a4 = R.reshape(a, R.shape([2, 6, 1, 16]))\n"
            + "b4 = R.reshape(b, R.shape([2, 6, 1, 16]))\n"
            + WIDE
            + neighbours("a4", "c", "s", "ar", (2, 6, 1, 16))
            + neighbours("b4", "c", "s", "br", (2, 6, 1, 16)),
            "(ar, br)",
        ),
        Reason.SHAPE,
        "16 features are rotated, which do not divide heads of 8",
    ),
    (
        Chain(
            "heads_at_no_equal_distances",
            INPUTS.replace("64", "112"),
            Q
            + "p = R.split(m, [16, 48, 64], axis=-1); a = p[0]; v = p[1]; b = p[2]; w = p[3]\n"
            + turn("a", "C", "S", "ar", axis=2)
            + turn("b", "C", "S", "br", axis=2)
            + "w1 = R.strided_slice(w, axes=[2], begin=[0], end=[16])\n",
            "(v, w1, ar, br)",
        ),
        Reason.LAYOUT,
        "heads that are rotated begin at features 0, 48, ..., not at equal distances",
    ),
    (
        Chain(
            "part_read_before",
            INPUTS.replace("6,16", "6,8"),
            Q4 + cut("q", 8, 16) + turn("qf", "c", "s", half=4) + "z = R.concat((y, qk), axis=-1)",
            "(z, q)",
        ),
        Reason.LEAKED,
        "q, which is to be rotated, is a result",
    ),
    (
        Chain(
            "kept_in_float32",
            "x[2,6,32] W[32,64] C[6,16]:float32 S[6,16]:float32",
            Q4 + 'p = R.astype(q, "float32")\n' + turn("p", "c", "s"),
            "y",
            dtype="float16",
        ),
        Reason.DTYPE,
        "y is float32, the matmul float16",
    ),
]


@pytest.mark.parametrize("case", DECLINES, ids=lambda c: c[0].name)
def test_declines(case: tuple[Chain, Reason, str]) -> None:
    chain, reason, words = case
    _, decisions = run_pass(module([chain]), MATMUL)
    (kernel,) = [d for d in decisions if d.fused]
    assert kernel.workload.outputs[0].rope is None
    (declined,) = [d for d in decisions if not d.fused]
    assert declined.decline.reason is reason
    assert words in declined.decline.detail
    assert declined.where.split(", ")[-1] in ("y", "kr", "br")


def test_angles_that_need_the_kernel() -> None:
    body = (
        H
        + "m = R.matmul(h, W); q = R.reshape(m, R.shape([2, 6, 4, 16])); o = R.matmul(h, V)\n"
        + "c = R.expand_dims(o, axis=[2]); s = R.expand_dims(S, axis=[2])\n"
        + turn("q", "c", "s")
    )
    chain = Chain("cycle", "x[2,6,32] g[32] W[32,64] V[32,16] S[2,6,16]", body, "y")
    mod = module([chain])
    _, decisions = run_pass(mod, NORM_MATMUL)
    assert [p.rope for d in decisions if d.fused for p in d.workload.outputs] == [None, None]
    assert [d.decline.reason for d in decisions if not d.fused] == [Reason.CYCLE]
    assert_numbers(compiled(mod), mod, chain)


INTERLEAVED = Q4 + (
    "l = R.strided_slice(q, axes=[3], begin=[0], end=[16], strides=[2])\n"
    "u = R.strided_slice(q, axes=[3], begin=[1], end=[16], strides=[2])\n"
    "n = R.negative(u); r = R.concat((n, l), axis=-1)\n"
    "a = R.multiply(q, c); d = R.multiply(r, s); y = R.add(a, d)"
)
NO_ROTATION = {
    "interleaved": INTERLEAVED,
    "halves_in_order": Q4 + turn("q", "c", "s").replace("(yn, yl)", "(yl, yn)"),
    "negated_first_half": Q4
    + turn("q", "c", "s").replace("negative(yh)", "negative(yl)").replace("yn, yl", "yn, yh"),
    "not_negated": Q4 + turn("q", "c", "s").replace("R.negative(yh)", "R.abs(yh)"),
}


@pytest.mark.parametrize("name", NO_ROTATION)
def test_is_no_rotation(name: str) -> None:
    _, decisions = run_pass(module([Chain(name, INPUTS, NO_ROTATION[name], "y")]), MATMUL)
    assert [d.workload.outputs[0].rope for d in decisions] == [None]


# --- numbers ---------------------------------------------------------------------------------

CHAINS = [r.chain for r in [*REWRITES, *NORMED]] + [c for c, *_ in DECLINES]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 17), (3, 1), (2, 40), (3, 100)])
def test_every_range_of_rows(sizes: tuple[int, int], machine) -> None:
    chain = replace(NORMED[2].chain, sizes=dict(zip("bt", sizes, strict=True)))
    assert_numbers(*machine, chain)
