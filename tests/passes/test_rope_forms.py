"""Rotations of parts of heads, of neighbours and by pair, in the spellings of exporters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..support.chains import Chain, Rewrite, assert_numbers
from ..support.rope_chains import (
    INPUTS,
    MATMUL,
    Q4,
    WIDE,
    Q,
    cut,
    neighbours,
    rope,
    turn,
    work,
)

HALF_WIDE = "x[2,6,32] W[32,64] C[6,8] S[6,8]"
PARTLY = Q4 + cut("q", 8) + turn("qf", "c", "s", half=4)
BY_PAIR = (
    "y1 = R.subtract(R.multiply(l, c), R.multiply(u, s))\n"
    "y2 = R.add(R.multiply(u, c), R.multiply(s, l))\n"
)
REWRITES = [
    Rewrite(
        Chain(
            "part_of_each_head",
            HALF_WIDE,
            PARTLY + "z = R.concat((y, qk), axis=-1)",
            "z",
        ),
        work(replace(rope(64, 6), rotary_dim=8)),
        "x W C S",
    ),
    Rewrite(
        Chain("part_alone", HALF_WIDE, PARTLY, "(y, qk)"),
        work(replace(rope(64, 6), rotary_dim=8)),
        "x W C S",
        ("strided_slice", "strided_slice"),
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
        ("exp", "strided_slice"),
    ),
    Rewrite(
        Chain(
            "rest_cut_again",
            HALF_WIDE,
            PARTLY
            + "z = R.concat((y, qk), axis=-1)\n"
            + "r = R.strided_slice(q, axes=[3], begin=[12], end=[16]); e = R.exp(r)",
            "(z, e)",
        ),
        work(replace(rope(64, 6), rotary_dim=8)),
        "x W C S",
        ("exp", "strided_slice"),
    ),
    Rewrite(
        Chain(
            "cut_that_nobody_reads",
            INPUTS,
            Q4 + "r = R.strided_slice(q, axes=[3], begin=[0], end=[2])\n" + turn("q", "c", "s"),
            "y",
        ),
        work(rope(64, 6)),
        "x W C S",
        ("strided_slice",),
    ),
    Rewrite(
        Chain("neighbours", INPUTS, Q4 + neighbours("q", "c", "s"), "y"),
        work(replace(rope(64, 6), pairing="neighbours")),
        "x W C S",
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
    ),
]


@pytest.mark.parametrize("rewrite", REWRITES, ids=str)
def test_rewrites(rewrite: Rewrite) -> None:
    rewrite.check(MATMUL)


CHAINS = [r.chain for r in REWRITES]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
