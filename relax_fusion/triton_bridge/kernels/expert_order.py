"""Pairs of token and expert in the order of their experts, and tiles of pairs of one expert.

Everything that depends on the choice of experts is found here, on the device, so that launches and
their grids depend on the number of tokens alone.

Regime: latency.  There are at most some ten thousand pairs; each program reads all of them, from L2
but for the first.

Shape: a program finds the pairs of one expert.  It counts the pairs of all experts, to know where
those of its own begin, and how many tiles there are before; then it goes through the pairs once
more and writes the places of its own, in rising order, so that the result is always the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .experts import expert_at

TILE_FIELDS = tl.constexpr(3)
"""Of each tile: its expert, its first pair, and where the pairs of the expert end."""


@triton.jit
def counts_of(ids_ptr, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of pairs ``[BINS]`` of each expert."""
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        expert = expert_at(ids_ptr, index, index < pairs, EXPERTS)
        counts += tl.histogram(expert, BINS, mask=index < pairs)
    return counts


@triton.jit
def expert_order(
    ids_ptr, order_ptr, tiles_ptr, pairs,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Find the pairs of one expert.  Grid: ``(experts,)``.

    Parameters
    ----------
    ids_ptr : [pairs]
        Expert of each pair, of any integers.
    order_ptr : int32 [pairs]
        Gets the pairs, those of the first expert first.
    tiles_ptr : int32 [1 + 3 tiles]
        Gets the number of tiles, then of each its expert, its first place in `order_ptr`, and where
        the expert's places end.
    pairs : int32
    EXPERTS, BINS : int
        `BINS` is a power of 2, no less than `EXPERTS` and 32.
    BLOCK_M : int
        Pairs of a tile; the last one of an expert may have fewer.
    BLOCK : int
        Pairs that are looked at together.
    PDL : bool
        Whether it is launched while the kernel in front may still run.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mine = tl.program_id(0)
    counts = counts_of(ids_ptr, pairs, EXPERTS, BINS, BLOCK)
    tiles = (counts + (BLOCK_M - 1)) // BLOCK_M
    before = tl.arange(0, BINS) < mine
    begin = tl.sum(tl.where(before, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(before, tiles, 0), axis=0)
    end = begin
    for start in range(0, pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        chosen = expert_at(ids_ptr, index, index < pairs, EXPERTS) == mine
        here = (chosen & (index < pairs)).to(tl.int32)
        places = end + tl.cumsum(here, axis=0) - 1
        tl.store(order_ptr + places, index, mask=here > 0)
        end += tl.sum(here, axis=0)
    if mine == EXPERTS - 1:
        tl.store(tiles_ptr, tl.sum(tiles, axis=0))
    own = (end - begin + (BLOCK_M - 1)) // BLOCK_M
    for start in range(0, own, BINS):
        tile = start + tl.arange(0, BINS)
        ptrs = tiles_ptr + 1 + (first_tile + tile) * TILE_FIELDS
        tl.store(ptrs, tl.broadcast_to(mine, [BINS]), mask=tile < own)
        tl.store(ptrs + 1, begin + tile * BLOCK_M, mask=tile < own)
        tl.store(ptrs + 2, tl.broadcast_to(end, [BINS]), mask=tile < own)
