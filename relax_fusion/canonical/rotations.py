"""Norms of heads in front of their rotation: one kernel, where the features lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, relax, te, tirx

from ..matching.rotation import rotation_at
from ..matching.shapes import permutation, same_shape, shape_of
from .rewriter import Rewriter, Rule, canonicalise

ARITHMETIC = "float32"


@tvm.transform.module_pass(opt_level=0, name="FuseNormRotation")
@dataclass(frozen=True)
class FuseNormRotation:
    """Rotate heads in the kernel that normalises them, as queries and keys of some models are.

    rewrite::

        n = R.nn.rms_norm(q, g, axes=[-1])                  # q as [b, s, heads, d]
        t = R.permute_dims(n, [0, 2, 1, 3])                 # or none
        y = R.add(R.multiply(t, cos), R.multiply(rotate_half(t), sin))
            ->
        n = R.call_tir(rms_norm_rotation, (q, g, cos, sin))
        y = R.permute_dims(n, [0, 2, 1, 3])

    The movement comes behind: attention reads its operands where they are.  Both are computed in
    float32, and rounded once.

    declines when:
        the norm is over another axis than the last, or that is moved; the angles are of another
        shape than the heads, where they are not broadcast.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        return canonicalise(mod, ROTATIONS)


def _rotated(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read the sum at the end of a rotation of what a norm made."""
    found = rotation_at(rewriter, rewriter.probe(call))
    if found is None:
        return None
    moved = rewriter.call(found.source, "relax.permute_dims")
    norm = rewriter.call(found.source if moved is None else moved.args[0], "relax.nn.rms_norm")
    shape = shape_of(norm) if norm is not None else None
    if (
        norm is None
        or shape is None
        or [int(a) % len(shape) for a in norm.attrs.axes] != [len(shape) - 1]
    ):
        return None
    axes = list(range(len(shape))) if moved is None else permutation(moved, len(shape))
    angles = (found.cos, found.sin)
    if axes[-1] != len(shape) - 1 or not isinstance(shape[-1], tirx.IntImm):
        return None
    if not all(_fits(angle, [shape[a] for a in axes]) for angle in angles):
        return None
    x, gamma = norm.args
    made = rewriter.builder.call_te(
        norm_rotation,
        *(x, gamma, *angles),
        axes,
        float(norm.attrs.epsilon),
        primfunc_name_hint="rms_norm_rotation",
    )
    out = rewriter.emit(made)
    return relax.op.permute_dims(out, axes) if moved is not None else made


def _fits(angle: relax.Expr, shape: Sequence[tirx.Expr]) -> bool:
    """Tell whether angles are broadcast to a tensor of this shape, whose lanes they have."""
    own = shape_of(angle)
    if own is None or len(own) > len(shape) or not same_shape(own[-1:], shape[-1:]):
        return False
    pairs = zip(own, shape[len(shape) - len(own) :], strict=True)
    return all(same_shape([a], [1]) or same_shape([a], [b]) for a, b in pairs)


def norm_rotation(
    x: te.Tensor,
    gamma: te.Tensor,
    cos: te.Tensor,
    sin: te.Tensor,
    axes: Sequence[int],
    eps: float,
) -> te.Tensor:
    """RMSNorm over the last axis, its two halves rotated by angles of a transposed layout.

    Parameters
    ----------
    x : te.Tensor
        Heads, of any rank.
    gamma : te.Tensor
        Of one head.
    cos, sin : te.Tensor
        Broadcast to `x` with its axes in the order `axes`.
    axes : sequence of int
        Which axis of `x` each axis of that layout is.
    eps : float
        Added to the mean square.
    """
    *_, width = x.shape
    half = int(width) // 2
    k = te.reduce_axis((0, width), name="k")

    def wide(value: tirx.Expr) -> tirx.Expr:
        return value.astype(ARITHMETIC)

    square = te.compute(
        x.shape[:-1], lambda *i: te.sum(wide(x(*i, k)) * wide(x(*i, k)), axis=k), "square_sum"
    )

    def normed(row: Sequence[tirx.Expr], lane: tirx.Expr) -> tirx.Expr:
        scale = te.rsqrt(
            square(*row) / tirx.const(int(width), ARITHMETIC) + tirx.const(eps, ARITHMETIC)
        )
        return wide(x(*row, lane)) * scale * wide(gamma(lane))

    def angle(of: te.Tensor, at: Sequence[tirx.Expr]) -> tirx.Expr:
        places = [at[a] for a in axes][len(axes) - len(of.shape) :]
        own = zip(of.shape, places, strict=True)
        return wide(of(*(0 if isinstance(d, tirx.IntImm) and int(d) == 1 else i for d, i in own)))

    def element(*at: tirx.Expr) -> tirx.Expr:
        *row, lane = at
        other = normed(row, (lane + half) % int(width))
        sign = tirx.Select(lane < half, tirx.const(-1, ARITHMETIC), tirx.const(1, ARITHMETIC))
        turned = normed(row, lane) * angle(cos, at) + sign * other * angle(sin, at)
        return turned.astype(x.dtype)

    return te.compute(x.shape, element, "rotated")


ROTATIONS: dict[str, Rule] = {"relax.add": _rotated}
