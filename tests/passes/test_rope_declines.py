"""Rotations that are not taken along, and why; what looks like a rotation and is none."""

from __future__ import annotations

import pytest

from relax_fusion import Reason

from ..support.chains import Chain, assert_numbers, compiled, module, run_pass
from ..support.rope_chains import (
    INPUTS,
    MATMUL,
    MERGED,
    NORM_MATMUL,
    Q4,
    WIDE,
    H,
    Q,
    cut,
    neighbours,
    turn,
)

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


CHAINS = [chain for chain, *_ in DECLINES]


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
