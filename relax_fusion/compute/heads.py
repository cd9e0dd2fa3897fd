"""Norms of heads behind a contraction, and their rotation."""

from __future__ import annotations

from ctypes import c_float

from tvm import te, tirx

from ..workload import NormMatmul, Projection
from .activations import ACCUMULATE
from .rope import feature_of, give_rotated
from .stages import Stages, as_stored


def normalised_heads(
    stages: Stages, which: tuple[NormMatmul, Projection, int], raw: te.Tensor
) -> None:
    """Add the norm of the heads that a projection made, `raw`, and what rotates them."""
    work, projection, index = which
    norm, rope, (rows, n) = projection.head_norm, projection.rope, raw.shape
    assert norm is not None
    heads, gamma = int(n) // norm.width, stages[f"gamma{index}"]
    count, eps = (tirx.const(c_float(v).value, ACCUMULATE) for v in (norm.width, norm.eps))
    r = te.reduce_axis((0, norm.width), "r")

    def squared(i: tirx.Expr, head: tirx.Expr) -> tirx.Expr:
        value = raw(i, head * norm.width + r)
        return te.sum(value * value, axis=r)

    total = te.compute((rows, heads), squared, f"head_sum{index}")
    scale = te.compute(
        (rows, heads), lambda *at: te.rsqrt(total(*at) / count + eps), f"head_scale{index}"
    )

    def normed(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        factor = gamma(j % norm.width).astype(ACCUMULATE)
        factor = factor + tirx.const(1.0, ACCUMULATE) if norm.unit_offset else factor
        value = raw(i, j) * scale(i, j // norm.width) * factor
        return as_stored(value, work.out_dtype) if norm.rounds else value

    if rope is not None:

        def part(p: tirx.Expr, i: tirx.Expr, pair: tirx.Expr) -> tirx.Expr:
            return normed(i, feature_of(rope, p, pair))

        give_rotated(stages, (rows, projection, index), part, work.out_dtype)
        return
    out = f"out{index}"
    made = te.compute(raw.shape, lambda *at: normed(*at).astype(work.out_dtype), out)
    stages.give(out, made)
