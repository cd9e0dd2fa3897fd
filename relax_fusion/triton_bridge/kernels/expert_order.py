"""Pairs of token and expert in the order of their experts, and tiles of pairs of one expert.

Everything that depends on the choice of experts is found here, on the device, so that launches and
their grids depend on the number of tokens alone.

Regime: latency, and from some 10000 pairs on the bytes that all programs get from L2.

Shape: a program finds the pairs of one expert.  It counts them and those of the experts in front,
then goes through the pairs once more and writes the places of its own, in rising order, so that the
result is always the same.  It has a run of tiles of its own that begins at ``begin // BLOCK_M +
expert``: up to there, experts in front can have no more tiles.  So none counts the pairs of each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .experts import expert_at

TILE_FIELDS = tl.constexpr(3)
"""Of each tile: its expert, its first pair, and where the pairs of the expert end."""


@triton.jit
def pairs_before(ids_ptr, pairs, expert, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many pairs have an expert in front, and how many have this one or one in front."""
    before = tl.zeros([BLOCK], tl.int32)
    until = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        found = tl.where(index < pairs, expert_at(ids_ptr, index, index < pairs, EXPERTS), EXPERTS)
        before += (found < expert).to(tl.int32)
        until += (found <= expert).to(tl.int32)
    return tl.sum(before, axis=0), tl.sum(until, axis=0)


@triton.jit
def expert_order(
    ids_ptr, order_ptr, tiles_ptr, pairs,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the pairs of one expert.  Grid: ``(experts,)``.

    Parameters
    ----------
    ids_ptr : [pairs]
        Expert of each pair, of any integers.
    order_ptr : int32 [pairs]
        Gets the pairs, those of the first expert first.
    tiles_ptr : int32 [pairs // BLOCK_M + EXPERTS, 3]
        Gets of each tile its expert, its first place in `order_ptr`, and where the expert's places
        end.  Of a tile without pairs that is no more than the first place.
    pairs : int32
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
    expert = tl.program_id(0)
    begin, end = pairs_before(ids_ptr, pairs, expert, EXPERTS, BLOCK)
    first, last = begin // BLOCK_M + expert, end // BLOCK_M + expert + 1
    for start in range(0, last - first, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        ptrs = tiles_ptr + (first + tile) * TILE_FIELDS
        tl.store(ptrs, tl.broadcast_to(expert, [BLOCK]), mask=tile < last - first)
        tl.store(ptrs + 1, begin + tile * BLOCK_M, mask=tile < last - first)
        tl.store(ptrs + 2, tl.broadcast_to(end, [BLOCK]), mask=tile < last - first)
    place = begin - 1
    for start in range(0, pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        chosen = expert_at(ids_ptr, index, index < pairs, EXPERTS) == expert
        here = (chosen & (index < pairs)).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(here, axis=0), index, mask=here > 0)
        place += tl.sum(here, axis=0)
