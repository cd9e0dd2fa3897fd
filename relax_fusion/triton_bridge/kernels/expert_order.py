"""Pairs of token and expert in the order of their experts, and where those of each begin.

Everything that depends on the choice of experts is found here, on the device, so that launches and
their grids depend on the number of tokens alone.  All products by the same choice read the result.

Regime: latency.

Shape: a program writes the places of `CHUNK` pairs.  It counts the pairs of every expert, those in
front of its own apart, so that all programs know where each expert begins, and none waits for
another.  Of two pairs of an expert the first comes first: the result is always the same.

The pairs of an expert are tiles of ``BLOCK_M``, the last of which may have fewer.  They are a run
that begins at tile ``begin // BLOCK_M + expert``: up to there, experts in front can have no more
tiles.  So no table of tiles is written, and tiles of any height are found by the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .experts import expert_at

STEP = tl.constexpr(32)
"""Pairs that all of a program are compared with together."""


@triton.constexpr_function
def bins_of(experts):
    """Return how many counters a histogram of experts has: a power of two, one a lane at least."""
    return max(32, triton.next_power_of_2(experts))


@triton.jit
def count_pairs(ids_ptr, pairs, first, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return int32 numbers ``[experts]`` of pairs, of all and of those in front of `first`."""
    BINS: tl.constexpr = bins_of(EXPERTS)
    every = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        experts = expert_at(ids_ptr, index, index < pairs, EXPERTS)
        every += tl.histogram(experts, BINS, mask=index < pairs)
        if start < first:
            before += tl.histogram(experts, BINS, mask=index < first)
    return every, before


@triton.jit
def expert_order(
    ids_ptr, order_ptr, begins_ptr, pairs,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the places of some pairs.  Grid: ``(ceil(pairs / CHUNK),)``.

    Parameters
    ----------
    ids_ptr : [pairs]
        Expert of each pair, of any integers.
    order_ptr : int32 [pairs]
        Gets the pairs, those of the first expert first.
    begins_ptr : int32 [EXPERTS + 1]
        Gets the place in `order_ptr` of the first pair of each expert, and behind them `pairs`.
    pairs : int32
    CHUNK : int
        Pairs of a program.
    BLOCK : int
        Pairs that are counted together.
    PDL : bool
        Whether it is launched while the kernel in front may still run.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0) * CHUNK
    every, before = count_pairs(ids_ptr, pairs, first, EXPERTS, BLOCK)
    begins = tl.cumsum(every, axis=0) - every
    if first == 0:
        each = tl.arange(0, bins_of(EXPERTS))
        tl.store(begins_ptr + each, begins, mask=each < EXPERTS)
        tl.store(begins_ptr + EXPERTS, pairs)
    own = tl.arange(0, CHUNK)
    mine = expert_at(ids_ptr, first + own, first + own < pairs, EXPERTS)
    in_front = tl.zeros([CHUNK, STEP], tl.int32)
    for start in tl.static_range(0, CHUNK, STEP):
        other = start + tl.arange(0, STEP)
        theirs = expert_at(ids_ptr, first + other, first + other < pairs, EXPERTS)
        same = theirs[None, :] == mine[:, None]
        in_front += (same & (other[None, :] < own[:, None])).to(tl.int32)
    place = tl.gather(begins + before, mine, axis=0) + tl.sum(in_front, axis=1)
    tl.store(order_ptr + place, first + own, mask=first + own < pairs)


@triton.jit
def tile_of_expert(begins_ptr, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a tile, its first place in the order, and where its expert's end.

    Of a tile without pairs the end is no more than the first place.
    """
    each = tl.arange(0, triton.next_power_of_2(EXPERTS))
    begins = tl.load(begins_ptr + each, mask=each < EXPERTS, other=0)
    is_behind = (each < EXPERTS) & (begins // BLOCK_M + each <= tile)
    expert = tl.sum(is_behind.to(tl.int32), axis=0) - 1
    begin = tl.load(begins_ptr + expert)
    first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
    return expert, first, tl.load(begins_ptr + expert + 1)
