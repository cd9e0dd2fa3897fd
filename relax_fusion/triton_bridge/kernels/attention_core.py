"""The mathematics of attention, which all of its kernels share: scores, softmax, merging.

A kernel fetches tiles of queries, keys and values and multiplies them, each in its own way and
order.  What happens between the two matmuls, and at the end, is here.

Scores are in base 2: ``log2(e)`` is folded into the scale (and into what is added to a score), so
that the softmax takes ``exp2``, which is one instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class HeadTensor(NamedTuple):
    """A tensor ``[batch, sequence, heads, features]``, or a bias or mask with keys for features.

    It is one parameter of a kernel: a pointer, and the strides of batch, sequence and heads in
    elements, 0 where one value is for all.  That of the features is 1.
    """

    ptr: Any
    b: Any
    s: Any
    n: Any


class Constants(NamedTuple):
    """What is known of an attention when its kernel is compiled.

    It is the parameter `C` of every kernel, in which each field is a constexpr.  Those without a
    default concern them all; what the others mean to a kernel, its docstring tells.
    """

    heads: int
    """Query heads; `group` of them share a head of keys and values."""
    group: int
    head_dim: int
    v_dim: int
    scale: float
    causal: str
    """``"none"``, ``"top_left"`` or ``"bottom_right"``."""
    window: int
    """How many keys up to its own position a query sees; 0: all."""
    softcap: float
    """``softcap * tanh(score / softcap)`` replaces a score; 0: it does not."""
    bias: str
    """``"none"``, ``"add"``, or ``"min"``: it bounds the scores."""
    bias_keys: bool
    """Whether there is a bias for each key, not one for all; so with `mask_keys`."""
    has_mask: bool
    mask_keys: bool
    alibi: bool
    sinks: bool
    block_m: int
    block_n: int
    pdl: bool
    """Programmatic dependent launch: see the package's docstring."""
    scored: float
    """What products are multiplied by before anything else is done to them."""
    unit: float = 1.0
    """What makes base-2 scores of the scores that the softmax is given."""
    stages: int = 0
    """Slots of a ring, or blocks of keys under way in a pipeline."""
    split: bool = False
    """Whether programs share the keys."""
    counted: bool = False
    """Whether a tensor tells `attention_pointer` how many keys there are."""
    appends: bool = False
    """Whether it writes the last key and value."""
    parts: int = 0
    """How many `attention_combine` loads at once."""
    q_stages: int = 0
    section: int = 0
    bias_tiles: bool = False
    groups: int = 0
    even_rows: bool = False
    even_keys: bool = False
    """Whether there is a key for each place of a block."""


@triton.jit
def head_of(tensor, batch, head):
    """Return the pointer of a batch entry's head in `HeadTensor`."""
    return tensor.ptr + batch.to(tl.int64) * tensor.b + head.to(tl.int64) * tensor.n


@triton.jit
def address(tensor, batch, query, head):
    """Return pointers to the first feature (or key) of queries and heads in `HeadTensor`."""
    return head_of(tensor, batch, head) + query.to(tl.int64) * tensor.s


@triton.jit
def unpacked(row, kv_head, Q_LEN, GROUP: tl.constexpr):
    """Return ``(query, head, is_row)`` of packed rows of the heads that share keys and values.

    Row r is query ``r // GROUP`` of the group's head ``r % GROUP``; a head that has its keys for
    itself is one for all rows.
    """
    if GROUP == 1:
        return row, kv_head, row < Q_LEN
    else:
        return row // GROUP, kv_head * GROUP + row % GROUP, row < Q_LEN * GROUP


@triton.jit
def by_row(x, keys):
    """Return one value a row, or one for all, in a shape that broadcasts with `keys`."""
    if len(x.shape) == 0:
        return x
    elif len(keys.shape) == 2:
        return x[:, None]
    else:
        return x[None, :, None]


@triton.jit
def position_of(query, Q_LEN, KV_LEN, C: tl.constexpr):
    """Return the key at which a query stands."""
    if C.causal == "bottom_right":
        return query + (KV_LEN - Q_LEN)
    else:
        return query


