"""Matmul of a few rows on Hopper: weights stream through shared memory.

``act(x @ W^T + bias) [+ residual]``, ``act(gate) * up``, or heads rotated by position.

Regime: weight bytes, ``2 n k`` of a 16-bit weight (gated: twice), up to about 128 rows; the matrix
units take a fraction of the time even where most of a tile is padding.

Shape: one program a tile of `BLOCK_N` features, ``acc[n, m] = W[n, k] @ x[m, k]^T``: the left
operand of a matrix instruction has 64 rows, which are features here, and the right one as many
columns as there are rows of x, so few of them waste nothing.  Fewer than 64 features leave a part
of the left operand unused, for the sake of more programs.  `SPLIT_K` programs may share a tile;
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
    w,
    up,
    ring,
    turn,
    feature,
    k_start,
    N: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    MERGED: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BYTES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Ask for the weights of a turn, once its slot is free; `BYTES` will come with the rows."""
    _, w_tiles, up_tiles, full, empty = ring
    SECOND: gl.constexpr = BLOCK_N if GATED or HALF > 0 else 0
    slot = wait_empty(empty, turn, STAGES)
    barrier = full.index(slot)
    mbarrier.expect(barrier, BYTES)
    tiles = (w_tiles.index(slot), up_tiles.index(slot))
    copy_weights(
        w, up, tiles, barrier, feature, k_start, N, LAYOUT, GATED, MERGED, HALF, BLOCK_N, SECOND
    )


