"""What becomes of the accumulators of a Hopper kernel.

A matrix instruction leaves each thread pairs of neighbouring columns; memory wants 16 bytes of a
row from each, side by side.  So tiles change hands through shared memory on their way out, in the
result's dtype, and residuals on their way in.  Where rows are no multiples of 16 bytes, a thread
takes as many elements as one store can have, and its neighbours those beside them: with eight of
2 bytes each, 384 x 50257 results in float16 took 138 us on an H200, 80 us of them for stores
(`2026-11-28-unaligned_rows.json`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..math import after_step, glu
from .products import along_of, count_of, kind_of, number_of, operand_of
from .tiles import first_of_pair, load_bias, load_row, store_rotated, tile_offsets


@gluon.constexpr_function
def row_layout(columns, run=8):
    """Return a warp group's layout of so many columns in which each thread has `run` of a row."""
    across = min(columns // run, 32)
    return gl.BlockedLayout([1, run], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def stored_together(n, bits):
    """Return how many neighbours a thread takes, in rows of `n` elements of so many bits."""
    return 8 if n * bits % 128 == 0 else min(n & -n, 8)


@gluon.jit
def store_tile(p, acc, acc_up, m_start, n_start, M, F: gl.constexpr):
    """Add biases to a float32 tile ``[m, n]``, gate, go through ``F.steps``, and store it."""
    L: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    RUN: gl.constexpr = stored_together(F.n, p.out.dtype.element_ty.primitive_bitwidth)
    OUT: gl.constexpr = row_layout(COLUMNS, RUN)
    n_index = n_start + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    if F.has_bias:
        acc += load_bias(p.bias, n_index, False, F.n, F.merged)[None, :]
    if F.gated:
        if F.has_bias:
            acc_up += load_bias(p.up_bias, n_index, True, F.n, F.merged)[None, :]
        acc = glu(acc, acc_up, F.activation)
    m_out = m_start + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    n_out = n_start + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    offsets, mask = tile_offsets(m_out, n_out, M, F.n)
    for i in gl.static_range(count_of(F.steps)):
        operand = 0.0
        if along_of(F.steps, i) == "whole":
            loaded = gl.load(p.operands[operand_of(F.steps, i)] + offsets, mask=mask, other=0.0)
            operand = gl.convert_layout(loaded, L).to(gl.float32)
        elif along_of(F.steps, i) == "row":
            operand = load_row(p.operands[operand_of(F.steps, i)], n_index, F.n)[None, :]
        acc = after_step(acc, operand, kind_of(F.steps, i), number_of(F.steps, i))
    y = gl.convert_layout(acc.to(p.out.dtype.element_ty), OUT)
    gl.store(p.out + offsets, y, mask=mask)


@gluon.jit
def store_pairs(p, low, high, m_start, pair_start, M, F: gl.constexpr):
    """Add biases to float32 tiles of first and second features, rotate the pairs, and store."""
    OUT: gl.constexpr = row_layout(low.shape[1])
    low = gl.convert_layout(low, OUT)
    high = gl.convert_layout(high, OUT)
    m_index = m_start + gl.arange(0, low.shape[0], gl.SliceLayout(1, OUT))
    pair_index = pair_start + gl.arange(0, low.shape[1], gl.SliceLayout(0, OUT))
    if F.has_bias:
        first = first_of_pair(pair_index, F.half)
        low += load_bias(p.bias, first, False, F.n, "no")[None, :]
        high += load_bias(p.bias, first + F.half, False, F.n, "no")[None, :]
    store_rotated(p, low, high, m_index, pair_index, M, F)


@gluon.jit
def store_neighbours(p, acc, m_start, n_start, M, F: gl.constexpr):
    """Add biases to a float32 tile, rotate pairs of neighbouring columns, and store it."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    PAIRS: gl.constexpr = COLUMNS // 2
    OUT: gl.constexpr = row_layout(COLUMNS)
    HALVES: gl.constexpr = gl.BlockedLayout([1, 4], OUT.threads_per_warp, [4, 1], [1, 0])
    acc = gl.convert_layout(acc, OUT)
    if F.has_bias:
        n_index = n_start + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
        acc += load_bias(p.bias, n_index, False, F.n, "no")[None, :]
    low, high = gl.split(gl.reshape(acc, [ROWS, PAIRS, 2]))
    low = gl.convert_layout(low, HALVES)
    high = gl.convert_layout(high, HALVES)
    m_index = m_start + gl.arange(0, ROWS, gl.SliceLayout(1, HALVES))
    pair_index = n_start // 2 + gl.arange(0, PAIRS, gl.SliceLayout(0, HALVES))
    store_rotated(p, low, high, m_index, pair_index, M, F)
