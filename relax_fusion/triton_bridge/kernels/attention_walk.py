"""Which tiles of queries a program of `attention_flash` walks, and which blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_scores import LOG2_E, common_range, position_of, visible_range
from .tiles import swizzled_tile

ROWS = gl.constexpr(128)
"""Queries of a tile: 64 for each of two warp groups."""


class Constants(NamedTuple):
    """The constexprs of `attention_flash`; it documents them."""

    heads: gl.constexpr
    group: gl.constexpr
    v_dim: gl.constexpr
    scale: gl.constexpr
    causal: gl.constexpr
    window: gl.constexpr
    softcap: gl.constexpr
    bias: gl.constexpr
    bias_keys: gl.constexpr
    bias_tiles: gl.constexpr
    has_mask: gl.constexpr
    mask_keys: gl.constexpr
    alibi: gl.constexpr
    sinks: gl.constexpr
    block_n: gl.constexpr
    stages: gl.constexpr
    q_stages: gl.constexpr
    section: gl.constexpr
    pdl: gl.constexpr
    scored: gl.constexpr = 1.0
    """What products are multiplied by before anything else is done to them."""
    unit: gl.constexpr = 1.0
    """What makes base-2 scores of the scores that the softmax is given."""


@gluon.constexpr_function
def constants(*values):
    """Return them under their names, and what follows from them.

    A factor on all scores waits for the exponential, whose argument is a product anyway.
    """
    c = Constants(*values)
    scored, unit = c.scale * LOG2_E, 1.0
    if not (c.softcap > 0.0 or c.alibi):
        if c.bias != "none":
            scored, unit = c.scale, LOG2_E
        elif c.scale > 0.0:
            scored, unit = 1.0, c.scale * LOG2_E
    return Constants(*(gl.constexpr(value) for value in (*values, scored, unit)))


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
    first = position_of(m_start, Q_LEN, KV_LEN, C.causal)
    last = position_of(gl.minimum(m_start + ROWS, Q_LEN) - 1, Q_LEN, KV_LEN, C.causal)
    begin_key, end_key = visible_range(first, last, KV_LEN, C.causal, C.window)
    low_key, high_key = common_range(first, last, KV_LEN, C.causal, C.window)
    begin = begin_key // C.block_n
    end = gl.maximum((end_key + C.block_n - 1) // C.block_n, begin + 1)
    high = gl.minimum(gl.maximum(high_key // C.block_n, begin), end - 1)
    low = gl.minimum((low_key + C.block_n - 1) // C.block_n, high)
    return end, (1, end - high, end - low, end - begin)
