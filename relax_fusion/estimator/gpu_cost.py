"""Price of one launch on a GPU.

A kernel is a number of equal blocks.  Its time is the launch, and then the larger of

- the roofline: memory (DRAM or L2, the slower) against arithmetic on the busiest multiprocessor.
  They overlap as well as the load pipeline and the other blocks of the multiprocessor allow;
- the chain of dependent loads that a single block waits for, once per wave, and what the blocks of
  further waves take to begin.
"""

from __future__ import annotations

from ..hardware import DeviceSpec
from .limits import VECTOR_LOAD_BYTES
from .prediction import Bound, Prediction, ceil_div, largest
from .steps import Footprint, Step

L2_EFFICIENCY = 0.85
"""Reached part of the L2 peak.  Measured on an H200: 8.1 to 9.5 of the derived 10.1 TB/s, reading
16 and 32 MB again and again."""

SIMT_EFFICIENCY = 0.55
"""Reached part of what issue slots, FMA pipes and shared memory allow together.  With
`LATENCY_WARPS` fitted to ten plans measured on an H200 (16 to 1024 rows, float16), whose times the
model gives to within a factor of 1.2 (root mean square).  Loads are not wide, nor done ahead."""

ISSUE_PER_CLOCK = 4
"""Warp instructions that a multiprocessor starts each clock (CUDA guide: four schedulers)."""

MEMORY_LATENCY_S = 0.5e-6
"""One load from DRAM and the barrier behind it.  A chain of dependent loads on an idle H200 takes
0.15e-6 each from L2 and 0.33e-6 where half of them miss it (measured); the rest, for a device
under load, is assumed."""

IN_FLIGHT_BYTES_PER_THREAD = 4 * VECTOR_LOAD_BYTES
"""What a thread loads before it waits.  Assumed: four vector loads, held in registers."""

LATENCY_WARPS = 32
"""Independent warp instructions that hide latency.  Arithmetic alone needs 16 (4 schedulers * 4
cycles); 32, which covers loads from shared memory too, fits the plans of `SIMT_EFFICIENCY`."""

SMEM_WORDS_PER_CLOCK = 32
"""Four-byte words that shared memory delivers per clock and SM (CUDA guide: 32 banks)."""

SFU_PER_CLOCK = 16
"""Exponentials per clock and SM (CUDA guide, throughput of native arithmetic instructions)."""

SOFTMAX_FLOPS_PER_SCORE = 8
"""Scale, mask, maximum, subtract, sum, convert, rescale.  Counted; with `SFU_PER_CLOCK` it gives
81 us for BERT-base at batch 32 on an H200, where Triton's FlexAttention measured 85 us."""

L2_SHARE = 0.5
"""Part of L2 that data to be read again can count on.  Assumed: the rest is streamed through."""


def resident_blocks(foot: Footprint, dev: DeviceSpec, reserved_bytes: int = 0) -> int:
    """Return how many blocks a multiprocessor holds at once (at least 1).

    Parameters
    ----------
    reserved_bytes : int
        Shared memory of each block beside what it asks for.
    """
    registers = foot.registers_per_thread * foot.threads
    return max(
        1,
        min(
            dev.max_blocks_per_sm,
            dev.smem_per_sm_bytes // max(foot.smem_bytes + reserved_bytes, 1),
            dev.max_threads_per_sm // foot.threads,
            dev.registers_per_sm // registers,
        ),
    )


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
    warps = _active_blocks(blocks, foot, dev) * foot.threads / dev.warp_size
    return min(1.0, warps * min(tile, 4) / LATENCY_WARPS)


def _active_blocks(blocks: int, foot: Footprint, dev: DeviceSpec) -> int:
    return min(resident_blocks(foot, dev), ceil_div(blocks, dev.sm_count))


def price_step(step: Step, dev: DeviceSpec) -> Prediction:
    """Return what a launch costs."""
    per_sm = ceil_div(step.blocks, dev.sm_count)
    resident = resident_blocks(step.foot, dev)
    waves = ceil_div(step.blocks, dev.sm_count * resident)
    terms: dict[Bound, float] = {
        "dram": step.dram_bytes / (dev.dram_bytes_per_s * step.dram_efficiency),
        "l2": step.l2_bytes / (dev.l2_bytes_per_s * L2_EFFICIENCY),
        "compute": max(per_sm * step.block_s, step.longest_block_s),
        "latency": waves * step.chain_s + (waves - 1) * step.wave_s,
        "launch": dev.launch_s,
    }
    memory, compute = max(terms["dram"], terms["l2"]), terms["compute"]
    exposed = min(memory, compute) / (step.num_stages * resident)
    seconds = dev.launch_s + max(terms["latency"], max(memory, compute) + exposed) + step.start_s
    return Prediction(seconds, step.dram_bytes, step.flops, waves, largest(terms))
