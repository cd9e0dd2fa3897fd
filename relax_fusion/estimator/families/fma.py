"""How fast a multiprocessor multiplies without tensor cores."""

from __future__ import annotations

from ...hardware import DeviceSpec
from ..gpu_cost import ISSUE_PER_CLOCK, resident_blocks
from ..limits import VECTOR_LOAD_BYTES
from ..prediction import ceil_div
from ..steps import Footprint

SIMT_EFFICIENCY = 0.55
"""Kernels reach this part of what issue slots, FMA pipes and shared memory allow together.  With
`LATENCY_WARPS` fitted to ten plans measured on an H200 (16 to 1024 rows, float16), whose times the
model gives to within a factor of 1.2 (root mean square).  Loads are not wide, nor done ahead."""

IN_FLIGHT_BYTES_PER_THREAD = 4 * VECTOR_LOAD_BYTES
"""A thread loads so many bytes before it waits.  Assumed: four vector loads, held in registers."""

LATENCY_WARPS = 32
"""So many independent warp instructions hide latency.  Arithmetic alone needs 16 (4 schedulers * 4
cycles); 32, which covers loads from shared memory too, fits the plans of `SIMT_EFFICIENCY`."""

SMEM_WORDS_PER_CLOCK = 32
"""Shared memory delivers 32 words of four bytes per clock and SM (CUDA guide: 32 banks)."""


def load_rounds(foot: Footprint, tile_bytes: int) -> int:
    """Return the dependent rounds of loads that bring a tile."""
    return ceil_div(tile_bytes, foot.threads * IN_FLIGHT_BYTES_PER_THREAD)


def simt_clocks(tiles: int, tile: int, words: int, filled: int, dev: DeviceSpec) -> float:
    """Return the clocks in which a block takes its register tiles one reduction step further.

    Each of `tiles` does `tile` FMAs on `words` operands that its thread loads from shared memory,
    where the block put `filled` words for the step.
    """
    warps = tiles / dev.warp_size
    pipes = dev.fma_float32_flops_per_s / (dev.sm_count * dev.clock_hz * 2)
    smem = (tiles * words + filled) / SMEM_WORDS_PER_CLOCK
    clocks = max(tiles * tile / pipes, warps * (tile + words) / ISSUE_PER_CLOCK, smem)
    return clocks / SIMT_EFFICIENCY


def latency_hidden(tile: int, foot: Footprint, dev: DeviceSpec, blocks: int) -> float:
    """Return the part of the rate that the independent FMAs of the resident warps sustain."""
    active = min(resident_blocks(foot, dev), ceil_div(blocks, dev.sm_count))
    return min(1.0, active * foot.threads / dev.warp_size * min(tile, 4) / LATENCY_WARPS)
