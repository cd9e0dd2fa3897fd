"""What kernels, and collectives between GPUs, add to the time of a whole model.

A price is that of a kernel by itself, with its launch, after a pause.  In a CUDA graph launches
overlap what runs, kernels ask for their weights while others end, and tensor cores that multiply
for long reach the limit of power whichever kernels they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..hardware import DeviceSpec
from .baseline import start_s
from .gpu_cost import LEAST_S
from .prediction import DRAM_EFFICIENCY, Prediction

EARLY_S = 0.9e-6
"""Behind another kernel in a CUDA graph, one adds so much less than its price without the launch:
it begins while that one ends.  Fitted to whole models on an H200 (`2026-11-30-judge_models.md`);
assumed elsewhere."""

ALL_REDUCES = (
    *((8 << 10, 2.5e-6), (64 << 10, 2.8e-6), (256 << 10, 3.9e-6), (512 << 10, 7.0e-6)),
    *((1 << 20, 10.4e-6), (2 << 20, 13.7e-6), (8 << 20, 34.3e-6), (32 << 20, 109.7e-6)),
)
"""Bytes of a worker, and seconds of an all-reduce of ours, in float16 between two H200s, among
others in a CUDA graph (`2026-11-29-parallel.log`)."""


@dataclass(frozen=True)
class Part:
    """A kernel of a model."""

    prediction: Prediction  # by itself
    count: int  # how often one call runs it
    rate: float  # operations a second of the units that multiply in it

    @property
    def multiplied_s(self) -> float:
        """Seconds that these units multiply in all calls, at their full rate."""
        return self.count * self.prediction.flops / self.rate


def added_s(parts: Sequence[Part], dev: DeviceSpec) -> list[float]:
    """Return what each of a model's kernels adds to a call of it, all its runs together.

    On a CPU, where a kernel begins when the one in front has ended, that is its price.
    """
    if dev.kind == "cpu":
        return [part.count * part.prediction.seconds for part in parts]
    busy_s = sum(part.multiplied_s for part in parts)
    found = []
    for part in parts:
        own_s = max(part.prediction.seconds - dev.launch_s, 0.0)
        slower = max(_slowed(busy_s, dev) - _slowed(own_s, dev), 0.0)
        found.append(part.count * max(own_s - EARLY_S, 0.0) + slower * part.multiplied_s)
    return found


def _slowed(seconds: float, dev: DeviceSpec) -> float:
    """Return the part by which a kernel takes longer when tensor cores are so long at work."""
    return dev.slowed_part * seconds / (seconds + dev.slowed_s)


def other_s(moved: float, compute_s: float, dev: DeviceSpec) -> float:
    """Return what another kernel adds at least, by the bytes that it moves."""
    memory_s = moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    least = LEAST_S if dev.kind == "gpu" else 0.0
    return start_s(dev) + max(memory_s, compute_s, least)


def all_reduce(moved: float, dev: DeviceSpec) -> Prediction | None:
    """Predict an all-reduce of so many bytes between GPUs that are linked as `ALL_REDUCES`' were.

    Between these sizes, and beyond the last, it is linear in the bytes; an all-gather is taken for
    one of what it receives.  None for CPUs, between which none was timed.
    """
    if dev.kind != "gpu":
        return None
    first, *_ = ALL_REDUCES
    seconds = first[1]
    for (less, least), (more, most) in pairwise(ALL_REDUCES):
        if moved > less:
            seconds = least + (moved - less) * (most - least) / (more - less)
    return Prediction(seconds, moved, 0.0, 1, "latency" if moved < ALL_REDUCES[2][0] else "dram")
