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

from .attention_core import rows_of, scores_of_rows, shift_of, span_of, unpacked, visible_range
from .attention_fragments import (
    exchange_layout,
    in_order,
    load_key_tile,
    load_query_tile,
    load_tiles,
    load_value_tile,
    store_merged,
    tile_count,
    tile_start,
)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Waits for all warps; it was renamed in Triton 3.7."""


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
    weights = gl.exp2(scores - shift_of(most)[:, :, None])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    most_of = gl.allocate_shared_memory(gl.float32, [G, M], flat)
    sums_of = gl.allocate_shared_memory(gl.float32, [G, M], flat)
    most_of.store(most)
    sums_of.store(gl.sum(weights, 2))
    weights = gl.convert_layout(weights.to(v[0].dtype), gl.DotOperandLayout(0, L, 2))
    results = ()
    for i in gl.static_range(tile_count(WIDTH)):
        results += (shared_result(weights, v[i], L),)  # type: ignore[assignment]
    return (most_of, sums_of), results


@gluon.jit
def attention_groups(
    q, k, v, bias, mask, slopes_ptr, sinks_ptr, out, Q_LEN, KV_LEN, C: gl.constexpr
):
    """Compute `C.block_m` packed rows of one batch entry and kv head.

    Grid: ``(batch, kv_heads, ceil(Q_LEN * group / block_m))``; `C.groups` warps.

    Parameters
    ----------
    q, k, v, out : HeadTensor
        Pointers are aligned to 16 bytes, and so are the strides, of which ``s`` is a constant in q,
        k and v.
    bias, mask, slopes_ptr, sinks_ptr
        As in `attention_pointer`.
    Q_LEN, KV_LEN : int32
        ``KV_LEN <= C.groups * C.block_n``.
    C : Constants
        `head_dim` and `v_dim` are multiples of 8, `block_m` and `block_n` 16 or more;
        `even_rows`, `even_keys`: whether `block_m` divides the rows, and whether there are
        ``groups * block_n`` keys.
    """
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.groups, 1, 1], [1, 16, 8])
    batch, kv_head, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first, last = span_of(tile * C.block_m, C.block_m, Q_LEN, KV_LEN, C.group, C)
    begin, end = visible_range(first, last, KV_LEN, C)

    head = (batch, kv_head)
    k_tiles = load_tiles(load_key_tile, k, head, (begin, end), C.head_dim, L, C)
    q_tiles = load_tiles(load_query_tile, q, head, (tile, Q_LEN), C.head_dim, L, C)
    v_tiles = load_tiles(load_value_tile, v, head, (begin, end), C.v_dim, L, C)
    # Else ptxas moves loads behind products, which wait for memory; it leaves loads in front of a
    # barrier, and products behind a branch
    barrier()
    products = gl.zeros([C.groups, C.block_m, C.block_n], gl.float32, L)
    if end > 0:
        for i in gl.static_range(tile_count(C.head_dim)):
            products = mma_v2(q_tiles[i], k_tiles[i], products)
    R: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    row = tile * C.block_m + gl.arange(0, C.block_m, R)
    query, row_head, is_row = unpacked(row, kv_head, Q_LEN, C.group)
    rows = rows_of(query, row_head, is_row, batch, (bias, mask, slopes_ptr), (Q_LEN, KV_LEN), C)
    g = gl.arange(0, C.groups, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    n = gl.arange(0, C.block_n, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    scores = scores_of_rows(products, rows, g * C.block_n + n, KV_LEN, True, C)
    found, results = shared_results(scores, v_tiles, L, C.v_dim)
    place = (batch, kv_head, tile)
    for i in gl.static_range(tile_count(C.v_dim)):
        store_merged(
            *(found, results[i], out, sinks_ptr, place),
            *(Q_LEN, C.group, tile_start(C.v_dim, i), C),
        )
