"""Price of one launch on a GPU, the same for every kernel.

A launch is a number of equal thread blocks, each of so many steps.  Steps take as long as the
longest of three: what a multiprocessor computes for its blocks, what they get from L2, and the wait
of one block for what it asked for some steps before, which blocks side by side share.  Memory and
L2 bound all multiprocessors together.  What comes before the first step and after the last one is
added.

What a device has is in its `DeviceSpec`; what a kernel reaches of it is in its `Rates`, which
`python -m benchmarks.judge.rates` fits to all recorded times.

The model is written once: its numbers are those of one plan at one size, or arrays of the shape
``(sizes, plans)``.  Either way each price has the same bits, so that equal prices stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..hardware import DeviceSpec
from .prediction import Bound, Footprint, Prediction, Step, ceil_div, largest

T = TypeVar("T", bound=tuple[Any, ...])

MEMORY_LATENCY_S = 0.5e-6
"""A load from DRAM and the barrier behind it take 0.5e-6 seconds.  A chain of dependent loads on an
idle H200 takes 0.15e-6 each from L2 and 0.33e-6 where half of them miss it (measured); the rest,
for a device under load, is assumed."""

LEAST_S = 2 * MEMORY_LATENCY_S
"""A load and a store that depends on it take 1.0e-6 seconds, however small a kernel is."""

SFU_PER_CLOCK = 16
"""A multiprocessor computes 16 exponentials a clock (CUDA guide, native instructions)."""

SOFTMAX_FLOPS_PER_SCORE = 8
"""A score takes 8 operations: scale, mask, maximum, subtract, sum, convert, rescale.  Counted; with
`SFU_PER_CLOCK` it gives 81 us for BERT-base at batch 32 on an H200, where Triton's FlexAttention
measured 85 us."""

L2_SHARE = 0.5
"""Data to be read again can count on half of L2.  Assumed: the rest is streamed through."""

ISSUE_PER_CLOCK = 4
"""A multiprocessor starts 4 warp instructions a clock (CUDA guide: four schedulers)."""

STEP_POWER, MEMORY_POWER, WHOLE_POWER = 8, 2, 4
"""Powers by which times add up that overlap (`overlapping`): within a step; memory with L2; these
with the steps."""


class Rates(NamedTuple):
    """What a kernel reaches of a device, and what it takes beside: numbers, or arrays."""

    tensor: Any = 1.0
    """Part of the rate of tensor cores at `DeviceSpec.clock_hz`."""
    feed: Any = inf
    """Bytes that a multiprocessor gets from L2 in a clock."""
    latency_s: Any = 0.0
    """Seconds from asking for the operands of a step to having them."""
    issue: Any = 1.0
    """Clocks of a warp for each instruction that waits for others of its own."""
    start_s: Any = 0.0
    """Seconds from the start of a kernel to its first step, and from its last to its end."""
    wave_s: Any = 0.0
    """Seconds that further waves of thread blocks take, at most, to begin and to end."""
    out_s: Any = 0.0
    """Seconds that a multiprocessor takes for a sum of two bytes on its way out."""
    meet_s: Any = 0.0
    """Seconds that two thread blocks of a cluster take to begin, to meet and to end together."""
    block_s: Any = 0.0
    """Seconds between the starts of two thread blocks, wherever they run."""


class Launch(NamedTuple):
    """The thread blocks of a launch: numbers, or arrays of the shape ``(sizes, plans)``."""

    blocks: Any
    residents: Any
    multiprocessors: Any
    """Thread blocks, how many a multiprocessor holds at once, and multiprocessors that have any."""
    steps: Any
    ahead: Any = 1
    """Steps of a block, and how many of them are on their way."""
    tensor_s: Any = 0.0
    """Seconds that a multiprocessor's tensor cores multiply in a step, at their full rate."""
    clocks: Any = 0.0
    """Clocks of a step that a multiprocessor is busy otherwise, at the same time."""
    instructions: Any = 0.0
    """Instructions of a step that a warp waits for, one after the other."""
    fed_bytes: Any = 0.0
    """Bytes that a block gets in a step."""
    dram_bytes: Any = 0.0
    l2_bytes: Any = 0.0
    """Bytes that all blocks get from memory, and weights that they ask of L2."""
    sums: Any = 0.0
    """Sums of a block, on their way out."""
    store_s: Any = 0.0
    """Seconds that a block takes at its end, beside its sums."""
    hides: Any = False
    """Whether a block stores while the next one multiplies."""
    meetings: Any = 0.0
    """How often the number of blocks of a cluster doubles."""
    begins: Any = True
    """Whether blocks of further waves begin anew, and do not go on from tile to tile."""


