"""Attention through pointers: any device from sm_80 on, any head width, few queries or many.

Regime: for a few queries, the bytes of keys and values, ``2 kv_len (head_dim + v_dim)`` a batch
entry and kv head, read once; operations for many.

Shape: a program takes `BLOCK_M` packed rows of one batch entry and kv head, where row r is query
``r // GROUP`` of the group's head ``r % GROUP``: all heads that share keys and values read them
once, and a causal mask cuts a tile at few queries.  Where that gives too few programs (decoding),
the programs of axis 2 share the keys, in whole blocks, and `attention_combine` merges what they
found.  Online softmax (Milakov and Gimelshein, 2018), in float32 and base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import to_l2
from .attention_core import (
    address,
    common_range,
    head_of,
    inverse_of,
    load_sinks,
    rows_of,
    scores_of_rows,
    shift_of,
    span_of,
    unpacked,
    visible_range,
    weigh,
)

FEW_SCORES = tl.constexpr(2048)
"""Scores of a block up to which memory is what counts: every block is masked, so that there is one
pipeline to fill, and each lane keeps sums of its own until the end."""


class KeyCount(NamedTuple):
    """Keys of a batch entry b that a tensor tells: ``ptr[b * stride] + more``, 0 to `most`."""

    ptr: Any
    stride: Any
    more: Any
    most: Any


LINE_BYTES = tl.constexpr(128)
"""A line of L2."""


@triton.jit
def keys_of(KV_LEN, batch, C: tl.constexpr):
    """Return how many keys a batch entry has, int32."""
    if C.counted:
        count = tl.load(KV_LEN.ptr + batch * KV_LEN.stride).to(tl.int64) + KV_LEN.more
        return tl.maximum(tl.minimum(count, KV_LEN.most), 0).to(tl.int32)
    else:
        return KV_LEN


@triton.jit
def int64(x):
    """Return an integer, constant or not, that products of strides do not overflow."""
    return tl.full([], x, tl.int64)


@triton.jit
def load_rows(rows, columns, in_rows, WIDTH: tl.constexpr):
    """Return ``[rows, columns]`` of a matrix, zeros beyond `WIDTH` and where not `in_rows`.

    `rows` are pointers; `in_rows` has one dimension too, or is None where all are there.
    """
    ptrs = rows[:, None] + columns[None, :]
    inside = (columns < WIDTH)[None, :]
    if in_rows is not None:
        inside = inside & in_rows[:, None]
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def load_keys(at, start, columns, KV_LEN, MASKED: tl.constexpr, WIDTH, C: tl.constexpr):
    """Return a block of keys or values; it is all within `KV_LEN` unless `MASKED`.

    `at` is the pointer of the first one, their stride, and the pointer of the last one if `C`
    appends it.
    """
    ptr, stride, last = at
    keys = tl.arange(0, C.block_n)
    rows = ptr + int64(start) * stride + keys * stride
    if C.appends:
        rows = tl.where(start + keys == KV_LEN - 1, last, rows)
    return load_rows(rows, columns, (start + keys < KV_LEN) if MASKED else None, WIDTH)


@triton.jit
def key_rows(tensor, new, batch, kv_head, C: tl.constexpr):
    """Return where `load_keys` finds the keys or values of a head."""
    ptr = head_of(tensor, batch, kv_head)
    last = ptr
    if C.appends:
        last = head_of(new, batch, kv_head)
    return ptr, tensor.s, last


@triton.jit
def load_last(at, here, WIDTH: tl.constexpr):
    """Return the last key or value of `load_keys`, where it is appended `here`."""
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))
    return tl.load(at[2] + columns, mask=here & (columns < WIDTH))


@triton.jit
def append(row, at, place, here, WIDTH: tl.constexpr):
    """Write the last key or value at its place among the others."""
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))
    ptrs = at[0] + int64(place) * at[1] + columns
    tl.store(ptrs, row, mask=here & (columns < WIDTH))


@triton.jit
def seen_blocks(tile, Q_LEN, KV_LEN, C: tl.constexpr):
    """Return the positions of a tile's first and last query, and the blocks that they see."""
    first, last = span_of(tile * C.block_m, C.block_m, Q_LEN, KV_LEN, C.group, C)
    begin, end = visible_range(first, last, KV_LEN, C)
    return first, last, begin // C.block_n, tl.cdiv(end, C.block_n)


