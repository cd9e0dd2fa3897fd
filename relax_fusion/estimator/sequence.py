"""What kernels add to the time of a whole model, in which they run one after the other.

A price is that of a kernel by itself, with its launch, after a pause.  In a CUDA graph launches
overlap what runs, kernels ask for their weights while others end, and tensor cores that multiply
for long reach the limit of power whichever kernels they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware import DeviceSpec
from .baseline import start_s
from .gpu_cost import LEAST_S
from .prediction import DRAM_EFFICIENCY, Prediction

EARLY_S = 0.9e-6
"""Behind another kernel in a CUDA graph, one adds so much less than its price without the launch:
it begins while that one ends.  Fitted to whole models on an H200 (`2026-11-29-judge_models.md`);
assumed elsewhere."""


@dataclass(frozen=True)
class Part:
    """A kernel of a model.

    Parameters
    ----------
    prediction : Prediction
        By itself.
    count : int
        How often one call runs it.
    rate : float
        Operations a second of the units that multiply in it.
    """

    prediction: Prediction
    count: int
    rate: float

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
