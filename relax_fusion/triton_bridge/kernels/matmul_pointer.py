"""Matmul of a few rows, or of any rows where there is no bulk copy engine, through pointers.

``act(norm(x) @ W^T + bias) [+ residual]`` or ``act(gate) * up``, RMSNorm on the way or no norm.

Regime: up to some 100 rows, weight bytes: ``2 n k`` read once, ``2 rows n k`` operations, so below
about 200 rows on an H200 the matrix units wait for memory.  Above, operations, on sm_80 and sm_89.

Shape: with ``SWAP`` the weight is the left operand, ``acc[n, m] = W[n, k] @ x[m, k]^T``.  The left
operand of a matrix instruction has 16 or 64 rows and the right one 8 or more columns, so few rows
of x waste nothing on the right and would waste most of the tile on the left.  A narrow `BLOCK_N`
gives every multiprocessor a program; where n is too small for that, `SPLIT_K` programs share a
tile, and `split_reduce` adds their float32 parts in a fixed order.

The norm: RMSNorm's factor of a row commutes with the sum over k.  Gamma multiplies the weight
tile, not x: x is not normalised yet and its product with gamma could leave float16's range, while
weights and gammas are of order one.  The squares of x are summed as its tiles pass, which costs
registers ``BLOCK_M * BLOCK_K`` floats a program, so more than about 32 rows want `row_norm`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import inverse_rms
from .tiles import (
    column_run,
    half_pointer,
    load_in_range,
    store_output,
    swizzled_tile,
    tile_features,
    tile_offsets,
    weight_offsets,
    weight_rows,
)


@triton.jit
def multiply(w, x, acc, SWAP: tl.constexpr):
    """Add ``w[n, k] @ x[m, k]^T`` to ``acc [n, m]``, or its transpose where not `SWAP`."""
    if SWAP:
        return tl.dot(w, x.T, acc)
    else:
        return tl.dot(x, w.T, acc)


@triton.jit
def rows_first(acc, SWAP: tl.constexpr):
    """Return an accumulator as ``[m, n]``."""
    if SWAP:
        return acc.T
    else:
        return acc


@triton.jit
def accumulate(
    x_ptr,
    gamma_ptr,
    w_ptr,
    up_ptr,
    m_index,
    n_index,
    k_begin,
    k_end,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    MERGED: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HALF: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Return ``(gate [m, n], up, squares [m])``, summed over k tiles `k_begin` to `k_end`."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    shape: tl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    acc = tl.zeros(shape, tl.float32)
    acc_up = tl.zeros(shape, tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    # Rows of x beyond the end are masked: asynchronous copies then move no bytes for them.  Rows of
    # the weight beyond the end read others, and their results are not stored.
    m_offsets = m_index.to(tl.int64)[:, None] * K
    in_rows = (m_index < M)[:, None]
    w_ptr = half_pointer(w_ptr, False, N, K, LAYOUT, MERGED)
    up_ptr = half_pointer(up_ptr, True, N, K, LAYOUT, MERGED)
    n_index = weight_rows(n_index, N, LAYOUT, column_run(N, BLOCK_N, HALF))
    for k_tile in tl.range(k_begin, k_end, num_stages=NUM_STAGES):
        k_index = k_tile * BLOCK_K + tl.arange(0, BLOCK_K)
        w_offsets = weight_offsets(n_index, k_index, N, K, LAYOUT, MERGED)
        x_mask = in_rows if EVEN_K else in_rows & (k_index < K)[None, :]
        x = tl.load(x_ptr + m_offsets + k_index[None, :], mask=x_mask, other=0.0)
        w = load_in_range(w_ptr + w_offsets, n_index, k_index, 1, K, True, EVEN_K, "")
        if GATED:
            up = load_in_range(up_ptr + w_offsets, n_index, k_index, 1, K, True, EVEN_K, "")
        if NORM == "rms":
            gamma_ptrs = gamma_ptr + k_index[None, :]
            gamma = load_in_range(gamma_ptrs, m_index, k_index, 1, K, True, EVEN_K, "")
            gamma = gamma.to(tl.float32)
            if UNIT_OFFSET:
                gamma += 1.0
            squares += x.to(tl.float32) * x.to(tl.float32)
            w = (w.to(tl.float32) * gamma).to(x.dtype)
            if GATED:
                up = (up.to(tl.float32) * gamma).to(x.dtype)
        acc = multiply(w, x, acc, SWAP)
        if GATED:
            acc_up = multiply(up, x, acc_up, SWAP)
    return rows_first(acc, SWAP), rows_first(acc_up, SWAP), tl.sum(squares, axis=1)


@triton.jit
def store_parts(
    workspace_ptr,
    acc,
    acc_up,
    squares,
    m_index,
    n_index,
    M,
    N: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Store the sums of this program's share of k where `split_reduce` looks for them."""
    parts: tl.constexpr = 2 if GATED else 1
    split = tl.program_id(1)
    offsets, mask = tile_offsets(m_index, n_index, M, N)
    part_ptr = workspace_ptr + split.to(tl.int64) * M * (parts * N)
    tl.store(part_ptr + offsets, acc, mask=mask)
    if GATED:
        # The other product's sums are M rows further on
        up_offsets, _ = tile_offsets(m_index + M, n_index, M, N)
        tl.store(part_ptr + up_offsets, acc_up, mask=mask)
    if NORM == "rms":
        # The programs of a row all have the same sum, to the bit, and all store it.
        end = tl.full([], SPLIT_K * parts * N, tl.int64) * M
        tl.store(workspace_ptr + end + split * M + m_index, squares, mask=m_index < M)


