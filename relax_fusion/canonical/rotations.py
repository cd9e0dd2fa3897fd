"""Norms of heads in front of their rotation: one kernel, where the features lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tvm import ir, relax, te, tirx

from ..matching.constants import binary, scalar
from ..matching.norm_rotation import NormRotation
from ..matching.pattern import is_call
from ..matching.rotation import rotation_at
from ..matching.shapes import dtype_of, is_one, same_shape, shape_of
from ..transforms.modules import OPAQUE, module_pass
from .rewriter import Rewriter, Rule, canonicalise

ARITHMETIC = "float32"


@module_pass
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
    once; casts to float32 and back around either, and around gamma, are part of the kernel, which
    rounds between the two where the graph widens again.  `MoveTransposes` has put transposes of
    the heads behind.

    declines when:
        the norm is over another axis than the last, or its features are not cut into heads; the
        angles are of another shape than the heads, where they are not broadcast; the dtype is
        float64, or the result has another one than the rows.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, ROTATIONS)


@dataclass(frozen=True)
class _Heads:
    """The rows that are rotated: `x` normalised, times `gamma` and what is added to that, `plus`.

    A reshape may cut them into heads; `rounded` tells that they were rounded and widened again.
    """

    x: relax.Expr
    gamma: relax.Expr
    eps: float
    plus: float
    is_cut: bool
    rounded: bool


def _rotated(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read the sum at the end of a rotation of what a norm made."""
    return _made(rewriter, rewriter.probe(call), dtype_of(call))


def _rounded(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read a rotation in float32, rounded to the dtype of the rows."""
    return _made(rewriter, call.args[0], dtype_of(call))


def _made(rewriter: Rewriter, end: relax.Expr, dtype: str) -> relax.Expr | None:
    """Return the kernel of norm and rotation, if its rows are of the dtype of its result."""
    found = rotation_at(rewriter, end) if isinstance(end, relax.Var) else None
    if found is None or found.by_pair:
        return None
    shape, heads = shape_of(found.source), _heads(rewriter, found.source)
    if heads is None or not shape or not isinstance(shape[-1], tirx.IntImm):
        return None
    rows = shape_of(heads.x)
    if not rows or dtype_of(heads.x) != dtype or dtype == "float64":
        return None
    angles = (found.cos, found.sin)
    if not all(_fits(angle, shape) for angle in angles):
        return None
    if heads.is_cut and not (len(shape) > 2 and same_shape(shape[:-2], rows[:-1])):
        return None
    head = int(shape[-1])
    half = head // 2 if found.pairing == "halves" else 1
    form = NormRotation(head, half, heads.eps, heads.plus, heads.is_cut, heads.rounded)
    kernel, operands = partial(norm_rotation, form=form), (heads.x, heads.gamma, *angles)
    attrs = {"op_pattern": OPAQUE, **form.attrs()}
    name = {"primfunc_name_hint": "rms_norm_rotation"}
    made = rewriter.builder.call_te(kernel, *operands, primfunc_attrs=attrs, **name)
    return relax.op.reshape(rewriter.emit(made), shape) if heads.is_cut else made


def _heads(rewriter: Rewriter, expr: relax.Expr) -> _Heads | None:
    """Read the RMSNorm over the last axis behind casts and a reshape."""
    is_cut, dtypes = False, [dtype_of(expr)]
    while (moved := rewriter.call(expr, "relax.reshape", "relax.astype")) is not None:
        if is_call(moved, "relax.reshape") and is_cut:
            return None
        is_cut |= is_call(moved, "relax.reshape")
        expr = moved.args[0]
        dtypes.append(dtype_of(expr))
    norm, rank = rewriter.call(expr, "relax.nn.rms_norm"), len(shape_of(expr) or ())
    if norm is None or [int(a) % rank for a in norm.attrs.axes] != [rank - 1]:
        return None
    x, gamma = (_narrow(rewriter, arg) for arg in norm.args)
    plus = 0.0
    for row, number in binary(rewriter, gamma, "relax.add"):
        value = scalar(rewriter, number)
        if value is not None and same_shape(shape_of(row), shape_of(gamma)):
            gamma, plus = _narrow(rewriter, row), value
            break
    if not {*dtypes} <= {dtype_of(x), ARITHMETIC}:
        return None
    rounded = dtypes[0] == ARITHMETIC and dtype_of(x) in dtypes and dtype_of(x) != ARITHMETIC
    return _Heads(x, gamma, float(norm.attrs.epsilon), plus, is_cut, rounded)


def _narrow(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr:
    """Return what was widened to float32, as the kernel widens it, too; or `expr`."""
    cast = rewriter.call(expr, "relax.astype")
    if cast is None or dtype_of(expr) != ARITHMETIC:
        return expr
    return cast.args[0] if dtype_of(cast.args[0]) in ("float16", "bfloat16") else expr


def _fits(angle: relax.Expr, shape: Sequence[tirx.Expr]) -> bool:
    """Tell whether angles are broadcast to a tensor of this shape, whose lanes they have."""
    own = shape_of(angle)
    if own is None or len(own) > len(shape) or not same_shape(own[-1:], shape[-1:]):
        return False
    pairs = zip(own, shape[len(shape) - len(own) :], strict=True)
    return all(is_one(a) or same_shape([a], [b]) for a, b in pairs)


def norm_rotation(
    x: te.Tensor, gamma: te.Tensor, cos: te.Tensor, sin: te.Tensor, form: NormRotation
) -> te.Tensor:
    """RMSNorm over the last axis, then a rotation of pairs of features of each head.

    `gamma` has one number for each feature; cosines and sines are broadcast to the heads.
    """
    *_, width = x.shape
    head, distance, plus = form.head, form.distance, form.plus
    k = te.reduce_axis((0, width), name="k")

    def wide(value: tirx.Expr) -> tirx.Expr:
        return value.astype(ARITHMETIC)

    square = te.compute(
        x.shape[:-1], lambda *i: te.sum(wide(x(*i, k)) * wide(x(*i, k)), axis=k), "square_sum"
    )

    def normed(row: Sequence[tirx.Expr], lane: tirx.Expr) -> tirx.Expr:
        mean = square(*row) / tirx.const(int(width), ARITHMETIC)
        weight = wide(gamma(lane)) + tirx.const(plus, ARITHMETIC) if plus else wide(gamma(lane))
        made = wide(x(*row, lane)) * te.rsqrt(mean + tirx.const(form.eps, ARITHMETIC)) * weight
        return wide(made.astype(x.dtype)) if form.rounds else made

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
        place = [*row, which, lane] if form.is_cut else at
        turned = normed(row, feature) * angle(cos, place) + sign * other * angle(sin, place)
        return turned.astype(x.dtype)

    return te.compute(x.shape, element, "rotated")


ROTATIONS: dict[str, Rule] = {"relax.add": _rotated, "relax.astype": _rounded}
