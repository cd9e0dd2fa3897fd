"""What a plan costs: predictions, what they are made of, and constants of several cost models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..hardware import DeviceSpec
from .shape import Size

Bound = Literal["dram", "l2", "compute", "latency", "launch"]

DRAM_EFFICIENCY = 0.9
"""Reached part of the peak bandwidth.  Measured on an H200: 4.3 of 4.8 TB/s."""

HALF_DTYPES = ("float16", "bfloat16")

Seconds = NDArray[np.float64]
"""Seconds of plans at sizes, of shape ``(sizes, plans)``."""

Wanted = NDArray[np.bool_]
"""Which of `Seconds` are asked for, of the same shape."""


@dataclass(frozen=True)
class Prediction:
    """What one execution should cost."""

    seconds: float  # from launch to end
    dram_bytes: float  # moved to and from memory
    flops: float  # useful operations of the matmuls, without padding
    waves: int  # times that the device is filled with tasks
    bound: Bound  # the largest term


@dataclass(frozen=True)
class Footprint:
    """What one task occupies."""

    smem_bytes: int
    """Shared memory of a GPU thread block."""
    registers_per_thread: int
    """32-bit registers of a GPU thread, vector registers of a CPU tile."""
    threads: int
    """Threads of a GPU thread block; 1 on a CPU."""
    stack_bytes: int = 0
    """The accumulator buffer of a CPU tile, as it is before registers are allocated."""
    scratch_bytes: int = 0
    """What a CPU task goes over again and again, so should lie in its core's L2 cache."""


@dataclass(frozen=True)
class Step:
    """A launch as its blocks: what one computes and waits for, and what all of them move."""

    blocks: int  # thread blocks of a GPU, parallel tasks of a CPU
    foot: Footprint  # what one of them occupies
    block_s: float  # seconds that one computes, on average
    dram_bytes: float  # moved to and from memory
    l2_bytes: float = 0.0  # moved to and from L2
    flops: float = 0.0  # useful operations of the matmuls, without padding
    longest_block_s: float = 0.0  # seconds that the longest block computes, where they differ
    chain_s: float = 0.0  # seconds that a block waits for loads that depend on each other
    start_s: float = 0.0  # seconds from the launch to the first of them


class Price(ABC):
    """What a plan costs, whatever the size."""

    foot: Footprint
    """What one task occupies."""
    early_s: float = 0.0
    """Seconds of its work that are done before the kernel in front of it ends, beside launching."""

    @abstractmethod
    def at(self, size: Size) -> Prediction:
        """Return what the plan costs at `size`; only meaningful without violations."""

    @staticmethod
    def seconds(prices: Sequence[Any], sizes: Sequence[Size], wanted: Wanted) -> Seconds:
        """Return the seconds of plans of one family at sizes, where they are wanted.

        A model whose formulas take arrays computes all of them together.
        """
        found = np.full(wanted.shape, inf)
        for row, plan in zip(*map(np.ndarray.tolist, np.nonzero(wanted)), strict=True):
            found[row, plan] = prices[plan].at(sizes[row]).seconds
        return found


@dataclass(frozen=True)
class Formula(Price):
    """The price of a plan by a function of the size; other fields are as in `Price`."""

    foot: Footprint
    of: Callable[[Size], Prediction]
    early_s: float = 0.0

    def at(self, size: Size) -> Prediction:
        """Return what the function does."""
        return self.of(size)


def largest(terms: dict[Bound, float]) -> Bound:
    """Return the name of the largest of `terms`; the first where they tie."""
    return max(terms, key=terms.__getitem__)


def repeated(each: Prediction, count: int, dev: DeviceSpec) -> Prediction:
    """Return what one launch costs that does so many times the same."""
    seconds = dev.launch_s + count * (each.seconds - dev.launch_s)
    return Prediction(
        *(seconds, count * each.dram_bytes, count * each.flops, count * each.waves, each.bound)
    )


def in_a_row(parts: Sequence[Prediction]) -> Prediction:
    """Return what kernels cost of which none overlaps another."""
    return Prediction(
        sum(p.seconds for p in parts),
        sum(p.dram_bytes for p in parts),
        sum(p.flops for p in parts),
        sum(p.waves for p in parts),
        max(parts, key=lambda p: p.seconds).bound,
    )


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up; of arrays, for each element."""
    return -(-a // b)


def power_dividing(value: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `value`."""
    return min(value & -value, 1 << (most.bit_length() - 1))


def powers(first: int, last: int) -> Iterator[int]:
    """Yield `first`, twice that, and so on up to `last`."""
    while first <= last:
        yield first
        first *= 2


def next_power(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def format_seconds(seconds: float) -> str:
    """Return `seconds` with three digits and the unit that suits them: ``"54.6 us"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:  # what rounds to 1000 of a unit is 1 of the next
            digits = ".3g" if seconds < 999.5 else ".0f"
            return f"{seconds / scale:{digits}} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
