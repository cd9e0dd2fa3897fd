"""What benchmarks against peers are to reach, and by how much they do."""

from __future__ import annotations

from dataclasses import dataclass

PEAK_TFLOPS = 790.0
"""What float16 and bfloat16 matmuls reach on an H200 at its power limit: the roof of compute."""


@dataclass(frozen=True)
class Target:
    """What a ratio of times must reach.

    Parameters
    ----------
    against : str
        A contender; the ratio is its time over ours.  ``"copy"``: the part of copy bandwidth.
    least : float
        The ratio to be reached.
    subject : str
        The contender of ours whose time that is.
    """

    against: str
    least: float
    subject: str = "ours"


def verdict(least: float, measured: float) -> str:
    """Say whether a target was reached, or by what part it was missed."""
    if measured >= least:
        return "reached"
    return f"missed by {100 * (1 - measured / least):.1f} %"


def floor_us(moved: float, flops: float, tb_s: float, tflops: float = PEAK_TFLOPS) -> float:
    """Return the least time in us at the measured bandwidth (TB/s), without launching."""
    return max(moved / tb_s / 1e6, flops / tflops / 1e6)
