"""A ring of tiles in shared memory, filled by one warp and drained by others, for Hopper.

Kernels on top of this are written in Gluon, Triton's lower level: Triton's own pipelines wait for
all operands of a tile together.  Here a warp of its own asks the copy engine (TMA) for tiles, so
weights are under way before the kernel in front has written the rows that they multiply, and the
matrix units go on while results are stored.

Slot i of the ring has two barriers: ``full`` opens when its tiles have arrived, ``empty`` when
every consumer has read them.  A barrier flips a bit each time it opens, so a waiter needs to know
only the parity of its turn (PTX ISA, "mbarrier").
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .tiles import first_of_pair

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Asks for a tile; it was renamed in Triton 3.9."""


class Ring(NamedTuple):
    """Slots ``[slot, ...]`` in shared memory, and their barriers."""

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return a ring of tiles ``[1, 1, rows, columns]`` that `CONSUMERS` warp groups read."""
    shape: gl.constexpr = [STAGES, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full, empty = make_barriers(STAGES, CONSUMERS)
    return Ring(tiles, full, empty)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return the barriers ``(full, empty)`` of a ring whose slots `CONSUMERS` warp groups read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return full, empty


@gluon.jit
def wait_full(full, turn, STAGES: gl.constexpr):
    """Wait for the tiles of a turn, and return their slot."""
    mbarrier.wait(full.index(turn % STAGES), (turn // STAGES) & 1)
    return turn % STAGES


@gluon.jit
def wait_empty(empty, turn, STAGES: gl.constexpr):
    """Wait until the slot of a turn is free, as all are at first, and return it."""
    mbarrier.wait(empty.index(turn % STAGES), ((turn // STAGES) & 1) ^ 1)
    return turn % STAGES


@gluon.jit
def first_row(tile_m, M, BLOCK_M: gl.constexpr):
    """Return the first row of a tile of x, the last of which begins early enough to be full.

    Rows beyond the last are zeros that the copy engine writes slowly: with 4 of 64 rows in use, a
    tile took 1.7 times as long as a full one (`2026-11-21-judge_estimator.json`: down, 64x64x128,
    5 stages).  So it copies some rows a second time instead; their results are stored twice, and
    are the same.
    """
    return gl.minimum(tile_m * BLOCK_M, gl.maximum(M - BLOCK_M, 0))


@gluon.jit
def allocate_weight(desc, SLOTS: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """Return room for `SLOTS` weight tiles of `FEATURES` features, laid out as in memory."""
    if LAYOUT == "nk":
        shape: gl.constexpr = [SLOTS, FEATURES, desc.block_shape[1]]
    else:
        shape: gl.constexpr = [SLOTS, desc.block_shape[0], FEATURES]  # type: ignore[no-redef]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def copy_weight(
    desc,
    tile,
    barrier,
    feature,
    k_start,
    OFFSET: gl.constexpr,
    LAYOUT: gl.constexpr,
    FEATURES: gl.constexpr,
    HALF: gl.constexpr,
):
    """Ask for `FEATURES` features of a weight, `OFFSET` behind `feature`.

    With `HALF`, `feature` counts pairs, and their first features are meant.  They lie side by side
    in runs of `HALF`, so the boxes of a copy are no longer than that.  Where that is 1, columns are
    copied as they lie.
    """
    BOX: gl.constexpr = HALF if HALF > 1 and HALF < FEATURES else FEATURES
    for i in gl.static_range(FEATURES // BOX):
        start = feature + i * BOX
        if HALF > 1:
            start = first_of_pair(start, HALF)
        if LAYOUT == "nk":
            part = tile.slice(i * BOX, BOX, dim=0)
            copy_tile(desc, [start + OFFSET, k_start], barrier, part)
        else:
            part = tile.slice(i * BOX, BOX, dim=1)
            copy_tile(desc, [k_start, start + OFFSET], barrier, part)


@gluon.jit
def copy_weights(args, p, tile_n, F: gl.constexpr, C: gl.constexpr):
    """Ask for the tiles of both accumulators of a column tile, the second of `C.second` features.

    It holds the up projection (a weight of its own, or in the merged one), the second features of
    rotated pairs, or the columns to the right of the first.  `args` are both tiles, a barrier, and
    where they begin along k.
    """
    w_tile, up_tile, barrier, k_start = args
    PAIRED: gl.constexpr = F.gated or F.half > 1
    feature = tile_n * (C.block_n if PAIRED else C.block_n + C.second)
    # `half_start`, but as constants, which Triton 3.6 does not return from a function
    FIRST: gl.constexpr = F.n if F.merged == "up_first" else 0
    copy_weight(p.w, w_tile, barrier, feature, k_start, FIRST, F.layout, C.block_n, F.half)
    if F.gated:
        UP: gl.constexpr = F.n if F.merged == "gate_first" else 0
        copy_weight(p.up, up_tile, barrier, feature, k_start, UP, F.layout, C.second, F.half)
    elif F.half > 1:
        copy_weight(p.up, up_tile, barrier, feature, k_start, F.half, F.layout, C.second, F.half)
    elif C.second > 0:
        copy_weight(p.up, up_tile, barrier, feature, k_start, C.block_n, F.layout, C.second, F.half)
