"""Attention of short sequences on Hopper: two warp groups share the keys of 64 queries.

Regime: latency, as `attention_groups`, with more rows: 8 to 16 heads of 256 or 512 keys take 7.9 to
9.6 us on an H200, where an empty kernel takes 4.5, all tiles in shared memory 6.7 (256 keys) and
7.5 (512) (`2026-11-21-attention_short.log`).  The exponentials of 64 rows and 512 keys alone are
some 1.2 us.

Shape: a program takes 64 rows of a head and all keys, which are copied at once, ``2 BLOCK_N`` under
a barrier.  Each warp group takes half of each of the two copies, one after the other, so that
exponentials of the first are taken under the products of the second.  Both have a softmax of their
own; what they find is merged through shared memory.

Four warp groups took .8 us longer, four steps .4, and one up to .3.  Triton has all warps wait for
each other between operations on barriers of one allocation, so each barrier here has its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_groups import modified_scores
from .attention_scores import LOG2_E
from .ring import copy_tile


@gluon.jit
def request_tiles(q, k, v, batch, head, kv_head, row_start, BLOCK_N: gl.constexpr):
    """Ask for all tiles; return them and the barriers of keys and values.

    Each barrier is an allocation of its own, and each kind of operation is done to all of them
    before the next: see the top of this file.
    """
    ROWS: gl.constexpr = 2 * BLOCK_N
    D: gl.constexpr = q.block_shape[3]
    V_PAD: gl.constexpr = v.block_shape[3]
    q_tile = gl.allocate_shared_memory(q.dtype, [1, 1, 64, D], q.layout)
    k_tiles = (
        gl.allocate_shared_memory(k.dtype, [1, 1, ROWS, D], k.layout),
        gl.allocate_shared_memory(k.dtype, [1, 1, ROWS, D], k.layout),
    )
    v_tiles = (
        gl.allocate_shared_memory(v.dtype, [1, 1, ROWS, V_PAD], v.layout),
        gl.allocate_shared_memory(v.dtype, [1, 1, ROWS, V_PAD], v.layout),
    )
    k_full = (
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    v_full = (
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(2):
        mbarrier.init(k_full[i], count=1)
        mbarrier.init(v_full[i], count=1)
    for i in gl.static_range(2):
        mbarrier.expect(k_full[i], (ROWS + (64 if i == 0 else 0)) * D * 2)
        mbarrier.expect(v_full[i], ROWS * V_PAD * 2)
    copy_tile(q, [batch, head, row_start, 0], k_full[0], q_tile)
    for i in gl.static_range(2):
        copy_tile(k, [batch, kv_head, i * ROWS, 0], k_full[i], k_tiles[i])
    for i in gl.static_range(2):
        copy_tile(v, [batch, kv_head, i * ROWS, 0], v_full[i], v_tiles[i])
    return (q_tile, k_tiles, v_tiles), (k_full, v_full)


@gluon.jit
def half_of(tile, BLOCK_N: gl.constexpr, INDEX: gl.constexpr):
    """Return a warp group's rows of a tile of keys or values in shared memory."""
    return tile.reshape([2 * BLOCK_N, tile.shape[3]]).slice(INDEX * BLOCK_N, BLOCK_N, dim=0)


@gluon.jit
def share_keys(
    tiles, barriers, found, rows, lengths, modifiers,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    BIAS: gl.constexpr, BIAS_KEYS: gl.constexpr, HAS_MASK: gl.constexpr, MASK_KEYS: gl.constexpr,
    ALIBI: gl.constexpr, BLOCK_N: gl.constexpr, EVEN_KEYS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Attend to a warp group's keys, and leave highest scores, sums and results in `found`."""
    q_tile, k_tiles, v_tiles = tiles
    k_full, v_full = barriers
    row_start, head = rows
    Q_LEN, KV_LEN = lengths
    bias, mask, slopes_ptr = modifiers
    V_PAD: gl.constexpr = v_tiles[0].shape[3]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_PAD, 16])
    query = (row_start + gl.arange(0, 64, gl.SliceLayout(1, S)))[:, None]
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))[None, :]
    q = q_tile.reshape([64, q_tile.shape[3]])
    zero = gl.zeros([64, BLOCK_N], gl.float32, S)
    mbarrier.wait(k_full[0], 0)
    k = half_of(k_tiles[0], BLOCK_N, INDEX).permute((1, 0))
    dots = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    dots = warpgroup_mma_wait(0, deps=[dots])
    most = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([64, V_PAD], gl.float32, RESULT)
    for step in gl.static_range(2):
        if step == 0:
            mbarrier.wait(k_full[1], 0)
            k = half_of(k_tiles[1], BLOCK_N, INDEX).permute((1, 0))
            ahead = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        scores = modified_scores(
            dots, query, head, query < Q_LEN, (2 * step + INDEX) * BLOCK_N + columns, Q_LEN, KV_LEN,
            bias, mask, slopes_ptr, SCALE, CAUSAL, WINDOW, SOFTCAP,
            BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, EVEN_KEYS,
        )  # fmt: skip
        highest = gl.maximum(most, gl.max(scores, 1))
        # Of a row that has seen no key: exp2(-inf - 0)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        weights = gl.exp2(scores - base[:, None])
        shrink = gl.exp2(most - base)
        most = highest
        p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, RESULT, 2))
        total = total * shrink + gl.sum(weights, 1)
        if step == 0:
            dots = warpgroup_mma_wait(0, deps=[ahead])
        else:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
        mbarrier.wait(v_full[step], 0)
        acc = warpgroup_mma(p, half_of(v_tiles[step], BLOCK_N, INDEX), acc, is_async=True)
        if step == 1:
            found[0].index(INDEX).store(most)
            found[1].index(INDEX).store(total)
        acc = warpgroup_mma_wait(0, deps=[acc])
    found[2].index(INDEX).store(acc)


