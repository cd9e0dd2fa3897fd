"""Rotated heads of a projection with others, merged or behind one norm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.workload import DynamicDim, NormMatmul, Projection, Rope

from ..support.chains import Chain, Rewrite, assert_numbers
from ..support.rope_chains import (
    INPUTS,
    MATMUL,
    MERGED,
    NORM_MATMUL,
    RMS,
    TURN_BOTH,
    WIDE,
    H,
    Q,
    cut,
    rope,
    turn,
    work,
)

ONE = "x[2,6,32] W[32,48] C[6,16] S[6,16]"
ONE_HEAD = (
    Q
    + "p = R.split(m, [16], axis=-1); q = p[0]; v = p[1]\n"
    + turn("q", "C", "S", "qr", axis=2)
    + "y = R.concat((qr, v), axis=-1)"
)
ONE_HEAD_AND_Z = ONE_HEAD.replace("(qr, v)", "(qr, z)")
PUT_TOGETHER = (
    Q
    + "p = R.split(m, [64], axis=-1); q0 = p[0]; v = p[1]\n"
    + "q = R.reshape(q0, R.shape([2, 6, 4, 16]))\n"
    + WIDE
    + turn("q", "c", "s", "qr")
    + "f = R.reshape(qr, R.shape([2, 6, 64])); y = R.concat(({}), axis=-1)"
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
REWRITES = [
    Rewrite(
        Chain(
            "merged_and_split",
            MERGED,
            Q
            + "p = R.split(m, [32, 64], axis=-1); q0 = p[0]; k0 = p[1]; v = p[2]\n"
            + "q = R.reshape(q0, R.shape([2, 6, 2, 16]))\n"
            + "k = R.reshape(k0, R.shape([2, 6, 2, 16]))\n"
            + WIDE
            + TURN_BOTH,
            "(qr, kr, v)",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        ("split",),
    ),
    Rewrite(
        Chain(
            "merged_and_sliced_by_heads",
            MERGED,
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
        ("strided_slice", "strided_slice"),
    ),
    Rewrite(
        Chain(
            "put_together_again",
            MERGED,
            PUT_TOGETHER.format("f, v"),
            "y",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
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
            MERGED,
            PUT_TOGETHER.format("v, f"),
            "y",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        ("concat", "split"),
    ),
    Rewrite(
        Chain(
            "heads_in_turns",
            MERGED,
            TURNS + TURN_BOTH,
            "(qr, kr, v)",
        ),
        work(replace(rope(32, 6), period=48), n=96),
        "x W C S",
        ("split",),
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
        ("permute_dims", "permute_dims", "split"),
    ),
    Rewrite(
        Chain(
            "queries_alone_in_turns",
            MERGED,
            TURNS + turn("q", "c", "s", "qr"),
            "(qr, k, v)",
        ),
        work(Rope(48, 96, "float32", 6, rotary_dim=16), n=96),
        "x W C S",
        ("split",),
    ),
    Rewrite(
        Chain(
            "groups_and_repeated_keys",
            INPUTS.replace("64", "128"),
            GROUPS + TURN_BOTH,
            "(qr, kr, v)",
        ),
        work(replace(rope(48, 6), period=64), n=128),
        "x W C S",
        ("broadcast_to", "strided_slice", "strided_slice", "strided_slice"),
    ),
    Rewrite(
        Chain(
            "an_axis_of_queries_and_keys",
            MERGED,
            Q
            + "w = R.reshape(m, R.shape([2, 6, 3, 2, 16]))\n"
            + "q = R.squeeze(R.strided_slice(w, axes=[2], begin=[0], end=[1]), axis=[2])\n"
            + "k = R.take(w, R.const(1), axis=2); v = R.take(w, R.const(2), axis=2)\n"
            + WIDE
            + TURN_BOTH,
            "(qr, kr, v)",
        ),
        work(rope(64, 6), n=96),
        "x W C S",
        ("squeeze", "strided_slice", "take", "take"),
    ),
]


@pytest.mark.parametrize("rewrite", REWRITES, ids=str)
def test_rewrites(rewrite: Rewrite) -> None:
    rewrite.check(MATMUL)


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
        + TURN_BOTH,
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
    ),
]


@pytest.mark.parametrize("rewrite", NORMED, ids=str)
def test_rewrites_behind_a_norm(rewrite: Rewrite) -> None:
    rewrite.check(NORM_MATMUL)


CHAINS = [r.chain for r in [*REWRITES, *NORMED]]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 17), (3, 1), (2, 40), (3, 100)])
def test_every_range_of_rows(sizes: tuple[int, int], machine) -> None:
    chain = replace(NORMED[2].chain, sizes=dict(zip("bt", sizes, strict=True)))
    assert_numbers(*machine, chain)
