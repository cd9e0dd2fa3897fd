"""Matmul of many rows on Hopper: persistent programs, one warp that copies, eight that multiply.

``act(x @ W^T + bias) [+ residual]``, ``act(gate) * up``, or heads rotated by position; x is
normalised by `row_norm` in front.

Regime: operations, ``2 rows n k`` (gated: twice), from about 128 rows on.  An H200 is then limited
by its power: the same matmul takes cuBLAS as long, within 2 %, at 1024 and 4096 rows.

Shape: one program a multiprocessor walks tiles `num_programs` apart, grouped for L2.  The two warp
groups take 64 rows each and share the weight tile.  They are in step only through the ring, so
one stores its results while the other has the matrix units to itself.  Each holds two accumulators:
gate and up, both features of a rotated pair, or `block_n` columns and `second` more, which allows
widths like 96 and 192 that cut n into as many tiles as there are multiprocessors.

A norm inside (x through registers, times gamma, squares summed on the way) was 5 to 30 % slower
than one in front: the matrix units waited for it (`2026-11-21-hopper_experiments.log`).
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

from .hopper_epilogue import store_neighbours, store_pairs, store_tile
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
from .tiles import swizzled_tile


@gluon.jit
def request_tiles(
    x, products, ring, M, F0: gl.constexpr, F1: gl.constexpr, F2: gl.constexpr, C: gl.constexpr
):
    """Fill the ring for every tile of this program."""
    x_tiles, w_tiles, second_tiles, full, empty = ring
    BYTES: gl.constexpr = (C.block_m + C.block_n + C.second) * C.block_k * 2
    TILES_N: gl.constexpr = column_tiles(F0, F1, F2)
    tiles_m = (M + C.block_m - 1) // C.block_m
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * TILES_N, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, TILES_N, C.group_m)
        m_start = first_row(tile_m, M, C.block_m)
        for k_start in range(0, C.k, C.block_k):
            slot = wait_empty(empty, turn, C.stages)
            barrier = full.index(slot)
            mbarrier.expect(barrier, BYTES)
            copy_tile(x, [m_start, k_start], barrier, x_tiles.index(slot))
            args = (w_tiles.index(slot), second_tiles.index(slot), barrier, k_start)
            of_product(copy_weights, tile_n, args, products, F0, F1, F2, C)
            turn += 1


@gluon.jit
def multiply_tiles(
    ring,
    turn,
    LAYOUT: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
    L: gl.constexpr,
    L2: gl.constexpr,
):
    """Return both accumulators ``[64, n]`` of a warp group over all of k, from turn `turn` on."""
    x_tiles, w_tiles, second_tiles, full, empty = ring
    K_TILES: gl.constexpr = (C.k + C.block_k - 1) // C.block_k
    acc = gl.zeros([64, C.block_n], gl.float32, L)
    second = gl.zeros([64, C.second if C.second > 0 else C.block_n], gl.float32, L2)
    for k_tile in range(K_TILES):
        slot = wait_full(full, turn + k_tile, C.stages)
        x = x_tiles.index(slot).slice(GROUP * 64, 64, dim=0)
        w = w_tiles.index(slot).permute((1, 0)) if LAYOUT == "nk" else w_tiles.index(slot)
        acc = warpgroup_mma(x, w, acc, is_async=True)
        # The products of the turn before are then done, and its tiles read
        if C.second > 0:
            tile = second_tiles.index(slot)
            right = tile.permute((1, 0)) if LAYOUT == "nk" else tile
            second = warpgroup_mma(x, right, second, is_async=True)
            acc, second = warpgroup_mma_wait(2, deps=[acc, second])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((turn + k_tile + C.stages - 1) % C.stages), pred=k_tile > 0)
    if C.second > 0:
        acc, second = warpgroup_mma_wait(0, deps=[acc, second])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((turn + K_TILES - 1) % C.stages), count=1)
    return acc, second


@gluon.jit
def store_columns(p, acc, m_start, n_start, M, F: gl.constexpr):
    """Finish and store an accumulator whose columns lie side by side in the result."""
    if F.half == 1:
        store_neighbours(p, acc, m_start, n_start, M, F)
    else:
        store_tile(p, acc, acc, m_start, n_start, M, F)


@gluon.jit
def store_sums(args, p, tile_n, F: gl.constexpr, C: gl.constexpr):
    """Finish and store both accumulators of a column tile."""
    acc, second, m_start, M = args
    if F.half > 1:
        store_pairs(p, acc, second, m_start, tile_n * C.block_n, M, F)
    elif F.gated:
        store_tile(p, acc, second, m_start, tile_n * C.block_n, M, F)
    else:
        n_start = tile_n * (C.block_n + C.second)
        store_columns(p, acc, m_start, n_start, M, F)
        if C.second > 0:
            store_columns(p, second, m_start, n_start + C.block_n, M, F)


@gluon.jit
def consume(
    ring,
    products,
    M,
    F0: gl.constexpr,
    F1: gl.constexpr,
    F2: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
):
    """Multiply and store 64 rows of every tile of this program: those of warp group `GROUP`."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    WIDE: gl.constexpr = C.second if C.second > 0 else C.block_n
    L2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    K_TILES: gl.constexpr = (C.k + C.block_k - 1) // C.block_k
    TILES_N: gl.constexpr = column_tiles(F0, F1, F2)
    tiles_m = (M + C.block_m - 1) // C.block_m
    if C.pdl:
        gdc_wait()
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * TILES_N, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, TILES_N, C.group_m)
        acc, second = multiply_tiles(ring, turn, F0.layout, GROUP, C, L, L2)
        turn += K_TILES
        m_start = first_row(tile_m, M, C.block_m) + GROUP * 64
        of_product(store_sums, tile_n, (acc, second, m_start, M), products, F0, F1, F2, C)


@gluon.jit
def matmul_persistent(
    x, M, p0, F0: gl.constexpr, C: gl.constexpr,
    p1=None, F1: gl.constexpr = None, p2=None, F2: gl.constexpr = None,
):  # fmt: skip
    """Compute every ``num_programs``-th tile of 128 rows.  Grid: ``(min(tiles, SMs),)``.

    Parameters
    ----------
    x : tensor map of [M, k], block [block_m, block_k]
    M : int32
    p0, p1, p2 : Tensors
        With tensor maps of weights ``[n, k]``, blocks ``[block_n, block_k]`` and, of `up`,
        ``[second, block_k]``; of ``[k, n]``, blocks ``[block_k, ...]``.  The layout and whether
        features are paired is the same for all.  Of pairs that are no neighbours, a
        block has at most `half` features.
    C : Constants
        `second` columns of the second accumulator: `block_n` for pairs that are no neighbours,
        else 0 or more.
    """
    x_tiles = gl.allocate_shared_memory(x.dtype, [C.stages, C.block_m, C.block_k], x.layout)
    w_tiles = allocate_weight(p0.w, C.stages, C.block_n, F0.layout)
    second_tiles = w_tiles
    if C.second > 0:
        second_tiles = allocate_weight(p0.up, C.stages, C.second, F0.layout)
    full, empty = make_barriers(C.stages, 2)
    ring = (x_tiles, w_tiles, second_tiles, full, empty)
    products = (p0, p1, p2)
    gl.warp_specialize(
        [
            (consume, (ring, products, M, F0, F1, F2, 0, C)),
            (consume, (ring, products, M, F0, F1, F2, 1, C)),
            (request_tiles, (x, products, ring, M, F0, F1, F2, C)),
        ],
        [4, 1],
        [232, 24],
    )
