"""Scores of attention: what happens between the two matmuls, shared by the kernel families.

Scores are in base 2: ``log2(e)`` is folded into the scale (and into what is added to a score), so
that the softmax takes ``exp2``, which is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled_scores(dots, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the base-2 scores of products ``q . k`` (float32): scaled, then capped.

    ``tanh(x)`` is ``1 - 2 / (exp(2 x) + 1)``: one exponential, one reciprocal, and right at both
    ends, where the exponential is zero or infinite.
    """
    if SOFTCAP > 0.0:
        power = tl.exp2(dots * (2.0 * SCALE / SOFTCAP * LOG2_E))
        return SOFTCAP * LOG2_E - (2.0 * SOFTCAP * LOG2_E) / (power + 1.0)
    else:
        return dots * (SCALE * LOG2_E)


@triton.jit
def biased(scores, bias, BIAS: tl.constexpr, UNIT: tl.constexpr = LOG2_E):
    """Return scores to which a bias (of any float dtype) is added, or that it bounds.

    `UNIT` is what the scores are multiples of, ``log2(e)`` in base 2.
    """
    if BIAS == "none":
        return scores
    bias = bias.to(tl.float32) * UNIT
    if BIAS == "add":
        return scores + bias
    else:
        tl.static_assert(BIAS == "min", "no such bias")
        return tl.minimum(scores, bias, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def with_slopes(scores, slopes, positions, keys):
    """Return scores with ``slope * (key - position)`` added (ALiBi)."""
    return scores + slopes.to(tl.float32) * LOG2_E * (keys - positions).to(tl.float32)


@triton.jit
def position_of(query, Q_LEN, KV_LEN, CAUSAL: tl.constexpr):
    """Return the key at which a query stands."""
    if CAUSAL == "bottom_right":
        return query + (KV_LEN - Q_LEN)
    else:
        return query


@triton.jit
def is_visible(positions, keys, KV_LEN, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return which keys there are and which of them the position sees, masks aside."""
    visible = keys < KV_LEN
    if CAUSAL != "none":
        visible = visible & (keys <= positions)
    if WINDOW > 0:
        visible = visible & (keys > positions - WINDOW)
    return visible


@triton.jit
def visible_range(first, last, KV_LEN, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return ``(begin, end)``: no position from `first` to `last` sees a key outside."""
    begin, end = 0, KV_LEN
    if WINDOW > 0:
        begin = tl.maximum(first - (WINDOW - 1), 0)
    if CAUSAL != "none":
        end = tl.minimum(last + 1, KV_LEN)
    return begin, tl.maximum(end, begin)


@triton.jit
def common_range(first, last, KV_LEN, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return ``(begin, end)``: every position from `first` to `last` sees all keys inside."""
    begin, end = 0, KV_LEN
    if WINDOW > 0:
        begin = tl.maximum(last - (WINDOW - 1), 0)
    if CAUSAL != "none":
        end = tl.maximum(tl.minimum(first + 1, KV_LEN), 0)
    return begin, end
