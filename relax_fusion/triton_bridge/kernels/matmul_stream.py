"""Matmul of a few rows on Hopper: weights stream through shared memory.

``act(x @ W^T + bias) [+ residual]``, ``act(gate) * up``, or heads rotated by position.

Regime: weight bytes, ``2 n k`` of a 16-bit weight (gated: twice), up to about 128 rows; the matrix
units take a fraction of the time even where most of a tile is padding.

Shape: one program a tile of `block_n` features, ``acc[n, m] = W[n, k] @ x[m, k]^T``: the left
operand of a matrix instruction has 64 rows, which are features here, and the right one as many
columns as there are rows of x, so few of them waste nothing.  Fewer than 64 features leave a part
of the left operand unused, for the sake of more programs.  `split_k` programs may share a tile;
`split_reduce` adds their parts.

A norm is a launch of `row_norm` in front, nearly free because the ring is filled with weights
while it runs (on an H200, 50 MB of weights: 1.1 us of 20 at 4 rows, 2.2 us at 64;
`2026-11-21-hopper_experiments.log`).
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

from .hopper_epilogue import row_layout
from .matmul_pointer import store_parts
from .products import column_tiles, of_product
from .ring import (
    allocate_weight,
    copy_tile,
    copy_weights,
    first_row,
    make_barriers,
    wait_empty,
    wait_full,
)
from .tiles import first_of_pair, load_bias, store_output, store_rotated, swizzled_tile


@gluon.jit
def request_weights(
    products, ring, turn, tile_n, k_start, BYTES: gl.constexpr,
    F0: gl.constexpr, F1: gl.constexpr, F2: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Ask for the weights of a turn, once its slot is free; `BYTES` will come with the rows."""
    _, w_tiles, up_tiles, full, empty = ring
    slot = wait_empty(empty, turn, C.stages)
    barrier = full.index(slot)
    mbarrier.expect(barrier, BYTES)
    args = (w_tiles.index(slot), up_tiles.index(slot), barrier, k_start)
    of_product(copy_weights, tile_n, args, products, F0, F1, F2, C)


@gluon.jit
def request_tiles(
    x, products, ring, m_start, tile_n, k_begin, k_end,
    F0: gl.constexpr, F1: gl.constexpr, F2: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Fill the ring: first the weights of all slots, then the rows, then both as slots get free."""
    x_tiles, _, _, full, _ = ring
    BYTES: gl.constexpr = (C.block_m + C.block_n + C.second) * C.block_k * 2
    if C.pdl and not C.early:
        gdc_wait()
    ahead = gl.minimum(k_begin + C.stages, k_end)
    for k in range(k_begin, ahead):
        k_start = k * C.block_k
        request_weights(products, ring, k - k_begin, tile_n, k_start, BYTES, F0, F1, F2, C)
    if C.pdl and C.early:
        gdc_wait()
    if C.pdl:
        gdc_launch_dependents()
    for k in range(k_begin, ahead):
        slot = (k - k_begin) % C.stages
        copy_tile(x, [m_start, k * C.block_k], full.index(slot), x_tiles.index(slot))
    for k in range(ahead, k_end):
        slot, k_start = (k - k_begin) % C.stages, k * C.block_k
        request_weights(products, ring, k - k_begin, tile_n, k_start, BYTES, F0, F1, F2, C)
        copy_tile(x, [m_start, k_start], full.index(slot), x_tiles.index(slot))


@gluon.jit
def multiply_tiles(ring, count, LAYOUT: gl.constexpr, C: gl.constexpr, L: gl.constexpr):
    """Return both accumulators ``[64, m]`` over `count` turns; the second is for `C.second`."""
    x_tiles, w_tiles, up_tiles, full, empty = ring
    acc = gl.zeros([64, C.block_m], gl.float32, L)
    acc_up = gl.zeros([64, C.block_m], gl.float32, L)
    for turn in range(count):
        slot = wait_full(full, turn, C.stages)
        x = x_tiles.index(slot).permute((1, 0))
        w = w_tiles.index(slot) if LAYOUT == "nk" else w_tiles.index(slot).permute((1, 0))
        acc = warpgroup_mma(w, x, acc, is_async=True)
        if C.second > 0:
            up = up_tiles.index(slot) if LAYOUT == "nk" else up_tiles.index(slot).permute((1, 0))
            acc_up = warpgroup_mma(up, x, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(0, deps=[acc, acc_up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
    return acc, acc_up


@gluon.jit
def store_sums(args, p, tile_n, F: gl.constexpr, C: gl.constexpr):
    """Finish and store the tile ``[m, features]`` of a product, or this program's part of it."""
    acc, acc_up, m_start, M = args
    OUT: gl.constexpr = row_layout(64)
    m_index = m_start + gl.arange(0, C.block_m, gl.SliceLayout(1, OUT))
    column = gl.arange(0, 64, gl.SliceLayout(0, OUT))
    n_index = tile_n * C.block_n + column
    if C.block_n < 64:
        n_index = gl.where(column < C.block_n, n_index, F.n)  # n and more: none
    if F.half > 0:
        first = first_of_pair(n_index, F.half)
        if C.split_k > 1:
            store_parts(p, acc, None, None, m_index, first, M, F, C)
            store_parts(p, acc_up, None, None, m_index, first + F.half, M, F, C)
        else:
            if F.has_bias:
                acc += load_bias(p.bias, first, False, F.n, "no")[None, :]
                acc_up += load_bias(p.bias, first + F.half, False, F.n, "no")[None, :]
            store_rotated(p, acc, acc_up, m_index, n_index, M, F)
    elif C.split_k > 1:
        store_parts(p, acc, acc_up, None, m_index, n_index, M, F, C)
    else:
        store_output(p, acc, acc_up, m_index, n_index, tile_n, M, F)


@gluon.jit
def consume(
    ring, products, m_start, tile_n, count, M,
    F0: gl.constexpr, F1: gl.constexpr, F2: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Multiply what arrives, and store the tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_m, 16])
    OUT: gl.constexpr = row_layout(64)
    acc, acc_up = multiply_tiles(ring, count, F0.layout, C, L)
    if C.pdl:
        gdc_wait()  # Before this group reads or writes what an earlier kernel may still use
    acc = gl.convert_layout(acc.permute((1, 0)), OUT)
    acc_up = gl.convert_layout(acc_up.permute((1, 0)), OUT)
    of_product(store_sums, tile_n, (acc, acc_up, m_start, M), products, F0, F1, F2, C)


