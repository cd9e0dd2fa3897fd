"""Which tiles of queries a program of `attention_flash` walks, and which blocks of keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_core import common_range, span_of, visible_range
from .tiles import swizzled_tile

ROWS = gl.constexpr(128)
"""Queries of a tile: 64 for each of two warp groups."""


@gluon.jit
def tiles_of_program(BATCH, Q_LEN, C: gl.constexpr):
    """Return how many tiles this program computes."""
    tiles = BATCH * C.heads * ((Q_LEN + ROWS - 1) // ROWS)
    rounds = tiles // gl.num_programs(0)
    left = tiles % gl.num_programs(0)
    return rounds + (place_in_round(rounds) < left).to(gl.int32)


@gluon.jit
def place_in_round(count):
    """Return where this program stands in a round: first in one, it is last in the next.

    Tiles come from the longest to the shortest, and so all programs get as much to do.
    """
    x = gl.program_id(0)
    return gl.where(count % 2 == 0, x, gl.num_programs(0) - 1 - x)


@gluon.jit
def query_tile(count, BATCH, Q_LEN, C: gl.constexpr):
    """Return batch entry, head and first row of this program's tile number `count`."""
    tile = count * gl.num_programs(0) + place_in_round(count)
    tiles_m = (Q_LEN + ROWS - 1) // ROWS
    unit, turn = swizzled_tile(tile, BATCH * C.heads, tiles_m, C.section)
    return unit // C.heads, unit % C.heads, (tiles_m - 1 - turn) * ROWS


@gluon.jit
def key_blocks(m_start, Q_LEN, KV_LEN, C: gl.constexpr):
    """Return ``(end, counts)``: a tile's blocks of keys are the ``counts[3]`` in front of `end`.

    They are walked backwards.  The first may reach beyond the last key (and be the only one, of
    which no row sees a key); of those before ``counts[1]`` and from ``counts[2]`` on, a row may see
    a part.
    """
    first, last = span_of(m_start, ROWS, Q_LEN, KV_LEN, 1, C)
    begin_key, end_key = visible_range(first, last, KV_LEN, C)
    low_key, high_key = common_range(first, last, KV_LEN, C)
    begin = begin_key // C.block_n
    end = gl.maximum((end_key + C.block_n - 1) // C.block_n, begin + 1)
    high = gl.minimum(gl.maximum(high_key // C.block_n, begin), end - 1)
    low = gl.minimum((low_key + C.block_n - 1) // C.block_n, high)
    return end, (1, end - high, end - low, end - begin)