@triton.jit
def span_of(start, ROWS: tl.constexpr, Q_LEN, KV_LEN, GROUP: tl.constexpr, C: tl.constexpr):
    """Return the first and the last position of a tile of packed rows."""
    final_row = tl.minimum(start + ROWS, Q_LEN * GROUP) - 1
    first = position_of(start // GROUP, Q_LEN, KV_LEN, C)
    return first, position_of(final_row // GROUP, Q_LEN, KV_LEN, C)


@triton.jit
def visible_range(first, last, KV_LEN, C: tl.constexpr):
    """Return ``(begin, end)``: no position from `first` to `last` sees a key outside."""
    begin, end = 0, KV_LEN
    if C.window > 0:
        begin = tl.maximum(first - (C.window - 1), 0)
    if C.causal != "none":
        end = tl.minimum(last + 1, KV_LEN)
    return begin, tl.maximum(end, begin)


@triton.jit
def common_range(first, last, KV_LEN, C: tl.constexpr):
    """Return ``(begin, end)``: every position from `first` to `last` sees all keys inside."""
    begin, end = 0, KV_LEN
    if C.window > 0:
        begin = tl.maximum(last - (C.window - 1), 0)
    if C.causal != "none":
        end = tl.maximum(tl.minimum(first + 1, KV_LEN), 0)
    return begin, end


@triton.jit
def is_visible(positions, keys, KV_LEN, C: tl.constexpr):
    """Return which keys there are and which of them the position sees, masks aside."""
    visible = keys < KV_LEN
    if C.causal != "none":
        visible = visible & (keys <= positions)
    if C.window > 0:
        visible = visible & (keys > positions - C.window)
    return visible


@triton.jit
def capped(products, C: tl.constexpr):
    """Return the base-2 scores of products ``q . k`` (float32) under a soft cap.

    ``tanh(x)`` is ``1 - 2 / (exp(2 x) + 1)``: one exponential, one reciprocal, and right at both
    ends, where the exponential is zero or infinite.
    """
    CAP: tl.constexpr = C.softcap * LOG2_E
    power = tl.exp2(products * (2.0 * C.scale / C.softcap * LOG2_E))
    return CAP - (2.0 * CAP) / (power + 1.0)


@triton.jit
def biased(scores, bias, BIAS: tl.constexpr, UNIT: tl.constexpr):
    """Return scores to which a bias (of any float dtype) is added, or that it bounds.

    `UNIT` is what the scores are multiples of, ``log2(e)`` in base 2.
    """
    bias = bias.to(tl.float32) * UNIT
    if BIAS == "add":
        return scores + bias
    else:
        tl.static_assert(BIAS == "min", "no such bias")
        return tl.minimum(scores, bias, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scores_of(
    products, bias, mask, slopes, positions, keys, KV_LEN, HIDDEN: tl.constexpr, C: tl.constexpr
):
    """Return the scores of products of queries and keys, minus infinity where a key is hidden.

    `bias`, `mask` and `keys` broadcast to the shape of `products`, ``[..., rows, keys]``; `slopes`
    and `positions` have one value a row.  What `C` has none of may be anything.  Unless `HIDDEN`,
    every key is there and visible by its position.
    """
    scores, positions = products, by_row(positions, keys)
    if C.softcap > 0.0:
        scores = capped(scores, C)
    elif C.scored != 1.0:
        scores = scores * C.scored
    if C.bias != "none":
        scores = biased(scores, bias, C.bias, LOG2_E / C.unit)
    if C.alibi:  # slope * (key - position)
        slopes = by_row(slopes.to(tl.float32), keys) * LOG2_E
        scores = scores + slopes * (keys - positions).to(tl.float32)
    if C.has_mask:
        scores = tl.where(mask != 0, scores, float("-inf"))
    if HIDDEN and (not C.even_keys or C.causal != "none" or C.window > 0):
        scores = tl.where(is_visible(positions, keys, KV_LEN, C), scores, float("-inf"))
    return scores


@triton.jit
def load_modifier(rows, keys, in_rows, inside, KEYS: tl.constexpr):
    """Return what a bias or mask holds for rows and keys, zeros where not `inside`.

    `rows` points to what it holds for a row's first key: with `KEYS`, one value for each key; else
    one for all, zeros where not `in_rows`.  Both may be True.
    """
    if KEYS:
        return tl.load(by_row(rows, keys) + keys, mask=inside, other=0)
    else:
        return by_row(tl.load(rows, mask=in_rows, other=0), keys)


class Rows(NamedTuple):
    """What the scores of some queries depend on beside their products: one value a query."""

    positions: Any
    inside: Any
    """Which rows there are."""
    bias: Any
    """Pointers to what a row adds to the score of its first key, as `mask` hides it."""
    mask: Any
    slopes: Any


@triton.jit
def rows_of(query, head, inside, batch, modifiers, lengths, C: tl.constexpr):
    """Return `Rows` of queries and their heads, or head; those that are `inside` are there."""
    bias, mask, slopes_ptr = modifiers
    Q_LEN, KV_LEN = lengths
    slopes = query
    if C.alibi:
        slopes = tl.load(slopes_ptr + head)
    positions = position_of(query, Q_LEN, KV_LEN, C)
    bias, mask = address(bias, batch, query, head), address(mask, batch, query, head)
    return Rows(positions, inside, bias, mask, slopes)


@triton.jit
def scores_of_rows(products, rows, keys, KV_LEN, HIDDEN: tl.constexpr, C: tl.constexpr):
    """Return `scores_of` products of `Rows` with `keys`, whose bias and mask are loaded here."""
    inside = by_row(rows.inside, keys) & (keys < KV_LEN)
    bias, mask = 0.0, 0
    if C.bias != "none":
        bias = load_modifier(rows.bias, keys, rows.inside, inside, C.bias_keys)
    if C.has_mask:
        mask = load_modifier(rows.mask, keys, rows.inside, inside, C.mask_keys)
    positions, slopes = rows.positions, rows.slopes
    return scores_of(products, bias, mask, slopes, positions, keys, KV_LEN, HIDDEN, C)


@triton.jit
def shift_of(highest, UNIT: tl.constexpr = 1.0):
    """Return what is taken off base-2 scores: their highest, or 0 where all are -inf.

    So a row that has seen no key has weights of ``exp2(-inf - 0)``, zero.  With a `UNIT`, a score
    of the least float32 is one of those.
    """
    shift = highest * UNIT
    return tl.where(shift == float("-inf"), 0.0, shift)


@triton.jit
def weigh(scores, highest, total, UNIT: tl.constexpr = 1.0):
    """Take a step of the online softmax (Milakov and Gimelshein, 2018).

    Parameters
    ----------
    scores : [rows, keys]
        Those of a further block of keys.
    highest : [rows]
        The highest scores before; -inf at first.
    total : [rows], or [rows, keys]
        The sums of the weights before, or one sum for each place of a block.

    Returns
    -------
    weights, rescale, highest, total
        The block's weights, what those before are to be multiplied by, and both sums after.
    """
    new = tl.maximum(highest, tl.max(scores, 1))
    shift = shift_of(new, UNIT)
    weights = tl.exp2(scores * UNIT - shift[:, None])
    rescale = tl.exp2(highest * UNIT - shift)
    if len(total.shape) == 1:
        total = total * rescale + tl.sum(weights, 1)
    else:
        total = total * rescale[:, None] + weights
    return weights, rescale, new, total


@triton.jit
def load_sinks(sinks_ptr, head):
    """Return the base-2 scores of heads' sinks."""
    return tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E


@triton.jit
def inverse_of(total):
    """Return what weighted sums are multiplied by at the end; a row that sees nothing is zeros."""
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def merge(highest, total, sinks, SINKS: tl.constexpr):
    """Return the shares of the softmaxes of parts ``[parts, ...]``, and the inverse of their sum.

    The result is the sum of the parts' weighted sums times their shares, times the inverse.  With
    `SINKS`, they are one more term under it.
    """
    top = tl.max(highest, 0)
    if SINKS:
        top = tl.maximum(top, sinks)
    shift = shift_of(top)
    shares = tl.exp2(highest - tl.expand_dims(shift, 0))
    sums = tl.sum(shares * total, 0)
    if SINKS:
        sums += tl.exp2(sinks - shift)
    return shares, inverse_of(sums)
