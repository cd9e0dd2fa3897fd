"""Norms of heads in front of their rotation: one kernel, where the features lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import ir, relax, te, tirx

from ..matching.constants import binary, scalar
from ..matching.rotation import rotation_at
from ..matching.shapes import same_shape, shape_of
from .rewriter import Rewriter, Rule, canonicalise

ARITHMETIC = "float32"


@tvm.transform.module_pass(opt_level=0, name="FuseNormRotation")
@dataclass(frozen=True)
class FuseNormRotation:
    """Rotate heads in the kernel that normalises them, as queries and keys of some models are.

    rewrite::

        n = R.nn.rms_norm(q, g, axes=[-1])                  # q as [..., d]; g, or R.add(g, 1)
        y = R.add(R.multiply(n, cos), R.multiply(rotate_half(n), sin))
            ->
        y = R.call_tir(rms_norm_rotation, (q, g, cos, sin))

    Neighbours are rotated as halves are.  Norm and rotation are computed in float32, and rounded
    once.  `MoveTransposes` has put transposes of the heads behind.

    declines when:
        the norm is over another axis than the last; the angles are of another shape than the heads,
        where they are not broadcast.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        return canonicalise(mod, ROTATIONS)


def _rotated(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read the sum at the end of a rotation of what a norm made."""
    found = rotation_at(rewriter, rewriter.probe(call))
    if found is None or found.by_pair:
        return None
    norm = rewriter.call(found.source, "relax.nn.rms_norm")
    shape = shape_of(norm) if norm is not None else None
    if norm is None or not shape or not isinstance(shape[-1], tirx.IntImm):
        return None
    if [int(a) % len(shape) for a in norm.attrs.axes] != [len(shape) - 1]:
        return None
    angles = (found.cos, found.sin)
    if not all(_fits(angle, shape) for angle in angles):
        return None
    x, gamma = norm.args
    plus = 0.0
    for row, number in binary(rewriter, gamma, "relax.add"):
        value = scalar(rewriter, number)
        if value is not None and same_shape(shape_of(row), shape_of(gamma)):
            gamma, plus = row, value
            break
    distance = int(shape[-1]) // 2 if found.pairing == "halves" else 1
    eps = float(norm.attrs.epsilon)
    kernel = partial(norm_rotation, eps=eps, plus=plus, distance=distance)
    name = "rms_norm_rotation"
    return rewriter.builder.call_te(kernel, x, gamma, angles, primfunc_name_hint=name)


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
    angles: tuple[te.Tensor, te.Tensor],
    eps: float,
    plus: float,
    distance: int,
) -> te.Tensor:
    """RMSNorm over the last axis, of which pairs are then rotated.

    Parameters
    ----------
    x : te.Tensor
        Heads, of any rank.
    gamma : te.Tensor
        Of one head.
    angles : tuple of te.Tensor
        Cosines and sines, broadcast to `x`.
    eps, plus : float
        What is added to the mean square, and to gamma.
    distance : int
        Distance between the features of a pair.
    """
    *_, width = x.shape
    cos, sin = angles
    k = te.reduce_axis((0, width), name="k")

    def wide(value: tirx.Expr) -> tirx.Expr:
        return value.astype(ARITHMETIC)

    square = te.compute(
        x.shape[:-1], lambda *i: te.sum(wide(x(*i, k)) * wide(x(*i, k)), axis=k), "square_sum"
    )

    def normed(row: Sequence[tirx.Expr], lane: tirx.Expr) -> tirx.Expr:
        mean = square(*row) / tirx.const(int(width), ARITHMETIC)
        weight = wide(gamma(lane)) + tirx.const(plus, ARITHMETIC) if plus else wide(gamma(lane))
        return wide(x(*row, lane)) * te.rsqrt(mean + tirx.const(eps, ARITHMETIC)) * weight

    def angle(of: te.Tensor, at: Sequence[tirx.Expr]) -> tirx.Expr:
        own = zip(of.shape, at[len(at) - len(of.shape) :], strict=True)
        return wide(of(*(0 if isinstance(d, tirx.IntImm) and int(d) == 1 else i for d, i in own)))

    def element(*at: tirx.Expr) -> tirx.Expr:
        *row, lane = at
        halves = 2 * distance == int(width)
        is_first = lane < distance if halves else lane % 2 < 1
        partner = (lane + distance) % int(width) if halves else lane + 1 - lane % 2 * 2
        other = normed(row, partner)
        sign = tirx.Select(is_first, tirx.const(-1, ARITHMETIC), tirx.const(1, ARITHMETIC))
        turned = normed(row, lane) * angle(cos, at) + sign * other * angle(sin, at)
        return turned.astype(x.dtype)

    return te.compute(x.shape, element, "rotated")


ROTATIONS: dict[str, Rule] = {"relax.add": _rotated}
