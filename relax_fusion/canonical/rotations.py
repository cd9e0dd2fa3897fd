"""Norms of heads in front of their rotation: one kernel, where the features lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import ir, relax, te, tirx

from ..matching.constants import binary, scalar
from ..matching.operations import ROTATED
from ..matching.rotation import rotation_at
from ..matching.shapes import dtype_of, is_one, same_shape, shape_of
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

        n = R.reshape(R.nn.rms_norm(q, g, axes=[-1]), [..., heads, d])    # q as [..., heads * d]
        y = R.add(R.multiply(n, cos), R.multiply(rotate_half(n), sin))
            ->
        y = R.reshape(R.call_tir(rms_norm_rotation, (q, g, cos, sin)), [..., heads, d])

    Neighbours are rotated as halves are.  Norm and rotation are computed in float32, and rounded
    once.  `MoveTransposes` has put transposes of the heads behind.

    declines when:
        the norm is over another axis than the last, or its features are not cut into heads; the
        angles are of another shape than the heads, where they are not broadcast; the dtype is
        float64.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        return canonicalise(mod, ROTATIONS)


def _rotated(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read the sum at the end of a rotation of what a norm made."""
    found = rotation_at(rewriter, rewriter.probe(call))
    if found is None or found.by_pair:
        return None
    shape = shape_of(found.source)
    cut = rewriter.call(found.source, "relax.reshape")
    norm = rewriter.call(found.source if cut is None else cut.args[0], "relax.nn.rms_norm")
    rows = shape_of(norm) if norm is not None else None
    if norm is None or not shape or not rows or not isinstance(shape[-1], tirx.IntImm):
        return None
    if dtype_of(norm) == "float64":
        return None
    if [int(a) % len(rows) for a in norm.attrs.axes] != [len(rows) - 1]:
        return None
    angles = (found.cos, found.sin)
    if not all(_fits(angle, shape) for angle in angles):
        return None
    if cut is not None and not (len(shape) > 2 and same_shape(shape[:-2], rows[:-1])):
        return None
    x, gamma = norm.args
    plus = 0.0
    for row, number in binary(rewriter, gamma, "relax.add"):
        value = scalar(rewriter, number)
        if value is not None and same_shape(shape_of(row), shape_of(gamma)):
            gamma, plus = row, value
            break
    half = int(shape[-1]) // 2 if found.pairing == "halves" else 1
    added = float(norm.attrs.epsilon), plus
    layout = int(shape[-1]), half, cut is not None
    kernel = partial(norm_rotation, heads=layout, added=added)
    name = "rms_norm_rotation"
    made = rewriter.builder.call_te(kernel, x, gamma, *angles, primfunc_name_hint=name)
    return made if cut is None else relax.op.reshape(rewriter.emit(made), shape)


def _fits(angle: relax.Expr, shape: Sequence[tirx.Expr]) -> bool:
    """Tell whether angles are broadcast to a tensor of this shape, whose lanes they have."""
    own = shape_of(angle)
    if own is None or len(own) > len(shape) or not same_shape(own[-1:], shape[-1:]):
        return False
    pairs = zip(own, shape[len(shape) - len(own) :], strict=True)
    return all(is_one(a) or same_shape([a], [b]) for a, b in pairs)


def norm_rotation(
    x: te.Tensor,
    gamma: te.Tensor,
    cos: te.Tensor,
    sin: te.Tensor,
    heads: tuple[int, int, bool],
    added: tuple[float, float],
) -> te.Tensor:
    """RMSNorm over the last axis, then a rotation of pairs of features of each head.

    Parameters
    ----------
    x : te.Tensor
        Of any rank.
    gamma : te.Tensor
        Of the last axis.
    cos, sin : te.Tensor
        Broadcast to the heads.
    heads : tuple of (int, int, bool)
        Features of a head, the distance between those of a pair, and whether the last axis holds
        several heads; angles have one for heads then, in front of the last.
    added : tuple of float
        What is added to the mean square, and to gamma.
    distance : int
        Distance between the features of a pair.
    """
    *_, width = x.shape
    (head, distance, cut), (eps, plus) = heads, added
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
        return wide(of(*(0 if is_one(d) else i for d, i in own)))

    def element(*at: tirx.Expr) -> tirx.Expr:
        *row, feature = at
        several = int(width) > head
        which = tirx.floordiv(feature, head) if several else 0
        lane = tirx.floormod(feature, head) if several else feature
        halves = 2 * distance == head
        is_first = lane < distance if halves else lane % 2 < 1
        partner = (lane + distance) % head if halves else lane + 1 - lane % 2 * 2
        other = normed(row, which * head + partner)
        sign = tirx.Select(is_first, tirx.const(-1, ARITHMETIC), tirx.const(1, ARITHMETIC))
        place = [*row, which, lane] if cut else at
        turned = normed(row, feature) * angle(cos, place) + sign * other * angle(sin, place)
        return turned.astype(x.dtype)

    return te.compute(x.shape, element, ROTATED)


ROTATIONS: dict[str, Rule] = {"relax.add": _rotated}
