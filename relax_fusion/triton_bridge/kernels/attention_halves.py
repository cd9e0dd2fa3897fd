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

from .attention_core import rows_of, scores_of_rows, weigh
from .attention_fragments import store_merged
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
    tiles, barriers, found, place, modifiers, lengths, C: gl.constexpr, INDEX: gl.constexpr
):
    """Attend to a warp group's keys, and leave highest scores, sums and results in `found`."""
    q_tile, k_tiles, v_tiles = tiles
    k_full, v_full = barriers
    batch, head, tile = place
    Q_LEN, KV_LEN = lengths
    V_PAD: gl.constexpr = v_tiles[0].shape[3]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_PAD, 16])
    query = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    rows = rows_of(query, head, query < Q_LEN, batch, modifiers, lengths, C)
    columns = gl.arange(0, C.block_n, gl.SliceLayout(0, S))[None, :]
    q = q_tile.reshape([64, q_tile.shape[3]])
    zero = gl.zeros([64, C.block_n], gl.float32, S)
    mbarrier.wait(k_full[0], 0)
    k = half_of(k_tiles[0], C.block_n, INDEX).permute((1, 0))
    products = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    highest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([64, V_PAD], gl.float32, RESULT)
    for step in gl.static_range(2):
        if step == 0:
            mbarrier.wait(k_full[1], 0)
            k = half_of(k_tiles[1], C.block_n, INDEX).permute((1, 0))
            ahead = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        keys = (2 * step + INDEX) * C.block_n + columns
        scores = scores_of_rows(products, rows, keys, KV_LEN, True, C)
        weights, rescale, highest, total = weigh(scores, highest, total)
        p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, RESULT, 2))
        if step == 0:
            products = warpgroup_mma_wait(0, deps=[ahead])
        else:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, RESULT))[:, None]
        mbarrier.wait(v_full[step], 0)
        acc = warpgroup_mma(p, half_of(v_tiles[step], C.block_n, INDEX), acc, is_async=True)
        if step == 1:
            found[0].slice(INDEX, 1, dim=0).store(highest.reshape([1, 64]))
            found[1].slice(INDEX, 1, dim=0).store(total.reshape([1, 64]))
        acc = warpgroup_mma_wait(0, deps=[acc])
    found[2].slice(INDEX, 1, dim=0).store(acc.reshape([1, 64, V_PAD]))


@gluon.jit
def attention_halves(
    q, k, v, bias, mask, slopes_ptr, sinks_ptr, out, Q_LEN, KV_LEN, C: gl.constexpr
):
    """Compute 64 rows of one head.  Grid: ``(batch, heads, ceil(Q_LEN / 64))``; 4 warps and 4 more.

    Parameters
    ----------
    q, k, v : tensor maps ``[batch, heads, rows, features]``
        Blocks ``[1, 1, 64, d]``, ``[1, 1, 2 block_n, d]`` and ``[1, 1, 2 block_n, dv]``.
    bias, mask, slopes_ptr, sinks_ptr, out
        As in `attention_pointer`.
    Q_LEN, KV_LEN : int32
        ``KV_LEN <= 4 * C.block_n``.
    C : Constants
        `block_n` is 64 or 128; `even_keys`: whether there are ``4 * block_n`` keys.
    """
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    V_PAD: gl.constexpr = v.block_shape[3]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])
    found = (
        gl.allocate_shared_memory(gl.float32, [2, 64], flat),
        gl.allocate_shared_memory(gl.float32, [2, 64], flat),
        gl.allocate_shared_memory(gl.float32, [2, 64, V_PAD], swizzled),
    )
    batch, head, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    tiles, barriers = request_tiles(q, k, v, batch, head, head // C.group, tile * 64, C.block_n)
    place, modifiers, lengths = (batch, head, tile), (bias, mask, slopes_ptr), (Q_LEN, KV_LEN)
    gl.warp_specialize(
        [
            (share_keys, (tiles, barriers, found, place, modifiers, lengths, C, 0)),
            (share_keys, (tiles, barriers, found, place, modifiers, lengths, C, 1)),
        ],
        [4],
        [240],
    )
    store_merged(found[:2], found[2], out, sinks_ptr, place, Q_LEN, 1, 0, C)