@gluon.jit
def matmul_stream(
    x, M, p0, F0: gl.constexpr, C: gl.constexpr,
    p1=None, F1: gl.constexpr = None, p2=None, F2: gl.constexpr = None,
):  # fmt: skip
    """Compute `block_n` features (or pairs of them) of `block_m` rows.

    Grid: ``(ceil(M / block_m) * column tiles, split_k)``.

    Parameters
    ----------
    x : tensor map of [M, k], block [block_m, block_k]
    M : int32
    p0, p1, p2 : Tensors
        With tensor maps of weights ``[n, k]``, block ``[block_n, block_k]``; of ``[k, n]``, block
        ``[block_k, block_n]``.  The layout and whether features are paired is the same for all.
        Of pairs, `up` is the one weight again, and a block has at most `half` features.
    C : Constants
        `block_n` is 16, 32 or 64; `second` is as many where features are paired, or 0.
    """
    K_TILES: gl.constexpr = (C.k + C.block_k - 1) // C.block_k
    TILES_N: gl.constexpr = column_tiles(F0, F1, F2)
    tiles_m = (M + C.block_m - 1) // C.block_m
    tile_m, tile_n = swizzled_tile(gl.program_id(0), tiles_m, TILES_N, C.group_m)
    m_start = first_row(tile_m, M, C.block_m)
    k_begin = gl.program_id(1) * K_TILES // C.split_k
    k_end = (gl.program_id(1) + 1) * K_TILES // C.split_k
    x_tiles = gl.allocate_shared_memory(x.dtype, [C.stages, C.block_m, C.block_k], x.layout)
    w_tiles = allocate_weight(p0.w, C.stages, 64, F0.layout)
    up_tiles = w_tiles
    if C.second > 0:
        up_tiles = allocate_weight(p0.up, C.stages, 64, F0.layout)
    full, empty = make_barriers(C.stages, 1)
    ring = (x_tiles, w_tiles, up_tiles, full, empty)
    products = (p0, p1, p2)
    gl.warp_specialize(
        [
            (consume, (ring, products, m_start, tile_n, k_end - k_begin, M, F0, F1, F2, C)),
            (request_tiles, (x, products, ring, m_start, tile_n, k_begin, k_end, F0, F1, F2, C)),
        ],
        [1],
        [40],
    )
