"""What collectives between GPUs take."""

from __future__ import annotations

from itertools import pairwise

from ..hardware import DeviceSpec
from .prediction import Prediction

ALL_REDUCES = ((8 << 10, 12.7e-6), (128 << 10, 15.7e-6), (2 << 20, 30e-6), (32 << 20, 147e-6))
"""Bytes of a worker, and seconds of an all-reduce by NCCL, in float16 between two H200s: each is
launched by the host by itself."""


def all_reduce(moved: float, dev: DeviceSpec) -> Prediction | None:
    """Predict an all-reduce of so many bytes between GPUs that are linked as `ALL_REDUCES`' were.

    Between these sizes, and beyond the last, it is linear in the bytes; an all-gather takes no
    longer than one of what it receives.  None for CPUs, between which none was timed.
    """
    if dev.kind != "gpu":
        return None
    first, *_ = ALL_REDUCES
    seconds = first[1]
    for (less, least), (more, most) in pairwise(ALL_REDUCES):
        if moved > less:
            seconds = least + (moved - less) * (most - least) / (more - less)
    return Prediction(seconds, moved, 0.0, 1, "latency" if moved < ALL_REDUCES[2][0] else "dram")
