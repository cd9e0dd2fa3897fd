"""Matmul of many rows on Hopper: persistent programs, one warp that copies, eight that multiply.

``act(x @ W^T + bias) [+ residual]``, ``act(gate) * up``, or heads rotated by position; x is
normalised by `row_norm` in front.

Regime: operations, ``2 rows n k`` (gated: twice), from about 128 rows on.  An H200 is then limited
by its power: the same matmul takes cuBLAS as long, within 2 %, at 1024 and 4096 rows.

Shape: one program a multiprocessor walks tiles `num_programs` apart, grouped for L2.  The two warp
groups take 64 rows each and share the weight tile.  They are in step only through the ring, so
one stores its results while the other has the matrix units to itself.  Each holds two accumulators:
gate and up, both features of a rotated pair, or `BLOCK_N` columns and `SECOND` more, which allows
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

from .hopper_epilogue import store_pairs, store_tile
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
    x,
    w,
    up,
    ring,
    tiles_m,
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    MERGED: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SECOND: gl.constexpr,
    BLOCK_K: gl.constexpr,
    TILES_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Fill the ring for every tile of this program."""
    x_tiles, w_tiles, second_tiles, full, empty = ring
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N + SECOND) * BLOCK_K * 2
    STEP: gl.constexpr = BLOCK_N if GATED or HALF > 0 else BLOCK_N + SECOND
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * TILES_N, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, TILES_N, GROUP_M)
        m_start = first_row(tile_m, M, BLOCK_M)
        for k_start in range(0, K, BLOCK_K):
            slot = wait_empty(empty, turn, STAGES)
            barrier = full.index(slot)
            mbarrier.expect(barrier, BYTES)
            copy_tile(x, [m_start, k_start], barrier, x_tiles.index(slot))
            tiles = (w_tiles.index(slot), second_tiles.index(slot))
            copy_weights(
                w, up, tiles, barrier, tile_n * STEP, k_start,
                N, LAYOUT, GATED, MERGED, HALF, BLOCK_N, SECOND,
            )  # fmt: skip
            turn += 1


@gluon.jit
def multiply_tiles(
    ring,
    turn,
    K_TILES: gl.constexpr,
    LAYOUT: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SECOND: gl.constexpr,
    STAGES: gl.constexpr,
    L: gl.constexpr,
    L2: gl.constexpr,
):
    """Return both accumulators ``[64, n]`` of a warp group over `K_TILES` turns from `turn` on."""
    x_tiles, w_tiles, second_tiles, full, empty = ring
    acc = gl.zeros([64, BLOCK_N], gl.float32, L)
    second = gl.zeros([64, SECOND if SECOND > 0 else BLOCK_N], gl.float32, L2)
    for k_tile in range(K_TILES):
        slot = wait_full(full, turn + k_tile, STAGES)
        x = x_tiles.index(slot).slice(GROUP * 64, 64, dim=0)
        w = w_tiles.index(slot).permute((1, 0)) if LAYOUT == "nk" else w_tiles.index(slot)
        acc = warpgroup_mma(x, w, acc, is_async=True)
        # The products of the turn before are then done, and its tiles read
        if SECOND > 0:
            tile = second_tiles.index(slot)
            right = tile.permute((1, 0)) if LAYOUT == "nk" else tile
            second = warpgroup_mma(x, right, second, is_async=True)
            acc, second = warpgroup_mma_wait(2, deps=[acc, second])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((turn + k_tile + STAGES - 1) % STAGES), pred=k_tile > 0)
    if SECOND > 0:
        acc, second = warpgroup_mma_wait(0, deps=[acc, second])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((turn + K_TILES - 1) % STAGES), count=1)
    return acc, second


