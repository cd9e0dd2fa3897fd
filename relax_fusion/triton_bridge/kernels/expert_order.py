"""Pairs of token and expert in the order of their experts, and where those of each begin.

Everything that depends on the choice of experts is found here, on the device, so that launches and
their grids depend on the number of tokens alone.  All products by the same choice read the result.

Regime: latency.

Shape: a program writes the places of `CHUNK` pairs.  It knows the pairs of every expert, those in
front of its own apart, so that all programs know where each expert begins, and none waits for
another.  Few pairs each program counts for itself; of many, a launch in front counts those of each
chunk (on an H200, programs that counted 32768 pairs took 35 us).  Of two pairs of an expert the
first comes first: the result is always the same.

The pairs of an expert are tiles of ``BLOCK_M``, the last of which may have fewer.  They are a run
that begins at tile ``begin // BLOCK_M + expert``: up to there, experts in front can have no more
tiles.  So no table of tiles is written, and tiles of any height are found by the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .expert_counts import bins_of
from .experts import expert_at

STEP, TOGETHER = tl.constexpr(32), tl.constexpr(8192)
"""Pairs that all of a program are compared with together, and numbers that it adds together."""


@triton.jit
def count_pairs(ids_ptr, pairs, first, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return int32 numbers ``[experts]`` of pairs, of all and of those in front of `first`."""
    index = tl.arange(0, BLOCK)
    experts = expert_at(ids_ptr, index, index < pairs, EXPERTS)
    every = tl.histogram(experts, bins_of(EXPERTS), mask=index < pairs)
    return every, tl.histogram(experts, bins_of(EXPERTS), mask=index < tl.minimum(first, pairs))


@triton.jit
def add_counts(counts_ptr, chunks, chunk, EXPERTS: tl.constexpr):
    """Return the same of chunks that are counted, of which those in front of `chunk` are apart."""
    BINS: tl.constexpr = bins_of(EXPERTS)
    every = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for start in range(0, chunks, TOGETHER // BINS):
        row = (start + tl.arange(0, TOGETHER // BINS))[:, None]
        counts_ptrs = counts_ptr + row * BINS + tl.arange(0, BINS)[None, :]
        counts = tl.load(counts_ptrs, mask=row < chunks, other=0)
        every += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(row < chunk, counts, 0), axis=0)
    return every, before


@triton.jit
def expert_order(
    ids_ptr, counts_ptr, order_ptr, begins_ptr, pairs,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the places of some pairs.  Grid: ``(ceil(pairs / CHUNK),)``.

    Parameters
    ----------
    ids_ptr : [pairs]
        Expert of each pair, of any integers.
    counts_ptr : int32 [chunks, bins_of(EXPERTS)], or None
        What `expert_counts` has found; without it, there are up to `BLOCK` pairs.
    order_ptr : int32 [pairs]
        Gets the pairs, those of the first expert first.
    begins_ptr : int32 [EXPERTS + 1]
        Gets the place in `order_ptr` of the first pair of each expert, and behind them `pairs`.
    pairs : int32
    CHUNK, BLOCK : int
    PDL : bool
        Whether it is launched while the kernel in front may still run.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    if counts_ptr is None:
        every, before = count_pairs(ids_ptr, pairs, first, EXPERTS, BLOCK)
    else:
        every, before = add_counts(counts_ptr, tl.num_programs(0), chunk, EXPERTS)
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
