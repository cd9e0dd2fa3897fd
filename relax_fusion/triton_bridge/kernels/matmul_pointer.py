"""Matmul of a few rows, or of any rows where there is no bulk copy engine, through pointers.

``act(norm(x) @ W^T + bias) [+ residual]`` or ``act(gate) * up``, RMSNorm on the way or no norm.

Regime: up to some 100 rows, weight bytes: ``2 n k`` read once, ``2 rows n k`` operations, so below
about 200 rows on an H200 the matrix units wait for memory.  Above, operations, on sm_80 and sm_89.

Shape: with `swap` the weight is the left operand, ``acc[n, m] = W[n, k] @ x[m, k]^T``.  The left
operand of a matrix instruction has 16 or 64 rows and the right one 8 or more columns, so few rows
of x waste nothing on the right and would waste most of the tile on the left.  A narrow `block_n`
gives every multiprocessor a program; where n is too small for that, `split_k` programs share a
tile, and `split_reduce` adds their float32 parts in a fixed order.

The norm: RMSNorm's factor of a row commutes with the sum over k.  Gamma multiplies the weight
tile, not x: x is not normalised yet and its product with gamma could leave float16's range, while
weights and gammas are of order one.  The squares of x are summed as its tiles pass, which costs
registers ``block_m * block_k`` floats a program, so more than about 32 rows want `row_norm`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import inverse_rms
from .addresses import (
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
from .products import column_tiles, common_divisor, of_product, weight_of


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
    x_ptr, gamma_ptr, weights, m_index, n_index, n, M,
    RUN: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return ``(gate [m, n], up, squares [m])`` of this program's share of k.

    `weights` are the gate's and the up projection's, of `n` features each.
    """
    k_tiles: tl.constexpr = (C.k + C.block_k - 1) // C.block_k
    split = tl.program_id(1)
    begin, end = split * k_tiles // C.split_k, (split + 1) * k_tiles // C.split_k
    EVEN_K: tl.constexpr = C.k % C.block_k == 0
    shape: tl.constexpr = [C.block_n, C.block_m] if C.swap else [C.block_m, C.block_n]
    acc = tl.zeros(shape, tl.float32)
    acc_up = tl.zeros(shape, tl.float32)
    squares = tl.zeros([C.block_m, C.block_k], tl.float32)
    # Rows of x beyond the end are masked: asynchronous copies then move no bytes for them.  Rows of
    # the weight beyond the end read others, and their results are not stored.
    m_offsets = m_index.to(tl.int64)[:, None] * C.k
    in_rows = (m_index < M)[:, None]
    w_ptr, up_ptr = weights
    n_index = weight_rows(n_index, n, F.layout, RUN)
    for k_tile in tl.range(begin, end, num_stages=C.stages):
        k_index = k_tile * C.block_k + tl.arange(0, C.block_k)
        w_offsets = weight_offsets(n_index, k_index, n, C.k, F.layout, F.merged)
        x_mask = in_rows if EVEN_K else in_rows & (k_index < C.k)[None, :]
        x = tl.load(x_ptr + m_offsets + k_index[None, :], mask=x_mask, other=0.0)
        w = load_in_range(w_ptr + w_offsets, n_index, k_index, 1, C.k, True, EVEN_K, "")
        if F.gated:
            up = load_in_range(up_ptr + w_offsets, n_index, k_index, 1, C.k, True, EVEN_K, "")
        if C.norm == "rms":
            gamma_ptrs = gamma_ptr + k_index[None, :]
            gamma = load_in_range(gamma_ptrs, m_index, k_index, 1, C.k, True, EVEN_K, "")
            gamma = gamma.to(tl.float32)
            if C.unit_offset:
                gamma += 1.0
            squares += x.to(tl.float32) * x.to(tl.float32)
            w = (w.to(tl.float32) * gamma).to(x.dtype)
            if F.gated:
                up = (up.to(tl.float32) * gamma).to(x.dtype)
        acc = multiply(w, x, acc, C.swap)
        if F.gated:
            acc_up = multiply(up, x, acc_up, C.swap)
    return rows_first(acc, C.swap), rows_first(acc_up, C.swap), tl.sum(squares, axis=1)


