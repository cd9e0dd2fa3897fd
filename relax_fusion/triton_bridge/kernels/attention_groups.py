"""Attention of short sequences on Hopper: one pass, all loads at once, two barriers.

Regime: latency.  Up to 512 keys, and few rows: what counts is how many memory latencies and
barriers follow each other, not bytes or operations.  One head of 512 rows and 256 keys takes 7.0 us
on an H200, where an empty kernel takes 4.5; but 16 heads of 512 rows and keys take 1.7 times as
long as with `attention_halves` (`2026-11-21-attention_short.log`).

Shape: a program takes `BLOCK_M` packed rows of a batch entry and kv head (see `attention_pointer`)
and all keys, which `GROUPS` warps share in runs of `BLOCK_N` neighbours.  A warp loads its operands
straight into the registers that the matrix units read (see `attention_fragments`), everything
before it waits for anything.  Only the results go through shared memory, where those of all warps
are merged.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_fragments import (
    exchange_layout,
    in_order,
    load_keys,
    load_queries,
    load_values,
    merged_layout,
    packed_rows,
    row_offsets,
    tile_count,
    tile_start,
)
from .attention_scores import (
    LOG2_E,
    biased,
    is_visible,
    position_of,
    scaled_scores,
    visible_range,
    with_slopes,
)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Waits for all warps; it was renamed in Triton 3.7."""


@gluon.jit
def load_modifier(tensor, query, head, inside, keys, FULL_KEYS: gl.constexpr):
    """Load what a bias or mask ``(pointer, head's stride, query's stride)`` holds for scores."""
    pointer, stride_n, stride_q = tensor
    offsets = row_offsets(query, head, stride_q, stride_n)
    return gl.load(pointer + (offsets + (keys if FULL_KEYS else keys * 0)), mask=inside, other=0)


