"""What becomes of the accumulators of a Hopper kernel.

A matrix instruction leaves each thread pairs of neighbouring columns; memory wants 16 bytes of a
row from each.  So tiles change hands through shared memory on their way out, in the result's 16
bits, and residuals on their way in.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..math import after_step, along_of, count_of, glu, kind_of, number_of, operand_of
from .tiles import first_of_pair, load_bias, load_row, store_rotated, tile_offsets


@gluon.constexpr_function
def row_layout(columns):
    """Return a warp group's layout of so many columns in which each thread has 8 of a row."""
    across = columns // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def store_tile(
    pointers,
    acc,
    acc_up,
    m_start,
    n_start,
    M,
    N: gl.constexpr,
    GATED: gl.constexpr,
    MERGED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Add biases to a float32 tile ``[m, n]``, gate, go through `STEPS`, and store it."""
    bias_ptr, up_bias_ptr, operands, out_ptr = pointers
    L: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = row_layout(COLUMNS)
    n_index = n_start + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    if HAS_BIAS:
        acc += load_bias(bias_ptr, n_index, False, N, MERGED)[None, :]
    if GATED:
        if HAS_BIAS:
            acc_up += load_bias(up_bias_ptr, n_index, True, N, MERGED)[None, :]
        acc = glu(acc, acc_up, ACTIVATION)
    m_out = m_start + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    n_out = n_start + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    offsets, mask = tile_offsets(m_out, n_out, M, N)
    for i in gl.static_range(count_of(STEPS)):
        operand = 0.0
        if along_of(STEPS, i) == "whole":
            loaded = gl.load(operands[operand_of(STEPS, i)] + offsets, mask=mask, other=0.0)
            operand = gl.convert_layout(loaded, L).to(gl.float32)
        elif along_of(STEPS, i) == "row":
            operand = load_row(operands[operand_of(STEPS, i)], n_index, N)[None, :]
        acc = after_step(acc, operand, kind_of(STEPS, i), number_of(STEPS, i))
    y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    gl.store(out_ptr + offsets, y, mask=mask)


@gluon.jit
def store_pairs(
    pointers,
    rotation,
    low,
    high,
    m_start,
    pair_start,
    M,
    N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HALF: gl.constexpr,
    ROTATED: gl.constexpr,
):
    """Add biases to float32 tiles of first and second features, rotate the pairs, and store."""
    bias_ptr, _, _, out_ptr = pointers
    OUT: gl.constexpr = row_layout(low.shape[1])
    low = gl.convert_layout(low, OUT)
    high = gl.convert_layout(high, OUT)
    m_index = m_start + gl.arange(0, low.shape[0], gl.SliceLayout(1, OUT))
    pair_index = pair_start + gl.arange(0, low.shape[1], gl.SliceLayout(0, OUT))
    if HAS_BIAS:
        first = first_of_pair(pair_index, HALF)
        low += load_bias(bias_ptr, first, False, N, "no")[None, :]
        high += load_bias(bias_ptr, first + HALF, False, N, "no")[None, :]
    store_rotated(out_ptr, low, high, m_index, pair_index, M, N, rotation, HALF, ROTATED)
