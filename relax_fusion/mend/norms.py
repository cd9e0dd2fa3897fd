"""LayerNorm and GroupNorm as TVM's own legalisation does not compute them.

TVM's ignore ``scale`` and ``center``.  Its LayerNorm refuses bfloat16; its GroupNorm takes the
variance for a difference of two means, which cancel, and its reshapes hide what a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul

from tvm import relax, te, tirx, topi
from tvm.relax.op.op_attrs import GroupNormAttrs, LayerNormAttrs

from .nan import by_tvm


def layer_norm(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor, attrs: LayerNormAttrs) -> te.Tensor:
    """Layer normalisation in float32, rounded once at the end."""
    wide = [topi.cast(t, "float32") for t in (x, gamma, beta)]
    if not attrs.scale:
        wide[1] = topi.full_like(wide[1], 1.0)
    if not attrs.center:
        wide[2] = topi.full_like(wide[2], 0.0)
    made = topi.nn.layer_norm(*wide, axis=attrs.axes, epsilon=attrs.epsilon)
    return topi.cast(made, x.dtype)


def legalize_layer_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalise ``relax.nn.layer_norm``, by TVM's own where that serves."""
    attrs = call.attrs
    if str(call.args[0].ty.dtype) != "bfloat16" and attrs.scale and attrs.center:
        return by_tvm(bb, call)
    return bb.call_te(layer_norm, *call.args, attrs, primfunc_name_hint="layer_norm")


def rms_norm(x: te.Tensor, gamma: te.Tensor, axes: Sequence[int], epsilon: float) -> te.Tensor:
    """RMS normalisation; TVM's ends in an error where every axis is normalised."""
    places = [axis % len(x.shape) for axis in axes]
    if len(places) < len(x.shape):
        return topi.nn.rms_norm(x, gamma, places, epsilon)
    rows = topi.expand_dims(x, 0)
    return topi.squeeze(topi.nn.rms_norm(rows, gamma, [a + 1 for a in places], epsilon), 0)


def legalize_rms_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalise ``relax.nn.rms_norm``."""
    attrs = call.attrs
    made = (*call.args, attrs.axes, attrs.epsilon)
    return bb.call_te(rms_norm, *made, primfunc_name_hint="rms_norm")


def group_norm(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor, attrs: GroupNormAttrs) -> te.Tensor:
    """Normalise the channels of each group in float32, rounded once.

    The variance is the mean of centred squares; TVM's is a difference of two means.
    """
    axis, groups = attrs.channel_axis % len(x.shape), attrs.num_groups
    channels, one = x.shape[axis] // groups, tirx.const(1.0, "float32")
    reduced = sorted({axis, *(a % len(x.shape) for a in attrs.axes)})
    rows = [a for a in range(len(x.shape)) if a not in reduced]
    sizes = [channels if a == axis else x.shape[a] for a in reduced]
    count = reduce(mul, sizes).astype("float32")

    def mean(value: Callable[..., tirx.Expr], name: str) -> Callable[..., tirx.Expr]:
        """Return the mean of a value of an element, by row and group."""
        inner = [te.reduce_axis((0, size), f"k{a}") for a, size in zip(reduced, sizes, strict=True)]

        def total(*row: tirx.Expr) -> tirx.Expr:
            *lead, group = row
            at = dict(zip((*rows, *reduced), (*lead, *inner), strict=True))
            at[axis] = group * channels + at[axis]
            return te.sum(value(row, *(at[a] for a in range(len(at)))), axis=inner)

        made = te.compute([*(x.shape[a] for a in rows), groups], total, name)
        return lambda row: made(*row) / count

    def wide(*at: tirx.Expr) -> tirx.Expr:
        return x(*at).astype("float32")

    middle = mean(lambda _, *at: wide(*at), "group_sum")

    def centred_square(row: Sequence[tirx.Expr], *at: tirx.Expr) -> tirx.Expr:
        return (wide(*at) - middle(row)) * (wide(*at) - middle(row))

    square = mean(centred_square, "square_sum")

    def element(*at: tirx.Expr) -> tirx.Expr:
        row, channel = [*(at[a] for a in rows), at[axis] // channels], at[axis]
        factor = gamma(channel).astype("float32") if attrs.scale else one
        value = (wide(*at) - middle(row)) * te.rsqrt(square(row) + attrs.epsilon * one) * factor
        if attrs.center:
            value = value + beta(channel).astype("float32")
        return value.astype(x.dtype)

    return te.compute(x.shape, element, "group_norm")


def legalize_group_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalise ``relax.nn.group_norm``."""
    return bb.call_te(group_norm, *call.args, call.attrs, primfunc_name_hint="group_norm")