@triton.jit
def matmul_pointer(
    x_ptr,
    gamma_ptr,
    w_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    operands,
    out_ptr,
    workspace_ptr,
    M,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    MERGED: tl.constexpr = "no",
    cos_ptr=None,
    sin_ptr=None,
    positions=None,
    HALF: tl.constexpr = 0,
    ROTATED: tl.constexpr = 0,
    UNIT_OFFSET: tl.constexpr = False,
):
    """Compute one ``[BLOCK_M, BLOCK_N]`` tile of the result, or one of its `SPLIT_K` parts.

    Grid: ``(ceil(M / BLOCK_M) * ceil(N / BLOCK_N), SPLIT_K)``.

    Parameters
    ----------
    x_ptr : [M, K];  gamma_ptr : [K];  w_ptr, up_ptr : [N, K] or [K, N]
    bias_ptr, up_bias_ptr : [N];  out_ptr : [M, N];  operands : pointers, as `STEPS` say
    workspace_ptr : float32
        Used where ``SPLIT_K > 1``: ``[SPLIT_K, 1 + GATED, M, N]`` partial sums, then
        ``[SPLIT_K, M]`` partial sums of squares.
    M : int32;  eps : float32
    NORM : {"none", "rms"};  LAYOUT : {"nk", "kn"}
    MERGED : {"no", "gate_first", "up_first"}
        Whether both weights (and biases) lie in one tensor, which both pointers then point to.
    cos_ptr, sin_ptr : [positions, 2 HALF], any float dtype
        With `HALF`: of the angles by which pairs of features `HALF` apart are turned.
    positions : int32
        Row i takes row ``i % positions`` of them; None for row i.
    HALF, ROTATED : int
        Half the width of a head, and how many features are rotated; 0 for no rotation.
    UNIT_OFFSET : bool
        Multiply by ``1 + gamma``.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile_m, tile_n = swizzled_tile(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    m_index = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n_index = tile_features(tile_n, BLOCK_N, HALF)
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    split = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    k_begin, k_end = split * k_tiles // SPLIT_K, (split + 1) * k_tiles // SPLIT_K
    acc, acc_up, squares = accumulate(
        x_ptr, gamma_ptr, w_ptr, up_ptr, m_index, n_index, k_begin, k_end, M, N, K,
        LAYOUT, NORM, GATED, MERGED, SWAP, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, HALF, UNIT_OFFSET,
    )  # fmt: skip
    if SPLIT_K > 1:
        store_parts(
            workspace_ptr, acc, acc_up, squares, m_index, n_index, M, N, GATED, NORM, SPLIT_K
        )
    else:
        if NORM == "rms":
            scale = inverse_rms(squares, K, eps)[:, None]
            acc, acc_up = acc * scale, acc_up * scale
        store_output(
            out_ptr,
            operands,
            bias_ptr,
            up_bias_ptr,
            acc,
            acc_up,
            m_index,
            n_index,
            M,
            N,
            GATED,
            MERGED,
            HAS_BIAS,
            ACTIVATION,
            STEPS,
            (cos_ptr, sin_ptr, positions, tile_n),
            HALF,
            ROTATED,
        )
