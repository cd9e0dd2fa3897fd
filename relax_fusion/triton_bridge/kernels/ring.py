"""A ring of tiles in shared memory, filled by one warp and drained by others, for Hopper.

Kernels on top of this are written in Gluon, Triton's lower level: Triton's own pipelines wait for
all operands of a tile together.  Here a warp of its own asks the copy engine (TMA) for tiles, so
the next are under way while matrix units multiply.

Slot i of the ring has two barriers: ``full`` opens when its tiles have arrived, ``empty`` when
every consumer has read them.  A barrier flips a bit each time it opens, so a waiter needs to know
only the parity of its turn (PTX ISA, "mbarrier").
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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
