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

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_scores import (
    LOG2_E,
    biased,
    common_range,
    is_visible,
    position_of,
    scaled_scores,
    visible_range,
    with_slopes,
)

FEW_SCORES = tl.constexpr(2048)
"""Scores of a block up to which memory is what counts: every block is masked, so that there is one
pipeline to fill, and each lane keeps sums of its own until the end."""


@triton.jit
def int64(x):
    """Return an integer, constant or not, that products of strides do not overflow."""
    return tl.full([], x, tl.int64)


@triton.jit
def load_rows(ptr, rows, columns, stride, in_rows, WIDTH: tl.constexpr):
    """Return ``[rows, columns]`` of a matrix, zeros beyond `WIDTH` and where not `in_rows`."""
    ptrs = ptr + rows[:, None] * stride + columns[None, :]
    mask = in_rows[:, None]
    if columns.shape[0] != WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_keys(ptr, start, columns, stride, KV_LEN, MASKED: tl.constexpr, WIDTH, BLOCK_N):
    """Return a block of keys or values; it is all within `KV_LEN` unless `MASKED`."""
    keys = tl.arange(0, BLOCK_N)
    ptr += int64(start) * stride
    if MASKED:
        return load_rows(ptr, keys, columns, stride, start + keys < KV_LEN, WIDTH)
    elif columns.shape[0] == WIDTH:
        return tl.load(ptr + keys[:, None] * stride + columns[None, :])
    else:
        ptrs = ptr + keys[:, None] * stride + columns[None, :]
        return tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def span_of(
    tile, packed, Q_LEN, KV_LEN, CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the first and the last position of a tile of the `packed` rows."""
    final_row = tl.minimum((tile + 1) * BLOCK_M, packed) - 1
    first = position_of(tile * BLOCK_M // GROUP, Q_LEN, KV_LEN, CAUSAL)
    return first, position_of(final_row // GROUP, Q_LEN, KV_LEN, CAUSAL)


@triton.jit
def common_blocks(
    first,
    last,
    low,
    high,
    KV_LEN,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the first of the blocks from `low` to `high` that all rows see whole, and how many."""
    begin, end = common_range(first, last, KV_LEN, CAUSAL, WINDOW)
    at = tl.minimum(tl.maximum(tl.cdiv(begin, BLOCK_N), low), high)
    return at, tl.maximum(tl.minimum(end // BLOCK_N, high) - at, 0)


@triton.jit
def attend(
    q,
    k,
    v,
    rows,
    state,
    blocks,
    KV_LEN,
    BIAS: tl.constexpr,
    BIAS_KEYS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MASK_KEYS: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PEEL: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Go over blocks of keys, and return the softmax's state ``(acc, sums, most)`` after them.

    `blocks` is ``(begin, end, gap_at, gap)``: with the `gap` blocks from `gap_at` on left out, they
    are counted from `begin` to `end`, and with `SPLIT` this program's are every so many of them.
    Unless `MASKED`, every row sees all of their keys.
    """
    q_ptr, q_rows, q_columns = q
    k_ptr, k_stride = k
    v_ptr, v_stride, v_columns = v
    positions, in_rows, bias_rows, mask_rows, slopes = rows
    acc, sums, most = state
    begin, end, gap_at, gap = blocks
    step = 1
    if SPLIT:
        # In turn: what is read at one time is close together, and nothing is divided
        begin += tl.program_id(2)
        step = tl.num_programs(2)
    if PEEL:
        q_tile = load_rows(q_ptr, q_rows, q_columns, 1, in_rows, HEAD_DIM)
    for block in tl.range(begin, end, step, num_stages=NUM_STAGES):
        if not PEEL:
            # Always the same few rows.  Read here, they are a part of the pipeline, and keys are
            # under way before they have come; the term that is zero keeps them from being hoisted.
            q_start = q_ptr + tl.minimum(block, 0) * 16
            q_tile = load_rows(q_start, q_rows, q_columns, 1, in_rows, HEAD_DIM)
        start = block * BLOCK_N
        if MASKED and PEEL:
            start = tl.where(block < gap_at, block, block + gap) * BLOCK_N
        k_tile = load_keys(k_ptr, start, q_columns, k_stride, KV_LEN, MASKED, HEAD_DIM, BLOCK_N)
        keys = start + tl.arange(0, BLOCK_N)
        scores = scaled_scores(tl.dot(q_tile, k_tile.T), SCALE, SOFTCAP)
        inside = in_rows[:, None] & (keys < KV_LEN)[None, :]
        if BIAS != "none":
            if BIAS_KEYS:
                bias = tl.load(bias_rows[:, None] + keys[None, :], mask=inside, other=0.0)
            else:
                bias = tl.load(bias_rows, mask=in_rows, other=0.0)[:, None]
            scores = biased(scores, bias, BIAS)
        if ALIBI:
            scores = with_slopes(scores, slopes[:, None], positions[:, None], keys[None, :])
        if MASKED:
            visible = is_visible(positions[:, None], keys[None, :], KV_LEN, CAUSAL, WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        if HAS_MASK:
            if MASK_KEYS:
                seen = tl.load(mask_rows[:, None] + keys[None, :], mask=inside, other=0)
            else:
                seen = tl.load(mask_rows, mask=in_rows, other=0)[:, None]
            scores = tl.where(seen != 0, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, axis=1))
        # A row that has seen no key yet: its weights are exp2(-inf - 0)
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        if sums.shape[1] == 1:
            sums = sums * shrink[:, None] + tl.sum(weights, axis=1)[:, None]
        else:
            sums = sums * shrink[:, None] + weights
        most = new_most
        v_tile = load_keys(v_ptr, start, v_columns, v_stride, KV_LEN, MASKED, V_DIM, BLOCK_N)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    return acc, sums, most


@triton.jit
def attention_pointer(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    mask_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    Q_LEN,
    KV_LEN,
    q_stride_b,
    q_stride_s,
    q_stride_n,
    k_stride_b,
    k_stride_s,
    k_stride_n,
    v_stride_b,
    v_stride_s,
    v_stride_n,
    out_stride_b,
    out_stride_s,
    out_stride_n,
    bias_stride_b,
    bias_stride_n,
    bias_stride_q,
    mask_stride_b,
    mask_stride_n,
    mask_stride_q,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_KEYS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MASK_KEYS: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `BLOCK_M` packed rows of one batch entry and kv head, or a part of their sums.

    Grid: ``(batch * HEADS / GROUP, ceil(Q_LEN * GROUP / BLOCK_M), splits)``; `splits` is 1 unless
    `SPLIT`.

    Parameters
    ----------
    q_ptr, k_ptr, v_ptr, out_ptr
        Strides of batch, sequence and head (b, s, n) in elements; that of the features is 1.
    bias_ptr, mask_ptr
        Strides 0 where they broadcast; that of the keys is 1, or `BIAS_KEYS` (`MASK_KEYS`) false.
        Mask: a byte an element, other than 0 where a query sees a key.
    slopes_ptr, sinks_ptr : [HEADS]
    parts_ptr : float32 [splits, batch, HEADS / GROUP, Q_LEN, GROUP, V_DIM]
    lse_ptr : float32 [splits, batch, HEADS / GROUP, Q_LEN, GROUP]
        With `SPLIT`: the result over a part of the keys, and the base-2 logarithm of the sum of its
        weights, for `attention_combine`, which then also adds the sinks.
    Q_LEN, KV_LEN : int32
    CAUSAL : {"none", "top_left", "bottom_right"};  WINDOW : int, 0 for none
    SOFTCAP : float, 0.0 for none;  BIAS : {"none", "add", "min"}
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    PEEL: tl.constexpr = BLOCK_M * BLOCK_N > FEW_SCORES
    pair, tile = tl.program_id(0), tl.program_id(1)
    if PEEL and CAUSAL != "none":
        tile = tl.num_programs(1) - 1 - tile  # the longest first
    batch, kv_head = int64(pair // (HEADS // GROUP)), pair % (HEADS // GROUP)
    packed = Q_LEN * GROUP
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < packed
    head = kv_head * GROUP + row % GROUP
    positions = position_of(row // GROUP, Q_LEN, KV_LEN, CAUSAL)
    first, last = span_of(tile, packed, Q_LEN, KV_LEN, CAUSAL, GROUP, BLOCK_M)
    begin, end = visible_range(first, last, KV_LEN, CAUSAL, WINDOW)
    low, high = begin // BLOCK_N, tl.cdiv(end, BLOCK_N)

    query64, head64 = (row // GROUP).to(tl.int64), head.to(tl.int64)
    q_columns = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    v_columns = tl.arange(0, triton.next_power_of_2(V_DIM))
    q = (q_ptr + batch * q_stride_b, query64 * q_stride_s + head64 * q_stride_n, q_columns)
    k = (k_ptr + batch * k_stride_b + int64(kv_head) * k_stride_n, k_stride_s)
    v = (v_ptr + batch * v_stride_b + int64(kv_head) * v_stride_n, v_stride_s, v_columns)
    bias_rows = bias_ptr + batch * bias_stride_b + head64 * bias_stride_n + query64 * bias_stride_q
    mask_rows = mask_ptr + batch * mask_stride_b + head64 * mask_stride_n + query64 * mask_stride_q
    slopes = tl.load(slopes_ptr + head) if ALIBI else positions
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS and not SPLIT:
        sinks = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        most = sinks
    sums = tl.zeros([BLOCK_M, 1 if PEEL else BLOCK_N], tl.float32)
    state = (tl.zeros([BLOCK_M, v_columns.shape[0]], tl.float32), sums, most)
    rows = (positions, in_rows, bias_rows, mask_rows, slopes)
    gap_at, gap = high, 0
    if PEEL:
        gap_at, gap = common_blocks(first, last, low, high, KV_LEN, CAUSAL, WINDOW, BLOCK_N)
        state = attend(
            q, k, v, rows, state, (gap_at, gap_at + gap, high, 0), KV_LEN, BIAS, BIAS_KEYS,
            HAS_MASK, MASK_KEYS, ALIBI, SCALE, SOFTCAP, CAUSAL, WINDOW, HEAD_DIM, V_DIM, BLOCK_N,
            NUM_STAGES, False, PEEL, SPLIT,
        )  # fmt: skip
    acc, sums, most = attend(
        q, k, v, rows, state, (low, high - gap, gap_at, gap), KV_LEN, BIAS, BIAS_KEYS,
        HAS_MASK, MASK_KEYS, ALIBI, SCALE, SOFTCAP, CAUSAL, WINDOW, HEAD_DIM, V_DIM, BLOCK_N,
        NUM_STAGES, True, PEEL, SPLIT,
    )  # fmt: skip
    total = tl.sum(sums, axis=1)
    if SINKS and not SPLIT:
        total += tl.where(sinks == float("-inf"), 0.0, tl.exp2(sinks - most))
    # A row that sees nothing is zeros
    result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    inside = in_rows[:, None] & (v_columns < V_DIM)[None, :]
    if SPLIT:
        part_row = (tl.program_id(2) * int64(tl.num_programs(0)) + pair) * packed + row
        tl.store(lse_ptr + part_row, most + tl.log2(total), mask=in_rows)
        tl.store(parts_ptr + part_row[:, None] * V_DIM + v_columns[None, :], result, mask=inside)
    else:
        out_rows = batch * out_stride_b + query64 * out_stride_s + head64 * out_stride_n
        result = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] + v_columns[None, :], result, mask=inside)
