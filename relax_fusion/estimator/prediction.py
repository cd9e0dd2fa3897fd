"""The result of a prediction, and the constants that more than one cost model uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..hardware import DeviceSpec

Bound = Literal["dram", "l2", "compute", "latency", "launch"]

DRAM_EFFICIENCY = 0.9
"""Reached part of the peak bandwidth.  Measured on an H200: 4.3 of 4.8 TB/s."""

HALF_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Prediction:
    """What one execution should cost.

    Parameters
    ----------
    seconds : float
        From launch to end.
    dram_bytes : float
        Moved to and from memory.
    flops : float
        Useful operations of the matmuls, without padding.
    waves : int
        Times that the device is filled with tasks.
    bound : {"dram", "l2", "compute", "latency", "launch"}
        The largest term.
    """

    seconds: float
    dram_bytes: float
    flops: float
    waves: int
    bound: Bound


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
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