@gluon.jit
def consume(
    ring,
    pointers,
    rotation,
    tiles_m,
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    MERGED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STEPS: gl.constexpr,
    HALF: gl.constexpr,
    ROTATED: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SECOND: gl.constexpr,
    BLOCK_K: gl.constexpr,
    TILES_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply and store 64 rows of every tile of this program: those of warp group `GROUP`."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    WIDE: gl.constexpr = SECOND if SECOND > 0 else BLOCK_N
    L2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    STEP: gl.constexpr = BLOCK_N if GATED or HALF > 0 else BLOCK_N + SECOND
    K_TILES: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if PDL:
        gdc_wait()
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * TILES_N, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, TILES_N, GROUP_M)
        acc, second = multiply_tiles(
            ring, turn, K_TILES, LAYOUT, GROUP, BLOCK_N, SECOND, STAGES, L, L2
        )
        turn += K_TILES
        m_start, n_start = first_row(tile_m, M, 128) + GROUP * 64, tile_n * STEP
        if HALF > 0:
            store_pairs(
                pointers, rotation, acc, second, m_start, n_start, M, N, HAS_BIAS, HALF, ROTATED
            )
        else:
            store_tile(
                pointers, acc, second, m_start, n_start, M,
                N, GATED, MERGED, HAS_BIAS, ACTIVATION, STEPS,
            )  # fmt: skip
            if SECOND > 0 and not GATED:
                store_tile(
                    pointers, second, second, m_start, n_start + BLOCK_N, M,
                    N, GATED, MERGED, HAS_BIAS, ACTIVATION, STEPS,
                )  # fmt: skip


@gluon.jit
def matmul_persistent(
    x,
    w,
    up,
    bias_ptr,
    up_bias_ptr,
    operands,
    out_ptr,
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SECOND: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    MERGED: gl.constexpr = "no",
    cos_ptr=None,
    sin_ptr=None,
    positions=None,
    HALF: gl.constexpr = 0,
    ROTATED: gl.constexpr = 0,
):
    """Compute every ``num_programs``-th tile of 128 rows.  Grid: ``(min(tiles, SMs),)``.

    Parameters
    ----------
    x : tensor map of [M, K], block [128, BLOCK_K]
    w, up : tensor maps of [N, K], blocks [BLOCK_N, BLOCK_K] and [SECOND, BLOCK_K]
        Layout ``"kn"``: of [K, N], blocks [BLOCK_K, ...].  `up` is the up projection's weight, or
        the same one again where merged and where not `GATED`.  With `HALF`: at most `HALF`
        features a block.
    bias_ptr, up_bias_ptr : [N];  out_ptr : [M, N];  operands : pointers, as `STEPS` say
    M : int32
    SECOND : int
        Columns of the second accumulator: `BLOCK_N` with `GATED` or `HALF`, else 0 or more.
    MERGED : {"no", "gate_first", "up_first"}
        Whether both weights (and biases) lie in one tensor.
    cos_ptr, sin_ptr, positions, HALF, ROTATED
        As in `matmul_pointer`.
    """
    COLUMNS: gl.constexpr = N // 2 if HALF > 0 else N
    STEP: gl.constexpr = BLOCK_N if GATED or HALF > 0 else BLOCK_N + SECOND
    TILES_N: gl.constexpr = (COLUMNS + STEP - 1) // STEP
    tiles_m = (M + 127) // 128
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 128, BLOCK_K], x.layout)
    w_tiles = allocate_weight(w, STAGES, BLOCK_N, LAYOUT)
    second_tiles = w_tiles
    if SECOND > 0:
        second_tiles = allocate_weight(up, STAGES, SECOND, LAYOUT)
    full, empty = make_barriers(STAGES, 2)
    ring = (x_tiles, w_tiles, second_tiles, full, empty)
    pointers = (bias_ptr, up_bias_ptr, operands, out_ptr)
    rotation = (cos_ptr, sin_ptr, positions, 0)
    gl.warp_specialize(
        [
            (consume, (
                ring, pointers, rotation, tiles_m, M, N, K, LAYOUT, GATED, MERGED, HAS_BIAS,
                ACTIVATION, STEPS, HALF, ROTATED, 0, BLOCK_N, SECOND, BLOCK_K, TILES_N, GROUP_M,
                STAGES, PDL,
            )),
            (consume, (
                ring, pointers, rotation, tiles_m, M, N, K, LAYOUT, GATED, MERGED, HAS_BIAS,
                ACTIVATION, STEPS, HALF, ROTATED, 1, BLOCK_N, SECOND, BLOCK_K, TILES_N, GROUP_M,
                STAGES, PDL,
            )),
            (request_tiles, (
                x, w, up, ring, tiles_m, M, N, K, LAYOUT, GATED, MERGED, HALF, 128, BLOCK_N, SECOND,
                BLOCK_K, TILES_N, GROUP_M, STAGES, PDL,
            )),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
