"""Seconds of a group of operators as one kernel, to compare with those of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware import DeviceSpec

FMA_FLOPS = 2.0


@dataclass(frozen=True)
class Work:
    """What a kernel does."""

    moved: float  # bytes that it reads and writes
    slots: float  # cycles of a lane that it computes
    parallel: float  # elements that may be computed at the same time


def seconds(work: Work, dev: DeviceSpec) -> float:
    """Return what a kernel takes that waits for its memory while it computes."""
    lanes_per_s = dev.fma_float32_flops_per_s / FMA_FLOPS
    busy = min(1.0, max(work.parallel, 1.0) / dev.sm_count)  # an empty tensor is not slow
    return dev.launch_s + max(work.moved / dev.dram_bytes_per_s, work.slots / lanes_per_s) / busy
