"""What the common launch model needs of a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """What one task occupies.

    Parameters
    ----------
    smem_bytes : int
        Shared memory of a GPU thread block.
    registers_per_thread : int
        32-bit registers of a GPU thread, vector registers of a CPU tile.
    threads : int
        Threads of a GPU thread block; 1 on a CPU.
    stack_bytes : int
        The accumulator buffer of a CPU tile, as it is before registers are allocated.
    scratch_bytes : int
        What a CPU task goes over again and again, so should lie in its core's L2 cache.
    """

    smem_bytes: int
    registers_per_thread: int
    threads: int
    stack_bytes: int = 0
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """A launch as its blocks: what one computes and waits for, and what all of them move.

    Parameters
    ----------
    blocks : int
        Thread blocks of a GPU, parallel tasks of a CPU.
    foot : Footprint
        What one of them occupies.
    block_s : float
        Seconds that one computes, on average.
    dram_bytes : float
        Moved to and from memory.
    l2_bytes : float
        Moved to and from L2.
    flops : float
        Useful operations of the matmuls, without padding.
    longest_block_s : float
        Seconds that the longest block computes, where they differ.
    chain_s : float
        Seconds that a block waits for loads that depend on each other.
    start_s : float
        Seconds from the launch to the first of them.
    """

    blocks: int
    foot: Footprint
    block_s: float
    dram_bytes: float
    l2_bytes: float = 0.0
    flops: float = 0.0
    longest_block_s: float = 0.0
    chain_s: float = 0.0
    start_s: float = 0.0