class Times(NamedTuple):
    """How long launches take, beside starting, and what of it is what: numbers or arrays."""

    seconds: Any
    waves: Any
    dram: Any
    l2: Any
    compute: Any
    latency: Any


def overlapping(power: int, *times: Any) -> Any:
    """Return what times that overlap add up to: the root of the sum of their powers.

    The higher the power, the more the longest hides.  By squares and square roots, which are the
    same for a number and for an element of an array.

    `power`: a power of two.
    `*times` (float or array): in seconds.
    """
    doublings = range(power.bit_length() - 1)
    raised = list(times)
    for _ in doublings:
        raised = [time * time for time in raised]
    total = sum(raised)
    for _ in doublings:
        total = np.sqrt(total)
    return total


def stacked(each: Sequence[T]) -> T:
    """Return a tuple of arrays, one for each field, with an element for each of some tuples."""
    return type(each[0])(*map(np.array, zip(*each, strict=True)))


def summed(each: Sequence[T]) -> T:
    """Return a tuple of sums, one for each field of some tuples."""
    fields: list[Any] = [sum(values) for values in zip(*each, strict=True)]
    return type(each[0])(*fields)


def column(sizes: Sequence[int]) -> Any:
    """Return an array of sizes, of shape ``(sizes, 1)``."""
    return np.array(sizes)[:, None]


def price(launch: Launch, rates: Rates, dev: DeviceSpec) -> Times:
    """Return what a launch takes behind its start."""
    slots = launch.multiprocessors * launch.residents
    full, rest = launch.blocks // slots, launch.blocks % slots
    waves = ceil_div(launch.blocks, slots)
    busiest = full * launch.residents + ceil_div(rest, launch.multiprocessors)

    compute = np.maximum(launch.tensor_s / rates.tensor, launch.clocks / dev.clock_hz)
    compute = busiest * launch.steps * compute
    feed = busiest * launch.steps * launch.fed_bytes / (rates.feed * dev.clock_hz)
    wait = rates.latency_s / launch.ahead + launch.instructions * rates.issue / dev.clock_hz
    wait = waves * launch.steps * wait
    inside = overlapping(STEP_POWER, compute, feed, wait)
    multiplied = launch.blocks * launch.steps * launch.tensor_s / dev.sm_count
    slowed = dev.slowed_part * inside / (inside + dev.slowed_s)
    inside = inside + slowed * np.minimum(inside, multiplied)

    dram = launch.dram_bytes / (dev.read_part * dev.dram_bytes_per_s)
    l2 = launch.l2_bytes / (dev.l2_part * dev.l2_bytes_per_s)
    memory = overlapping(MEMORY_POWER, dram, l2)
    seconds = overlapping(WHOLE_POWER, inside, memory, launch.blocks * rates.block_s)
    stored = launch.sums * rates.out_s + launch.store_s
    seconds = seconds + np.where(launch.hides, 1, busiest) * stored
    seconds = seconds + launch.begins * (1 - 1 / waves) * rates.wave_s
    seconds = seconds + launch.meetings * rates.meet_s
    return Times(seconds, waves, dram, np.maximum(l2, feed), compute, wait)


def price_step(step: Step, dev: DeviceSpec) -> Prediction:
    """Return what a launch costs of which a family knows the seconds of a block."""
    resident = resident_blocks(step.foot, dev)
    launch = Launch(
        step.blocks,
        resident,
        dev.sm_count,
        steps=1,
        clocks=step.block_s * dev.clock_hz,
        instructions=step.chain_s * dev.clock_hz,
        dram_bytes=step.dram_bytes,
        l2_bytes=step.l2_bytes,
    )
    found = price(launch, Rates(), dev)
    seconds = max(float(found.seconds), step.longest_block_s)
    return predicted(
        found._replace(seconds=dev.launch_s + step.start_s + seconds),
        dev.launch_s + step.start_s,
        step.dram_bytes,
        step.flops,
    )


def predicted(found: Times, start_s: float, dram_bytes: float, flops: float) -> Prediction:
    """Return the prediction of launches that take `start_s` seconds to start."""
    terms: dict[Bound, float] = {
        "launch": start_s,
        "dram": found.dram,
        "l2": found.l2,
        "compute": found.compute,
        "latency": found.latency,
    }
    return Prediction(float(found.seconds), dram_bytes, flops, int(found.waves), largest(terms))


def resident_blocks(foot: Footprint, dev: DeviceSpec, reserved_bytes: int = 0) -> int:
    """Return how many blocks a multiprocessor holds at once (at least 1).

    `reserved_bytes`: shared memory of each block beside what it asks for.
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
