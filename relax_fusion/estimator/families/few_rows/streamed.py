"""One row and weights of four bits, streamed: what a thread block holds, and what it takes.

Thread blocks stay on the device and take one tile of 16 columns after the other
(`relax_fusion.dlight_rules.tensor_cores.streamed_row`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....hardware import DeviceSpec
from ....workload import Packed
from ...gpu_cost import ISSUE_PER_CLOCK, Rates
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import HALF_DTYPES, Footprint, ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from ..matmuls import Tile
from .tiles import MMA_COLUMNS, SUM_BYTES

GROUP = 32
"""So many elements share a scale: those of 16 bytes of words."""

CHUNK = 512
"""A warp takes 512 elements of k at a time: of each of 16 columns, 256 bytes of words and 32 of
scales."""

DEPTHS = 256
"""k is a multiple of 256: 16 bytes of scales."""

LINE_BYTES, SCALE_BYTES = CHUNK // 2, CHUNK // GROUP * 2
"""Bytes of a column's words in a chunk, and of its scales."""

STAGE_BYTES = MMA_COLUMNS * (LINE_BYTES + SCALE_BYTES)
"""Bytes of a chunk."""

FLUSH = 8
"""Warps keep the sums of 8 tiles, before a block adds them up."""

SHAPES = ((4, 4), (7, 2), (8, 2), (8, 1))
"""Warps of a block, and blocks of a multiprocessor."""

STAGES = (2, 8)
"""So many chunks of a warp are on their way, at least and at most."""

REGISTERS = 106
"""A thread has 98 to 106 registers on an H200."""

RATES = Rates(feed=41.9, latency_s=0.53e-6, start_s=2.64e-6, out_s=19e-12)
"""What the kernel reaches."""

UNPACKING = 1.5
"""A multiprocessor's quarter takes 1.5 clocks for the weights of a warp: 165 instructions for 4096
weights, and 52 to ask for 8192."""

LATE_S = {4: 0.6e-6, 2: 1.2e-6, 1: 1.5e-6}
"""Behind another kernel, blocks take so many seconds longer: fewer of a multiprocessor are larger
(`2026-11-29-packed_row.log`).  0.6e-6 of them are what all took longer beside dot products
(`2026-11-30-packed_gemv.log`)."""

REOPENED = {4: 0.04, 2: 0.02, 1: 0.0}
"""More blocks, which read more columns at once, take this part longer to read weights: 73.9 instead
of 70.3 us for 296 MB."""


@dataclass(frozen=True)
class Streamed:
    """Where a thread block's shared memory has what: a row, its groups, sums, and the ring."""

    k: int
    warps: int
    stages: int

    @property
    def units(self) -> int:
        """Chunks of a warp."""
        return ceil_div(self.k, CHUNK * self.warps)

    @property
    def row(self) -> int:
        """Bytes of the row, with zeros to the end of the last chunks."""
        return 2 * self.units * self.warps * CHUNK

    @property
    def sums(self) -> int:
        """Where sums of warps begin: behind the row, and a number for each of its groups."""
        return self.row + self.row // 2 // GROUP * SUM_BYTES

    @property
    def ring(self) -> int:
        """Where chunks begin."""
        return self.sums + FLUSH * self.warps * MMA_COLUMNS * SUM_BYTES

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.ring + self.warps * self.stages * STAGE_BYTES


def refuses(form: Packed, k: int, dtype: str) -> str | None:
    """Return why weights are not streamed; None if they are."""
    if dtype not in HALF_DTYPES or form != Packed(4, GROUP, form.zero, scale_dtype=dtype):
        return f"no groups of {GROUP} fields of 4 bits in order, with a scale of {dtype} for each"
    return f"k is {k}, no multiple of {DEPTHS}" if k % DEPTHS else None


def stages(k: int, warps: int, residents: int, dev: DeviceSpec) -> int:
    """Return how many chunks of each warp fit, where a multiprocessor has so many blocks."""
    room = min(dev.smem_per_sm_bytes // residents - SYSTEM_SMEM_BYTES, dev.smem_per_block_bytes)
    return min((room - Streamed(k, warps, 0).size) // (warps * STAGE_BYTES), STAGES[1])


def shapes(k: int, dev: DeviceSpec) -> Iterator[tuple[int, int, int]]:
    """Yield warps, blocks of a multiprocessor and stages that fit."""
    for warps, residents in SHAPES:
        ahead = stages(k, warps, residents, dev)
        if ahead >= STAGES[0] and (warps != 7 or k % (CHUNK * 7) == 0):
            yield warps, residents, ahead


def footprint(plan: TilePlan, k: int, threads: int) -> Footprint:
    """Return what a block occupies."""
    return Footprint(Streamed(k, plan.num_warps, plan.num_stages).size, REGISTERS, threads)


def tile(plan: TilePlan, residents: int, shape: MatmulShape, dev: DeviceSpec) -> Tile:
    """Return what a plan asks for."""
    clocks = MMA_COLUMNS * plan.block_k * UNPACKING / dev.warp_size / ISSUE_PER_CLOCK
    return Tile(
        rows=1,
        columns=plan.block_n,
        blocks=1,
        residents=residents,
        multiprocessors=dev.sm_count,
        depth=plan.block_k,
        ahead=plan.num_stages,
        clocks=clocks,
        weight_bytes=MMA_COLUMNS * plan.block_k * shape.stored_bytes,
        sums=MMA_COLUMNS,
        begins=False,
        reopened=REOPENED[residents],
        late_s=LATE_S[residents],
    )