@gluon.jit
def store_merged(
    found, out_ptr, sinks_ptr, stride_s, row_start, head, Q_LEN,
    V_DIM: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Add up the results of both warp groups, each by its share, and store them."""
    most_of, sums_of, exchange = found
    V_PAD: gl.constexpr = exchange.shape[2]
    ACROSS: gl.constexpr = V_PAD // 8
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, OUT)
    most, other_most = most_of.index(0).load(R), most_of.index(1).load(R)
    highest = gl.maximum(most, other_most)
    if SINKS:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        highest = gl.maximum(highest, sink)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    share, other_share = gl.exp2(most - base), gl.exp2(other_most - base)
    total = share * sums_of.index(0).load(R) + other_share * sums_of.index(1).load(R)
    if SINKS:
        total += gl.exp2(sink - base)
    acc = exchange.index(0).load(OUT) * share[:, None]
    acc += exchange.index(1).load(OUT) * other_share[:, None]
    # A row that sees nothing is zeros
    acc = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    row = (row_start + gl.arange(0, 64, R))[:, None]
    features = gl.arange(0, V_PAD, gl.SliceLayout(0, OUT))[None, :]
    mask = row < Q_LEN
    if V_DIM < V_PAD:
        mask = mask & (features < V_DIM)
    offsets = row.to(gl.int64) * stride_s + features
    gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def attention_halves(
    q,
    k,
    v,
    bias_ptr,
    mask_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    Q_LEN,
    KV_LEN,
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
    BLOCK_N: gl.constexpr,
    EVEN_KEYS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute 64 rows of one head.  Grid: ``(batch, heads, ceil(Q_LEN / 64))``; 4 warps and 4 more.

    Parameters
    ----------
    q, k, v : tensor maps ``[batch, heads, rows, features]``
        Blocks ``[1, 1, 64, d]``, ``[1, 1, 2 BLOCK_N, d]`` and ``[1, 1, 2 BLOCK_N, dv]``.
    bias_ptr, mask_ptr, slopes_ptr, sinks_ptr, out_ptr, CAUSAL, WINDOW, SOFTCAP, BIAS
        As in `attention_pointer`.
    Q_LEN, KV_LEN : int32
        ``KV_LEN <= 4 BLOCK_N``.
    BLOCK_N : 64 or 128
    EVEN_KEYS : bool
        Whether there are ``4 BLOCK_N`` keys.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    V_PAD: gl.constexpr = v.block_shape[3]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    found = (
        gl.allocate_shared_memory(gl.float32, [2, 64], flat),
        gl.allocate_shared_memory(gl.float32, [2, 64], flat),
        gl.allocate_shared_memory(
            gl.float32, [2, 64, V_PAD], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        ),
    )
    batch, head = gl.program_id(0), gl.program_id(1)
    row_start = gl.program_id(2) * 64
    tiles, barriers = request_tiles(q, k, v, batch, head, head // GROUP, row_start, BLOCK_N)
    batch64 = batch.to(gl.int64)
    modifiers = (
        (bias_ptr + batch64 * bias_stride_b, bias_stride_n, bias_stride_q),
        (mask_ptr + batch64 * mask_stride_b, mask_stride_n, mask_stride_q),
        slopes_ptr,
    )
    rows, lengths = (row_start, head), (Q_LEN, KV_LEN)
    gl.warp_specialize(
        [
            (share_keys, (
                tiles, barriers, found, rows, lengths, modifiers, SCALE, CAUSAL, WINDOW, SOFTCAP,
                BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, BLOCK_N, EVEN_KEYS, 0,
            )),
            (share_keys, (
                tiles, barriers, found, rows, lengths, modifiers, SCALE, CAUSAL, WINDOW, SOFTCAP,
                BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, BLOCK_N, EVEN_KEYS, 1,
            )),
        ],
        [4],
        [240],
    )  # fmt: skip
    out_ptr += batch64 * out_stride_b + head.to(gl.int64) * out_stride_n
    store_merged(found, out_ptr, sinks_ptr, out_stride_s, row_start, head, Q_LEN, V_DIM, SINKS)