@triton.jit
def store_parts(p, acc, acc_up, squares, m_index, n_index, M, F: tl.constexpr, C: tl.constexpr):
    """Store the sums of this program's share of k where `split_reduce` looks for them.

    `acc_up` is None but for a gated pair, `squares` but for a norm.
    """
    parts: tl.constexpr = 2 if F.gated else 1
    split = tl.program_id(1)
    offsets, mask = tile_offsets(m_index, n_index, M, F.n)
    part_ptr = p.parts + split.to(tl.int64) * M * (parts * F.n)
    tl.store(part_ptr + offsets, acc, mask=mask)
    if F.gated:
        # The other product's sums are M rows further on
        up_offsets, _ = tile_offsets(m_index + M, n_index, M, F.n)
        tl.store(part_ptr + up_offsets, acc_up, mask=mask)
    if C.norm == "rms":
        # The programs of a row all have the same sum, to the bit, and all store it.
        end = tl.full([], C.split_k * parts * F.n, tl.int64) * M
        tl.store(p.parts + end + split * M + m_index, squares, mask=m_index < M)


@triton.jit
def store_sums(args, p, tile_n, F: tl.constexpr, C: tl.constexpr):
    """Finish and store a tile of a product, or this program's part of it."""
    acc, acc_up, squares, m_index, M, eps = args
    n_index = tile_features(tile_n, C.block_n, F.half)
    if C.split_k > 1:
        store_parts(p, acc, acc_up, squares, m_index, n_index, M, F, C)
    else:
        if C.norm == "rms":
            scale = inverse_rms(squares, C.k, eps)[:, None]
            acc, acc_up = acc * scale, acc_up * scale
        store_output(p, acc, acc_up, m_index, n_index, tile_n, M, F)


@triton.jit
def matmul_pointer(
    x_ptr, gamma_ptr, M, eps, p0, F0: tl.constexpr, C: tl.constexpr,
    p1=None, F1: tl.constexpr = None, p2=None, F2: tl.constexpr = None,
):  # fmt: skip
    """Compute one ``[block_m, block_n]`` tile of a result, or one of its `split_k` parts.

    Grid: ``(ceil(M / block_m) * column tiles, split_k)``.

    Parameters
    ----------
    x_ptr : [M, k];  gamma_ptr : [k], or None without a norm
    M : int32;  eps : float32
    p0, p1, p2 : Tensors
        With weights that are pointers, of one layout.
    C : Constants
        `norm` is ``"none"`` or ``"rms"``.
    """
    tiles_m = tl.cdiv(M, C.block_m)
    tiles_n: tl.constexpr = column_tiles(F0, F1, F2)
    tile_m, tile_n = swizzled_tile(tl.program_id(0), tiles_m, tiles_n, C.group_m)
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    m_index = tile_m * C.block_m + tl.arange(0, C.block_m)
    products = (p0, p1, p2)
    if F1 is None:
        n_index = tile_features(tile_n, C.block_n, F0.half)
        w_ptr = half_pointer(p0.w, False, F0.n, C.k, F0.layout, F0.merged)
        up_ptr = half_pointer(p0.up, True, F0.n, C.k, F0.layout, F0.merged) if F0.gated else w_ptr
        run: tl.constexpr = column_run(F0.n, C.block_n, F0.half)
        weights = (w_ptr, up_ptr)
        acc, acc_up, squares = accumulate(
            x_ptr, gamma_ptr, weights, m_index, n_index, F0.n, M, run, F0, C
        )
    else:
        w_ptr, n, tile = weight_of(tile_n, products, F0, F1, F2)
        n_index = tile_features(tile, C.block_n, F0.half)
        shared_run: tl.constexpr = column_run(common_divisor(F0, F1, F2), C.block_n, F0.half)
        acc, acc_up, squares = accumulate(
            x_ptr, gamma_ptr, (w_ptr, w_ptr), m_index, n_index, n, M, shared_run, F0, C
        )
    sums = (acc, acc_up, squares, m_index, M, eps)
    of_product(store_sums, tile_n, sums, products, F0, F1, F2, C)
