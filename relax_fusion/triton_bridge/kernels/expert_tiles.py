"""Rows times the weights of their experts, tile by tile of rows that have one expert.

``out[pair] = act(x[token] @ W[expert]^T + bias)``, or the gated form, or times the pair's share.

Regime: weight bytes up to some 200 rows an expert, operations above.  The experts that are chosen
are read once, from memory or, for an expert of several tiles, from L2.

Shape: `expert_order` has sorted the pairs.  A tile of `block_m` places has pairs of one expert; the
rows of x are gathered as they are loaded, asynchronously, and those of the result are stored where
their pairs are.  With `swap` the weight is the left operand of the tensor cores, whose least height
is 64, so that few rows of x waste nothing.  The grid has room for as many tiles as there can be;
programs beyond those that there are end at once.  What depends on a row but not on k is read behind
the loop.

The results of pairs are added by `expert_sum`, in a fixed order, and not by atomic additions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .addresses import swizzled_tile
from .expert_order import TILE_FIELDS
from .experts import apart, behind_product, width_of
from .matmul_pointer import multiply, rows_first


@triton.jit
def weight_pointers(w_ptr, columns, k_index, F: tl.constexpr):
    """Return the pointers ``[n, k]`` of a tile of an expert's weight."""
    if F.layout == "nk":
        return w_ptr + columns[:, None] * F.k + k_index[None, :]
    else:
        return w_ptr + columns[:, None] + k_index[None, :] * width_of(F, True)


@triton.jit
def loaded(ptrs, k_index, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load ``ptrs [n, k]``, zero beyond the end of k."""
    if EVEN_K:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(k_index < K)[None, :], other=0.0)


@triton.jit
def products(x_ptrs, in_rows, w_ptr, columns, F: tl.constexpr, C: tl.constexpr):
    """Return float32 ``[m, n]`` products of rows with the columns, and with those F.n further on.

    The latter are those of the other half of a gated weight; without one, they are zeros.
    """
    EVEN_K: tl.constexpr = F.k % C.block_k == 0
    HALVES: tl.constexpr = F.gate == "halves"
    shape: tl.constexpr = [C.block_n, C.block_m] if C.swap else [C.block_m, C.block_n]
    acc = tl.zeros(shape, tl.float32)
    acc_other = tl.zeros(shape, tl.float32)
    other_ptr = w_ptr + (F.n * F.k if F.layout == "nk" else F.n)
    for start in tl.range(0, F.k, C.block_k, num_stages=C.stages):
        k_index = start + tl.arange(0, C.block_k)
        x_mask = in_rows if EVEN_K else in_rows & (k_index < F.k)[None, :]
        x = tl.load(x_ptrs + k_index[None, :], mask=x_mask, other=0.0)
        w = loaded(weight_pointers(w_ptr, columns, k_index, F), k_index, F.k, EVEN_K)
        acc = multiply(w, x, acc, C.swap)
        if HALVES:
            w = loaded(weight_pointers(other_ptr, columns, k_index, F), k_index, F.k, EVEN_K)
            acc_other = multiply(w, x, acc_other, C.swap)
    return rows_first(acc, C.swap), rows_first(acc_other, C.swap)


@triton.constexpr_function
def together(columns, block):
    """Return how many columns of a tile lie side by side at least, where they wrap at the end."""
    return min(columns & -columns, block)


@triton.jit
def expert_tiles(p, order_ptr, tiles_ptr, F: tl.constexpr, C: tl.constexpr):
    """Compute ``[block_m, block_n]`` of the products of pairs.  Grid: ``(tiles * column tiles,)``.

    Parameters
    ----------
    p : ExpertTensors
        `out` has a row for each pair, and there is no `residual`.
    order_ptr, tiles_ptr
        What `expert_order` has written.
    C : ExpertTile
    """
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    PAIRED: tl.constexpr = F.gate == "pairs"
    WIDTH: tl.constexpr = width_of(F, PAIRED)
    COLUMNS: tl.constexpr = width_of(F, True)
    tiles_n: tl.constexpr = (WIDTH + C.block_n - 1) // C.block_n
    tiles = tl.load(tiles_ptr)
    if tl.program_id(0) >= tiles * tiles_n:
        return
    tile_m, tile_n = swizzled_tile(tl.program_id(0), tiles, tiles_n, C.group_m)
    tile_ptr = tiles_ptr + 1 + tile_m * TILE_FIELDS
    expert = tl.load(tile_ptr).to(tl.int64)
    place = tl.load(tile_ptr + 1) + tl.arange(0, C.block_m)
    in_rows = place < tl.load(tile_ptr + 2)
    pair = tl.load(order_ptr + place, mask=in_rows, other=0)
    row = pair if F.each else pair // F.chosen
    columns = tile_n * C.block_n + tl.arange(0, C.block_n)
    RUN: tl.constexpr = together(WIDTH, C.block_n)
    read = tl.max_contiguous(tl.multiple_of(columns % WIDTH, RUN), RUN)
    x_ptrs = p.x + row.to(tl.int64)[:, None] * F.k
    w_ptr = p.w + expert * (COLUMNS * F.k)
    acc, other = products(x_ptrs, in_rows[:, None], w_ptr, read, F, C)
    if p.bias is not None:
        bias_ptr = p.bias + expert * COLUMNS
        acc += tl.load(bias_ptr + read).to(tl.float32)[None, :]
        if F.gate == "halves":
            other += tl.load(bias_ptr + F.n + read).to(tl.float32)[None, :]
    if PAIRED:
        acc, other = apart(acc)
        columns = tile_n * (C.block_n // 2) + tl.arange(0, C.block_n // 2)
    result = behind_product(acc, other, F)
    if p.share is not None:
        share = tl.load(p.share + pair, mask=in_rows, other=0.0).to(tl.float32)
        result *= share[:, None]
    ptrs = p.out + pair.to(tl.int64)[:, None] * F.n + columns[None, :]
    mask = in_rows[:, None] & (columns < F.n)[None, :]
    tl.store(ptrs, result.to(p.out.dtype.element_ty), mask=mask)
