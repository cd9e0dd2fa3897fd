"""Attention as TVM's own legalisation does not compute it: of strongly negative scores, of windows.

TVM's writes 0 over masked scores and subtracts the maximum of the row *including* those zeros.
Where every visible score of a row is below about -17 (float16) or -104 (float32), each exponential
underflows to 0, and the row becomes 0 / 0.  The first token of a prompt, which sees only itself, is
the usual victim; its NaN then reaches every later token.  TVM also keeps scores and sums in
float16.  Here they are float32, and a masked score is minus infinity.  TVM has no windows at all.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx, topi
from tvm.relax.op.op_attrs import AttentionAttrs


def attention(
    q: te.Tensor, k: te.Tensor, v: te.Tensor, bias: te.Tensor | None, attrs: AttentionAttrs
) -> te.Tensor:
    """Attention in float32 on ``[batch, seq, heads, dim]`` tensors, rounded once at the end.

    A row that sees no key is zero, as in the fused kernel.  A scale of None stands for
    ``dim ** -0.5``, which may be dynamic.
    """
    batch, seq_len, heads, dim = q.shape
    context, width = v.shape[1], v.shape[3]
    offset = context - seq_len if attrs.causal_mask == "BottomRight" else tirx.IntImm("int64", 0)
    lane = te.reduce_axis((0, dim), name="lane")
    lowest = tirx.const(float("-inf"), "float32")

    def score(b: Any, h: Any, i: Any, j: Any) -> Any:
        product = q[b, i, h, lane].astype("float32") * k[b, j, h, lane].astype("float32")
        return te.sum(product, axis=lane)

    scores = te.compute((batch, heads, seq_len, context), score, name="scores")
    scores = topi.multiply(scores, _scale(attrs, dim))
    if bias is not None:
        scores = topi.add(scores, topi.cast(bias, "float32"))

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        value = scores[b, h, i, j]
        if attrs.causal_mask is None:
            return value
        seen = j <= i + offset
        if attrs.window_size is not None:
            seen = tirx.all(seen, j > i + offset - attrs.window_size)
        return tirx.if_then_else(seen, value, lowest)

    masked = te.compute(scores.shape, visible, name="masked")
    least, none = tirx.min_value("float32"), tirx.const(0.0, "float32")

    def unless_hidden(value: te.Tensor, otherwise: tirx.PrimExpr) -> te.Tensor:
        """Return `value` where a key is hidden neither by position nor by the bias."""
        return te.compute(
            masked.shape,
            lambda *at: tirx.if_then_else(masked(*at) == lowest, otherwise, value(*at)),
            name="unless_hidden",
        )

    weights = unless_hidden(topi.nn.softmax(unless_hidden(masked, least), axis=-1), none)
    row = te.reduce_axis((0, context), name="row")

    def mix(b: Any, i: Any, h: Any, d: Any) -> Any:
        return te.sum(weights[b, h, i, row] * v[b, row, h, d].astype("float32"), axis=row)

    mixed = te.compute((batch, seq_len, heads, width), mix, name="mixed")
    if q.dtype == "float32":
        return mixed
    return te.compute(mixed.shape, lambda *i: mixed(*i).astype(q.dtype), name="rounded")


def _scale(attrs: AttentionAttrs, dim: tirx.PrimExpr) -> tirx.PrimExpr:
    one = tirx.FloatImm("float32", 1.0)
    if attrs.scale is not None:
        return one * float(attrs.scale)
    if isinstance(dim, tirx.IntImm):
        return one * int(dim) ** -0.5
    return one / tirx.sqrt(dim.astype("float32"))


def legalize_attention(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalise ``relax.nn.attention``, with a bias or without."""
    attrs = call.attrs
    if attrs.window_size is not None and attrs.causal_mask is None:
        return call  # a library may know what is meant
    q, k, v, *bias = call.args
    args = (q, k, v, bias[0] if bias else None, attrs)
    return bb.call_te(attention, *args, primfunc_name_hint="attention")