@gluon.jit
def modified_scores(
    dots, query, head, is_row, keys, Q_LEN, KV_LEN, bias, mask, slopes_ptr,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    BIAS: gl.constexpr, BIAS_KEYS: gl.constexpr, HAS_MASK: gl.constexpr, MASK_KEYS: gl.constexpr,
    ALIBI: gl.constexpr, EVEN_KEYS: gl.constexpr,
):  # fmt: skip
    """Return the base-2 scores of products, minus infinity where hidden.

    `query`, `head`, `is_row` and `keys` broadcast to the shape of the products.
    """
    positions = position_of(query, Q_LEN, KV_LEN, CAUSAL)
    inside = is_row & (keys < KV_LEN)
    scores = scaled_scores(dots, SCALE, SOFTCAP)
    if BIAS != "none":
        scores = biased(scores, load_modifier(bias, query, head, inside, keys, BIAS_KEYS), BIAS)
    if ALIBI:
        scores = with_slopes(scores, gl.load(slopes_ptr + head), positions, keys)
    if not EVEN_KEYS or CAUSAL != "none" or WINDOW > 0:
        visible = is_visible(positions, keys, KV_LEN, CAUSAL, WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    if HAS_MASK:
        visible = load_modifier(mask, query, head, inside, keys, MASK_KEYS) != 0
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def shared_result(weights, v, L: gl.constexpr):
    """Return the product of weights and values of every group, in shared memory."""
    G: gl.constexpr = weights.shape[0]
    M: gl.constexpr = weights.shape[1]
    D: gl.constexpr = v.shape[2]
    exchange = gl.allocate_shared_memory(gl.float32, [G, M, D], exchange_layout(G, M, D))
    exchange.store(in_order(mma_v2(weights, v, gl.zeros([G, M, D], gl.float32, L))))
    return exchange


@gluon.jit
def shared_results(scores, v, L: gl.constexpr, WIDTH: gl.constexpr):
    """Return every group's highest scores, sums of weights, and tiles of results, all shared."""
    G: gl.constexpr = scores.shape[0]
    M: gl.constexpr = scores.shape[1]
    most = gl.max(scores, 2)
    # Of a row that sees none of the keys: exp2(-inf - 0)
    base = gl.where(most == float("-inf"), 0.0, most)
    weights = gl.exp2(scores - base[:, :, None])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    most_of = gl.allocate_shared_memory(gl.float32, [G, M], flat)
    sums_of = gl.allocate_shared_memory(gl.float32, [G, M], flat)
    most_of.store(most)
    sums_of.store(gl.sum(weights, 2))
    weights = gl.convert_layout(weights.to(v[0].dtype), gl.DotOperandLayout(0, L, 2))
    results = ()
    for i in gl.static_range(tile_count(WIDTH)):
        results += (shared_result(weights, v[i], L),)  # type: ignore[assignment]
    return most_of, sums_of, results


@gluon.jit
def store_merged(
    exchange, most_of, sums_of, out_ptr, sinks_ptr, stride_s, stride_n, tile, kv_head, Q_LEN,
    GROUP: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Add up the results ``[group, row, feature]`` of all groups, each by its share, and store."""
    G: gl.constexpr = exchange.shape[0]
    M: gl.constexpr = exchange.shape[1]
    D: gl.constexpr = exchange.shape[2]
    MERGED: gl.constexpr = merged_layout(G, gl.num_warps(), M, D)
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MERGED))
    most = most_of.load(gl.SliceLayout(2, MERGED))
    sums = sums_of.load(gl.SliceLayout(2, MERGED))
    highest = gl.max(most, 0)
    if SINKS:
        _, head, _ = packed_rows(tile, kv_head, Q_LEN, rows, GROUP, M)
        sinks = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        highest = gl.maximum(highest, sinks)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    shares = gl.exp2(most - base[None, :])
    total = gl.sum(shares * sums, 0)
    if SINKS:
        total += gl.exp2(sinks - base)
    # A row that sees nothing is zeros
    shares = shares / gl.where(total == 0.0, 1.0, total)[None, :]
    result = gl.sum(exchange.load(MERGED) * shares[:, :, None], 0)
    rows_out: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, MERGED))
    query, head, is_row = packed_rows(tile, kv_head, Q_LEN, rows_out, GROUP, M)
    d = START + gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, MERGED)))[None, :]
    mask = is_row[:, None]
    if START + D > WIDTH:
        mask = mask & (d < WIDTH)
    offsets = row_offsets(query, head, stride_s, stride_n)[:, None] + d
    gl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def attention_groups(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    mask_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    Q_LEN,
    KV_LEN,
    q_stride_b,
    q_stride_s: gl.constexpr,
    q_stride_n,
    k_stride_b,
    k_stride_s: gl.constexpr,
    k_stride_n,
    v_stride_b,
    v_stride_s: gl.constexpr,
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
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BIAS: gl.constexpr,
    BIAS_KEYS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    MASK_KEYS: gl.constexpr,
    ALIBI: gl.constexpr,
    SINKS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUPS: gl.constexpr,
    EVEN_ROWS: gl.constexpr,
    EVEN_KEYS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute `BLOCK_M` packed rows of one batch entry and kv head.

    Grid: ``(batch, kv_heads, ceil(Q_LEN * GROUP / BLOCK_M))``; `GROUPS` warps.

    Parameters
    ----------
    q_ptr, k_ptr, v_ptr, out_ptr
        Aligned to 16 bytes, and so are the strides of batch, sequence and head (b, s, n), which
        are in elements; that of the features is 1.
    bias_ptr, mask_ptr, slopes_ptr, sinks_ptr, CAUSAL, WINDOW, SOFTCAP, BIAS
        As in `attention_pointer`.
    Q_LEN, KV_LEN : int32
        ``KV_LEN <= GROUPS * BLOCK_N``.
    HEAD_DIM, V_DIM : int
        Multiples of 8.
    BLOCK_M, BLOCK_N : 16 or more
    EVEN_ROWS, EVEN_KEYS : bool
        Whether `BLOCK_M` divides the rows, and whether there are ``GROUPS * BLOCK_N`` keys.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [GROUPS, 1, 1], [1, 16, 8])
    batch = gl.program_id(0).to(gl.int64)
    kv_head, tile = gl.program_id(1), gl.program_id(2)
    first = position_of(tile * BLOCK_M // GROUP, Q_LEN, KV_LEN, CAUSAL)
    last = position_of(((tile + 1) * BLOCK_M - 1) // GROUP, Q_LEN, KV_LEN, CAUSAL)
    begin, end = visible_range(first, last, KV_LEN, CAUSAL, WINDOW)
    q_ptr += batch * q_stride_b
    k_ptr += batch * k_stride_b + kv_head.to(gl.int64) * k_stride_n
    v_ptr += batch * v_stride_b + kv_head.to(gl.int64) * v_stride_n
    out_ptr += batch * out_stride_b
    bias = (bias_ptr + batch * bias_stride_b, bias_stride_n, bias_stride_q)
    mask = (mask_ptr + batch * mask_stride_b, mask_stride_n, mask_stride_q)

    k = load_keys(k_ptr, k_stride_s, begin, end, L, BLOCK_N, HEAD_DIM, EVEN_KEYS)
    q = load_queries(
        q_ptr, q_stride_s, q_stride_n, tile, kv_head, Q_LEN,
        L, GROUP, BLOCK_M, HEAD_DIM, EVEN_ROWS,
    )  # fmt: skip
    v = load_values(v_ptr, v_stride_s, begin, end, L, BLOCK_N, V_DIM, EVEN_KEYS)
    # Else ptxas moves loads behind products, which wait for memory; it leaves loads in front of a
    # barrier, and products behind a branch
    barrier()
    dots = gl.zeros([GROUPS, BLOCK_M, BLOCK_N], gl.float32, L)
    if end > 0:
        for i in gl.static_range(tile_count(HEAD_DIM)):
            dots = mma_v2(q[i], k[i], dots)
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    query, head, is_row = packed_rows(tile, kv_head, Q_LEN, rows, GROUP, BLOCK_M)
    g = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    scores = modified_scores(
        dots, query[None, :, None], head[None, :, None], is_row[None, :, None], g * BLOCK_N + n,
        Q_LEN, KV_LEN, bias, mask, slopes_ptr,
        SCALE, CAUSAL, WINDOW, SOFTCAP, BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, EVEN_KEYS,
    )  # fmt: skip
    most, sums, results = shared_results(scores, v, L, V_DIM)
    for i in gl.static_range(tile_count(V_DIM)):
        store_merged(
            results[i], most, sums, out_ptr, sinks_ptr, out_stride_s, out_stride_n,
            tile, kv_head, Q_LEN, GROUP, tile_start(V_DIM, i), V_DIM, SINKS,
        )  # fmt: skip
