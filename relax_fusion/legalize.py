"""A legalisation of ``relax.nn.attention`` that survives strongly negative scores.

TVM 0.27's own one writes 0 over masked scores and subtracts the maximum of the row *including*
those zeros. Where every visible score of a row is below about -17 (float16) or -104 (float32),
each exponential underflows to 0, and the row becomes 0 / 0. The first token of a prompt, which
sees only itself, is the usual victim; its NaN then reaches every later token. TVM also keeps
scores and sums in float16. Here they are float32, and a masked score is minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import relax, te, tirx, topi


def attention(
    q: te.Tensor, k: te.Tensor, v: te.Tensor, scale: float, causal_mask: str | None
) -> te.Tensor:
    """Attention in float32 on ``[batch, seq, heads, dim]`` tensors, rounded once at the end."""
    batch, seq_len, heads, dim = q.shape
    context, width = v.shape[1], v.shape[3]
    offset = context - seq_len if causal_mask == "BottomRight" else tirx.IntImm("int64", 0)
    lane = te.reduce_axis((0, dim), name="lane")

    def score(b, h, i, j):
        product = q[b, i, h, lane].astype("float32") * k[b, j, h, lane].astype("float32")
        return te.sum(product, axis=lane)

    scores = te.compute((batch, heads, seq_len, context), score, name="scores")

    def visible(b, h, i, j):
        value = scores[b, h, i, j] * tirx.FloatImm("float32", scale)
        if causal_mask is None:
            return value
        return tirx.if_then_else(j <= i + offset, value, tirx.min_value("float32"))

    masked = te.compute(scores.shape, visible, name="masked")
    weights = topi.nn.softmax(masked, axis=-1)
    row = te.reduce_axis((0, context), name="row")

    def mix(b, i, h, d):
        return te.sum(weights[b, h, i, row] * v[b, row, h, d].astype("float32"), axis=row)

    mixed = te.compute((batch, seq_len, heads, width), mix, name="mixed")
    if q.dtype == "float32":
        return mixed
    return te.compute(mixed.shape, lambda *i: mixed(*i).astype(q.dtype), name="rounded")


def _attention(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    q, k, v = call.args
    attrs = call.attrs
    if attrs.window_size is not None:
        return call  # TVM has no legalisation of a window either; a library must take the call
    scale = float(q.ty.shape[-1]) ** -0.5 if attrs.scale is None else float(attrs.scale)
    return bb.call_te(attention, q, k, v, scale, attrs.causal_mask, primfunc_name_hint="attention")


LEGALIZE_MAP: Mapping[str, Callable] = {"relax.nn.attention": _attention}
"""For ``relax.transform.LegalizeOps(LEGALIZE_MAP)``."""