@gluon.jit
def request_tiles(
    x,
    w,
    up,
    ring,
    m_start,
    feature,
    k_begin,
    k_end,
    N: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    MERGED: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Fill the ring: first the weights of all slots, then the rows, then both as slots get free."""
    x_tiles, _, _, full, _ = ring
    if PDL and not EARLY:
        gdc_wait()
    ahead = gl.minimum(k_begin + STAGES, k_end)
    for k in range(k_begin, ahead):
        request_weights(
            w, up, ring, k - k_begin, feature, k * BLOCK_K,
            N, LAYOUT, GATED, MERGED, HALF, BLOCK_N, BYTES, STAGES,
        )  # fmt: skip
    if PDL and EARLY:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    for k in range(k_begin, ahead):
        slot = (k - k_begin) % STAGES
        copy_tile(x, [m_start, k * BLOCK_K], full.index(slot), x_tiles.index(slot))
    for k in range(ahead, k_end):
        slot = (k - k_begin) % STAGES
        request_weights(
            w, up, ring, k - k_begin, feature, k * BLOCK_K,
            N, LAYOUT, GATED, MERGED, HALF, BLOCK_N, BYTES, STAGES,
        )  # fmt: skip
        copy_tile(x, [m_start, k * BLOCK_K], full.index(slot), x_tiles.index(slot))


@gluon.jit
def multiply_tiles(
    ring,
    count,
    LAYOUT: gl.constexpr,
    PAIRED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    L: gl.constexpr,
):
    """Return both accumulators ``[64, m]`` over `count` turns; the second is for `PAIRED`."""
    x_tiles, w_tiles, up_tiles, full, empty = ring
    acc = gl.zeros([64, BLOCK_M], gl.float32, L)
    acc_up = gl.zeros([64, BLOCK_M], gl.float32, L)
    for turn in range(count):
        slot = wait_full(full, turn, STAGES)
        x = x_tiles.index(slot).permute((1, 0))
        w = w_tiles.index(slot) if LAYOUT == "nk" else w_tiles.index(slot).permute((1, 0))
        acc = warpgroup_mma(w, x, acc, is_async=True)
        if PAIRED:
            up = up_tiles.index(slot) if LAYOUT == "nk" else up_tiles.index(slot).permute((1, 0))
            acc_up = warpgroup_mma(up, x, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(0, deps=[acc, acc_up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
    return acc, acc_up


@gluon.jit
def consume(
    ring,
    pointers,
    workspace_ptr,
    rotation,
    m_start,
    feature,
    count,
    M,
    N: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    MERGED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STEPS: gl.constexpr,
    HALF: gl.constexpr,
    ROTATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply what arrives, and store the tile, or this program's part of it."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = row_layout(64)
    acc, acc_up = multiply_tiles(ring, count, LAYOUT, GATED or HALF > 0, BLOCK_M, STAGES, L)
    if PDL:
        gdc_wait()  # Before this group reads or writes what an earlier kernel may still use
    acc = gl.convert_layout(acc.permute((1, 0)), OUT)
    acc_up = gl.convert_layout(acc_up.permute((1, 0)), OUT)
    m_index = m_start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    column = gl.arange(0, 64, gl.SliceLayout(0, OUT))
    n_index = feature + column
    if BLOCK_N < 64:
        n_index = gl.where(column < BLOCK_N, n_index, N)  # N and more: none
    if HALF > 0:
        first = first_of_pair(n_index, HALF)
        if SPLIT_K > 1:
            store_parts(workspace_ptr, acc, acc, acc, m_index, first, M, N, False, "none", SPLIT_K)
            first += HALF
            store_parts(
                workspace_ptr, acc_up, acc, acc, m_index, first, M, N, False, "none", SPLIT_K
            )
        else:
            if HAS_BIAS:
                acc += load_bias(pointers[0], first, False, N, "no")[None, :]
                acc_up += load_bias(pointers[0], first + HALF, False, N, "no")[None, :]
            store_rotated(pointers[3], acc, acc_up, m_index, n_index, M, N, rotation, HALF, ROTATED)
    elif SPLIT_K > 1:
        store_parts(workspace_ptr, acc, acc_up, acc, m_index, n_index, M, N, GATED, "none", SPLIT_K)
    else:
        bias_ptr, up_bias_ptr, operands, out_ptr = pointers
        store_output(
            out_ptr, operands, bias_ptr, up_bias_ptr, acc, acc_up, m_index, n_index, M,
            N, GATED, MERGED, HAS_BIAS, ACTIVATION, STEPS,
        )  # fmt: skip


@gluon.jit
def matmul_stream(
    x,
    w,
    up,
    bias_ptr,
    up_bias_ptr,
    operands,
    out_ptr,
    workspace_ptr,
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    EARLY: gl.constexpr,
    MERGED: gl.constexpr = "no",
    cos_ptr=None,
    sin_ptr=None,
    positions=None,
    HALF: gl.constexpr = 0,
    ROTATED: gl.constexpr = 0,
):
    """Compute `BLOCK_N` features (with `HALF`: pairs of them) of `BLOCK_M` rows.

    Grid: ``(ceil(M / BLOCK_M) * ceil(N / BLOCK_N), SPLIT_K)``, with `HALF` half as many.

    Parameters
    ----------
    x : tensor map of [M, K], block [BLOCK_M, BLOCK_K]
    w, up : tensor maps of [N, K], block [BLOCK_N, BLOCK_K]
        Layout ``"kn"``: of [K, N], block [BLOCK_K, BLOCK_N].  Merged: both of the whole weight.
        With `HALF`: both of the one weight, at most `HALF` features a block.
    bias_ptr, up_bias_ptr : [N];  out_ptr : [M, N];  operands : pointers, as `STEPS` say
    workspace_ptr : float32
        Used where ``SPLIT_K > 1``: ``[SPLIT_K, 1 + GATED, M, N]`` partial sums.
    M : int32
    BLOCK_N : 16, 32 or 64
    PDL, EARLY : bool
        Launched while a predecessor may still run; whether weights may be read all the same.
    MERGED : {"no", "gate_first", "up_first"}
        Whether both weights (and biases) lie in one tensor.
    cos_ptr, sin_ptr, positions, HALF, ROTATED
        As in `matmul_pointer`.
    """
    COLUMNS: gl.constexpr = N // 2 if HALF > 0 else N
    PAIRED: gl.constexpr = GATED or HALF > 0
    K_TILES: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N * (2 if PAIRED else 1)) * BLOCK_K * 2
    tile_m, tile_n = swizzled_tile(
        gl.program_id(0), (M + BLOCK_M - 1) // BLOCK_M, (COLUMNS + BLOCK_N - 1) // BLOCK_N, 8
    )
    m_start, feature = first_row(tile_m, M, BLOCK_M), tile_n * BLOCK_N
    k_begin = gl.program_id(1) * K_TILES // SPLIT_K
    k_end = (gl.program_id(1) + 1) * K_TILES // SPLIT_K
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_tiles = allocate_weight(w, STAGES, 64, LAYOUT)
    up_tiles = w_tiles
    if PAIRED:
        up_tiles = allocate_weight(up, STAGES, 64, LAYOUT)
    full, empty = make_barriers(STAGES, 1)
    ring = (x_tiles, w_tiles, up_tiles, full, empty)
    pointers = (bias_ptr, up_bias_ptr, operands, out_ptr)
    rotation = (cos_ptr, sin_ptr, positions, 0)
    gl.warp_specialize(
        [
            (consume, (
                ring, pointers, workspace_ptr, rotation, m_start, feature, k_end - k_begin, M,
                N, LAYOUT, GATED, MERGED, HAS_BIAS, ACTIVATION, STEPS, HALF, ROTATED,
                BLOCK_M, BLOCK_N, SPLIT_K, STAGES, PDL,
            )),
            (request_tiles, (
                x, w, up, ring, m_start, feature, k_begin, k_end,
                N, LAYOUT, GATED, MERGED, HALF, BLOCK_N, BLOCK_K, BYTES, STAGES, PDL, EARLY,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