@triton.jit
def common_blocks(first, last, low, high, KV_LEN, C: tl.constexpr):
    """Return the first of the blocks from `low` to `high` that all rows see whole, and how many."""
    begin, end = common_range(first, last, KV_LEN, C)
    at = tl.minimum(tl.maximum(tl.cdiv(begin, C.block_n), low), high)
    return at, tl.maximum(tl.minimum(end // C.block_n, high) - at, 0)


@triton.jit
def attend(
    q_rows, k, v, rows, state, blocks, KV_LEN,
    MASKED: tl.constexpr, PEEL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Go over blocks of keys, and return the softmax's state ``(acc, total, highest)`` after them.

    `k` and `v` are for `load_keys`.  `blocks` is ``(begin, end, gap_at, gap)``: with the `gap`
    blocks from `gap_at` on left out, they are counted from `begin` to `end`, and with `C.split`
    this program's are every so many of them.  Unless `MASKED`, every row sees all of their keys.
    """
    acc, total, highest = state
    begin, end, gap_at, gap = blocks
    q_columns = tl.arange(0, triton.next_power_of_2(C.head_dim))
    v_columns = tl.arange(0, triton.next_power_of_2(C.v_dim))
    step = 1
    if C.split:
        # In turn: what is read at one time is close together, and nothing is divided
        begin += tl.program_id(2)
        step = tl.num_programs(2)
    if PEEL:
        q_tile = load_rows(q_rows, q_columns, rows.inside, C.head_dim)
    for block in tl.range(begin, end, step, num_stages=C.stages):
        if not PEEL:
            # Always the same few rows.  Read here, they are a part of the pipeline, and keys are
            # under way before they have come; the term that is zero keeps them from being hoisted.
            zero = tl.minimum(block, 0) * 16
            q_tile = load_rows(q_rows + zero, q_columns, rows.inside, C.head_dim)
        start = block * C.block_n
        if MASKED and PEEL:
            start = tl.where(block < gap_at, block, block + gap) * C.block_n
        k_tile = load_keys(k, start, q_columns, KV_LEN, MASKED, C.head_dim, C)
        keys = (start + tl.arange(0, C.block_n))[None, :]
        scores = scores_of_rows(tl.dot(q_tile, k_tile.T), rows, keys, KV_LEN, MASKED, C)
        weights, rescale, highest, total = weigh(scores, highest, total)
        v_tile = load_keys(v, start, v_columns, KV_LEN, MASKED, C.v_dim, C)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None])
    return acc, total, highest


@triton.jit
def attend_all(q_rows, k, v, rows, state, span, KV_LEN, PEEL: tl.constexpr, C: tl.constexpr):
    """Return `attend`'s state after all blocks that a tile sees.

    Of large tiles, first those that all rows see whole.
    """
    first, last, low, high = span
    gap_at, gap = high, 0
    if PEEL:
        gap_at, gap = common_blocks(first, last, low, high, KV_LEN, C)
        blocks = (gap_at, gap_at + gap, high, 0)
        state = attend(q_rows, k, v, rows, state, blocks, KV_LEN, False, PEEL, C)
    blocks = (low, high - gap, gap_at, gap)
    return attend(q_rows, k, v, rows, state, blocks, KV_LEN, True, PEEL, C)


@triton.jit
def fetch_rows(ptr, block, stride, KV_LEN, WIDTH: tl.constexpr, C: tl.constexpr):
    """Have a block of keys or values brought to L2, of a head that has at least one."""
    LINE: tl.constexpr = LINE_BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
    columns = tl.arange(0, triton.next_power_of_2(triton.cdiv(WIDTH, LINE))) * LINE
    keys = block * C.block_n + tl.arange(0, C.block_n)
    keys = tl.minimum(keys, tl.maximum(KV_LEN - 1, 0))
    rows = ptr + keys.to(tl.int64) * stride
    to_l2(rows[:, None] + tl.minimum(columns, WIDTH - 1)[None, :])


@triton.jit
def fetch_keys(k, v, batch, kv_head, tile, lengths, C: tl.constexpr):
    """Have the first block of keys and values that this program reads brought to L2.

    Their number may not be told yet: then others are fetched, and nothing is lost.
    """
    Q_LEN, KV_LEN = lengths
    count = keys_of(KV_LEN, batch, C)
    block = seen_blocks(tile, Q_LEN, count, C)[2] + (tl.program_id(2) if C.split else 0)
    fetch_rows(head_of(k, batch, kv_head), block, k.s, count, C.head_dim, C)
    fetch_rows(head_of(v, batch, kv_head), block, v.s, count, C.v_dim, C)


@triton.jit
def attention_pointer(
    q,
    k,
    v,
    bias,
    mask,
    slopes_ptr,
    sinks_ptr,
    out,
    parts_ptr,
    lse_ptr,
    Q_LEN,
    KV_LEN,
    C: tl.constexpr,
    new_k=None,
    new_v=None,
):
    """Compute one tile of packed rows.

    Grid: ``(batch * heads / group, ceil(Q_LEN * group / block_m), splits)``.

    Parameters
    ----------
    q, k, v, out : HeadTensor
    bias, mask : HeadTensor
        Mask: a byte an element, other than 0 where a query sees a key.
    slopes_ptr, sinks_ptr : [heads]
    parts_ptr : float32 [batch, heads / group, Q_LEN, group, splits, v_dim]
    lse_ptr : float32 [batch, heads / group, Q_LEN, group, splits]
        With `C.split`: the result over a part of the keys, and the base-2 logarithm of the sum of
        its weights, for `attention_combine`, which then also adds the sinks.
    Q_LEN : int32
    KV_LEN : int32 or KeyCount
    new_k, new_v : HeadTensor, optional
        With `C.appends`: the last key and value, which are written into k and v.  Nobody reads them
        there before the next launch.
    C : Constants
        `stages` blocks of keys are under way at once.
    """
    PEEL: tl.constexpr = C.block_m * C.block_n > FEW_SCORES
    SINKS: tl.constexpr = C.sinks and not C.split
    pair, tile = tl.program_id(0), tl.program_id(1)
    if PEEL and C.causal != "none":
        tile = tl.num_programs(1) - 1 - tile  # the longest first
    batch, kv_head = pair // (C.heads // C.group), pair % (C.heads // C.group)
    if C.pdl:
        if C.appends:
            fetch_keys(k, v, batch, kv_head, tile, (Q_LEN, KV_LEN), C)
        gdc_wait()
        gdc_launch_dependents()
    KV_LEN = keys_of(KV_LEN, batch, C)
    packed = Q_LEN * C.group
    row = tile * C.block_m + tl.arange(0, C.block_m)
    query, head, in_rows = unpacked(row, kv_head, Q_LEN, C.group)
    first, last, low, high = seen_blocks(tile, Q_LEN, KV_LEN, C)

    v_columns = tl.arange(0, triton.next_power_of_2(C.v_dim))
    q_rows = address(q, batch, query, head)
    keys = key_rows(k, new_k, batch, kv_head, C)
    values = key_rows(v, new_v, batch, kv_head, C)
    if C.appends:
        # Loaded early and stored late: a store waits for what it stores
        here = (tile == 0) & (tl.program_id(2) == 0) & (KV_LEN > 0)
        new = load_last(keys, here, C.head_dim), load_last(values, here, C.v_dim)
    modifiers, lengths = (bias, mask, slopes_ptr), (Q_LEN, KV_LEN)
    rows = rows_of(query, head, in_rows, batch, modifiers, lengths, C)
    highest = tl.full([C.block_m], float("-inf"), tl.float32)
    if SINKS:
        sinks = load_sinks(sinks_ptr, head)
        highest = tl.maximum(highest, sinks)
    total = tl.zeros([C.block_m] if PEEL else [C.block_m, C.block_n], tl.float32)
    state = (tl.zeros([C.block_m, v_columns.shape[0]], tl.float32), total, highest)
    span = first, last, low, high
    acc, total, highest = attend_all(q_rows, keys, values, rows, state, span, KV_LEN, PEEL, C)
    if C.appends:
        append(new[0], keys, KV_LEN - 1, here, C.head_dim)
        append(new[1], values, KV_LEN - 1, here, C.v_dim)
    if not PEEL:
        total = tl.sum(total, axis=1)
    if SINKS:
        total += tl.exp2(sinks - shift_of(highest))
    result = acc * inverse_of(total)[:, None]
    inside = in_rows[:, None] & (v_columns < C.v_dim)[None, :]
    if C.split:
        part_row = (int64(pair) * packed + row) * tl.num_programs(2) + tl.program_id(2)
        tl.store(lse_ptr + part_row, highest + tl.log2(total), mask=in_rows)
        tl.store(parts_ptr + part_row[:, None] * C.v_dim + v_columns[None, :], result, mask=inside)
    else:
        out_rows = address(out, batch, query, head)[:, None]
        result = result.to(out.ptr.dtype.element_ty)
        tl.store(out_rows + v_columns[None, :], result, mask=inside)
