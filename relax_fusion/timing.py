"""Timing by the host's clock: calls, contenders in turn, percentiles, and kernel by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import tvm

from .transforms.whole_graph import RUN_OR_CAPTURE

FLUSH_BYTES = 256 << 20
"""So many bytes are written or read in front of a sample on a GPU, so that weights come from memory
as in a model whose layers take turns: more than any second-level cache holds."""

PERCENTILES = (50, 90, 99)
"""Times are told by these percentiles."""

WARMUP = 5
"""`host_and_device` makes so many calls first, which it does not time."""

BUSY_BYTES = 128 << 20
"""So many bytes are copied in front of each kernel on a GPU: that keeps the device busy while the
host launches."""

HOW_CPU = "each kernel by the host's clock, between two calls of the virtual machine's instrument"
HOW_GPU = (
    f"each kernel behind a copy of {BUSY_BYTES >> 20} MiB that keeps the GPU busy while the host "
    "launches it; of the time until both are done the median time of a copy alone is subtracted, "
    "so that the launch is in neither times nor predictions"
)

_BUILTIN = "vm.builtin."
_EMPTY = 40
"""A copy alone is done this often; the second half of the times counts."""

Who = TypeVar("Who", bound=Hashable)
Found = TypeVar("Found")


@dataclass(frozen=True)
class Times:
    """Seconds of one thing that was done several times."""

    seconds: tuple[float, ...]  # in the order in which they were measured; at least one

    @property
    def median(self) -> float:
        """Half of them are not longer."""
        return self.percentile(50)

    def percentile(self, percent: float) -> float:
        """Return the time that so many percent of them do not exceed."""
        return float(np.percentile(self.seconds, percent))

    def to_record(self) -> dict[str, Any]:
        """Return what JSON holds of it."""
        return {
            "count": len(self.seconds),
            "min_s": min(self.seconds),
            **{f"p{percent}_s": self.percentile(percent) for percent in PERCENTILES},
            "seconds": list(self.seconds),
        }


def timed(call: Callable[[], Found]) -> tuple[Found, float]:
    """Return what a call returns, and how many seconds it took."""
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def host_and_device(
    call: Callable[[], Any], sync: Callable[[], Any], calls: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of a call until the host may go on, and until the device is done."""
    for _ in range(WARMUP):
        call()
    host, device = [], []
    for _ in range(repeats):
        sync()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        host.append((time.perf_counter() - began) / calls)
        sync()
        device.append((time.perf_counter() - began) / calls)
    return host, device


def in_turn(
    timers: Mapping[Who, Callable[[int], list[Found]]],
    rounds: int,
    again: Callable[[Who, Mapping[Who, list[Found]]], bool] = lambda *_: True,
    found: dict[Who, list[Found]] | None = None,
) -> dict[Who, list[Found]]:
    """Return the times of all contenders, who take turns.

    Whatever else runs on the machine slows down a stretch of time, which is then one round of many
    contenders and not every run of one.

    `timers`: times a contender, in a round of this number.
    `rounds`: how often each has its turn.
    `again`: tells whether a contender is timed once more, by the times so far.
    `found`: gets the times, turn by turn, so that those of an interrupted run are not lost.
    """
    found = {} if found is None else found
    found |= {who: [] for who in timers}
    for number in range(rounds):
        for who, timer in timers.items():
            if not found[who] or again(who, found):
                found[who] += timer(number)
    return found


class Instrumented(Protocol):
    """A virtual machine of Relax."""

    def set_instrument(self, instrument: Any) -> None:
        """Have a function called before and after each instruction."""


@dataclass(frozen=True)
class KernelTime:
    """A kernel in the calls of one function."""

    name: str
    """The PrimFunc, or `RUN_OR_CAPTURE`: the kernels of a CUDA graph, which are timed as one."""
    count: int
    """How often one call runs it."""
    times: Times
    """Of every run."""
    resolution: float = 0.0
    """Seconds below which a time is as good as none."""

    @property
    def seconds(self) -> float:
        """What one call spends in it, by the median of its runs."""
        return self.count * self.times.median


def how(device: tvm.runtime.Device) -> str:
    """Say how kernels on a device are timed."""
    return HOW_CPU if _is_cpu(device) else HOW_GPU


def kernel_times(
    machine: Instrumented, call: Callable[[], Any], device: tvm.runtime.Device, repeats: int
) -> list[KernelTime]:
    """Time the kernels of a call, one by one; what takes longest comes first.

    `machine`: what runs them; it has no other instrument, and none afterwards.
    `call`: calls a function of it, always with the same sizes.
    `device`: where kernels run.
    `repeats`: how often it is called, after one call that is not timed.
    """
    call()  # captures CUDA graphs, which cannot be done while kernels are waited for
    clock = _Clock(device)
    machine.set_instrument(clock.instrument)
    try:
        for _ in range(repeats):
            call()
    finally:
        machine.set_instrument(None)
    found = [
        KernelTime(name, len(each) // repeats, Times(tuple(each)), clock.resolution)
        for name, each in clock.found.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def _is_cpu(device: tvm.runtime.Device) -> bool:
    return device.dlpack_device_type() == tvm.cpu().dlpack_device_type()


class _Clock:
    """Collects the seconds of kernels by name."""

    def __init__(self, device: tvm.runtime.Device) -> None:
        self.found: dict[str, list[float]] = {}
        self._device, self._began = device, 0.0
        self._alone = self.resolution = 0.0
        self._busy: tuple[Any, Any] | None = None
        if not _is_cpu(device):
            zeros = np.zeros(BUSY_BYTES, "int8")
            self._busy = tvm.runtime.tensor(zeros, device), tvm.runtime.tensor(zeros, device)
            taken = [self._copy_alone() for _ in range(_EMPTY)]
            alone = Times(tuple(taken[_EMPTY // 2 :]))  # clocks have risen
            self._alone, self.resolution = alone.median, alone.percentile(75) - alone.percentile(25)

    def instrument(self, _func: Any, name: str, before: bool, *_: Any) -> int:
        """Note the time before an instruction, and add it up after; 0: go on as usual."""
        if name.startswith(_BUILTIN) and name != RUN_OR_CAPTURE:
            return 0
        if before:
            self._begin()
        else:
            self.found.setdefault(name, []).append(self._end())
        return 0

    def _begin(self) -> None:
        if self._busy is not None:
            self._device.sync()
        self._began = time.perf_counter()
        if self._busy is not None:
            source, target = self._busy
            source.copyto(target)

    def _end(self) -> float:
        if self._busy is not None:
            self._device.sync()
        return max(time.perf_counter() - self._began - self._alone, 0.0)

    def _copy_alone(self) -> float:
        self._begin()
        return self._end()
