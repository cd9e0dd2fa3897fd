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
from .expert_order import tile_of_expert
from .experts import apart, behind_product, read_columns, width_of
from .matmul_pointer import multiply, rows_first
from .words import load_words, numbers_of, units_of


@triton.jit
def weight_tile(
    p, w_map, expert, tile_n, start, PART: tl.constexpr, F: tl.constexpr, C: tl.constexpr
):
    """Return a tile ``[n, k]`` of an expert's weight, zero beyond the end of k.

    `PART` is 1 for the columns that are F.n further on.  Columns beyond the end are others', and
    their results are not stored.
    """
    COLUMNS: tl.constexpr = width_of(F, True)
    if F.bits:
        first, row = expert.to(tl.int64) * COLUMNS + PART * F.n, read_columns(tile_n, F, C)
        RUN: tl.constexpr = F.fields
        of = load_words(p.w, p.scale, first, row[:, None, None], start, F.k, F, C.block_k, RUN)
        numbers = tl.reshape(numbers_of(of[0], F), [C.block_n, C.block_k // RUN, RUN])
        factors = tl.reshape(of[1], [C.block_n, C.block_k // RUN])[:, :, None]
        tile = (numbers * (factors * units_of(F)[None, None, :])).to(p.x.dtype.element_ty)
        return tl.reshape(tile, [C.block_n, C.block_k])
    elif w_map is not None:
        first = tile_n * C.block_n + PART * F.n
        if F.layout == "nk":
            return w_map.load([expert * COLUMNS + first, start])
        else:
            return w_map.load([expert * F.k + start, first]).T
    else:
        columns = PART * F.n + read_columns(tile_n, F, C)
        k_index = start + tl.arange(0, C.block_k)
        ptrs = p.w + expert.to(tl.int64) * (COLUMNS * F.k)
        if F.layout == "nk":
            ptrs += columns[:, None] * F.k + k_index[None, :]
        else:
            ptrs += columns[:, None] + k_index[None, :] * COLUMNS
        if F.k % C.block_k == 0:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(k_index < F.k)[None, :], other=0.0)


@triton.jit
def products(x_ptrs, in_rows, p, w_map, expert, tile_n, F: tl.constexpr, C: tl.constexpr):
    """Return float32 ``[m, n]`` products of rows with a tile of columns, and with its other half.

    The latter are zeros where gate and up are no halves of the columns.
    """
    EVEN_K: tl.constexpr = F.k % C.block_k == 0
    HALVES: tl.constexpr = F.gate == "halves"
    shape: tl.constexpr = [C.block_n, C.block_m] if C.swap else [C.block_m, C.block_n]
    acc = tl.zeros(shape, tl.float32)
    acc_other = tl.zeros(shape, tl.float32)
    for start in tl.range(0, F.k, C.block_k, num_stages=C.stages):
        k_index = start + tl.arange(0, C.block_k)
        x_mask = in_rows if EVEN_K else in_rows & (k_index < F.k)[None, :]
        x = tl.load(x_ptrs + k_index[None, :], mask=x_mask, other=0.0)
        acc = multiply(weight_tile(p, w_map, expert, tile_n, start, 0, F, C), x, acc, C.swap)
        if HALVES:
            other = weight_tile(p, w_map, expert, tile_n, start, 1, F, C)
            acc_other = multiply(other, x, acc_other, C.swap)
    return rows_first(acc, C.swap), rows_first(acc_other, C.swap)


@triton.jit
def expert_tiles(p, order_ptr, begins_ptr, tiles, F: tl.constexpr, C: tl.constexpr, w_map=None):
    """Compute ``[block_m, block_n]`` of the products of pairs.  Grid: ``(tiles * column tiles,)``.

    Parameters
    ----------
    p : ExpertTensors
        `out` has a row for each pair, and there is no `residual`.
    order_ptr, begins_ptr
        What `expert_order` has written.
    tiles : int32
        How many there may be.
    C : ExpertTile
    w_map : descriptor, optional
        Of `p.w`, as two dimensions, by which it is read in the place of pointers.
    """
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    PAIRED: tl.constexpr = F.gate == "pairs"
    tiles_n: tl.constexpr = (width_of(F, PAIRED) + C.block_n - 1) // C.block_n
    tile_m, tile_n = swizzled_tile(tl.program_id(0), tiles, tiles_n, C.group_m)
    expert, first, end = tile_of_expert(begins_ptr, tile_m, F.experts, C.block_m)
    if first >= end:
        return
    place = first + tl.arange(0, C.block_m)
    in_rows = place < end
    pair = tl.load(order_ptr + place, mask=in_rows, other=0)
    row = pair if F.each else pair // F.chosen
    x_ptrs = p.x + row.to(tl.int64)[:, None] * F.k
    acc, other = products(x_ptrs, in_rows[:, None], p, w_map, expert, tile_n, F, C)
    columns = tile_n * C.block_n + tl.arange(0, C.block_n)
    if p.bias is not None:
        bias_ptr = p.bias + expert.to(tl.int64) * width_of(F, True) + read_columns(tile_n, F, C)
        acc += tl.load(bias_ptr).to(tl.float32)[None, :]
        if F.gate == "halves":
            other += tl.load(bias_ptr + F.n).to(tl.float32)[None, :]
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
