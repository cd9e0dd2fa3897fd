"""When the kernels of a token run: what each adds to the ones before it, and a picture of gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.recording import markdown_table
from benchmarks.report import drawing

REPLAYS = 4
"""The last of so many is looked at."""

SHOWN = 24
"""Kernels in the middle of a token that the table and the picture have: some layers."""


class Kernel(NamedTuple):
    """A launch: its name, and microseconds from the first one of a token.

    One that is launched early waits in its time for those before it.
    """

    name: str
    start: float
    end: float


def timeline(call: Callable[[], Any], sync: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of a call, in order, as torch's profiler has them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(REPLAYS):
            call()
        sync()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    last = events[len(events) - len(events) // REPLAYS :]
    begun = last[0].time_range.start if last else 0.0
    times = ((e.name, e.time_range.start - begun, e.time_range.end - begun) for e in last)
    return [Kernel(name, round(start, 2), round(end, 2)) for name, start, end in times]


def added(kernels: Iterable[Kernel]) -> list[float]:
    """Return what the end of each kernel is behind those of all before it, 0 where it is not."""
    found, end = [], 0.0
    for kernel in kernels:
        found.append(max(0.0, kernel.end - end))
        end = max(end, kernel.end)
    return found


def middle(count: int) -> slice:
    """Return which of so many kernels are shown."""
    first = max(0, (count - SHOWN) // 2)
    return slice(first, first + SHOWN)


def table(kernels: list[Kernel]) -> str:
    """Return the kernels in the middle of a token as Markdown."""
    shown = middle(len(kernels))
    rows = [("kernel", "begins, us", "waits and runs", "adds")]
    for kernel, more in zip(kernels[shown], added(kernels)[shown], strict=True):
        took = kernel.end - kernel.start
        rows.append((f"`{kernel.name}`", f"{kernel.start:.2f}", f"{took:.2f}", f"{more:.2f}"))
    return markdown_table(rows)


def plot(titled: dict[str, list[Kernel]], path: Path) -> None:
    """Draw the middle of each token: a bar a kernel, darker for what it adds.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    pyplot = drawing()
    shape = {"figsize": (10, 4.5 * len(titled)), "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot.subplots(len(titled), 1, **shape)
    for axis, (title, kernels) in zip(axes[:, 0], titled.items(), strict=True):
        shown = middle(len(kernels))
        for row, (kernel, more) in enumerate(
            zip(kernels[shown], added(kernels)[shown], strict=True)
        ):
            axis.barh(row, kernel.end - kernel.start, left=kernel.start, color="#c6d8ea")
            axis.barh(row, more, left=kernel.end - more, color="#2b6ca3")
        names = [kernel.name[:40] for kernel in kernels[shown]]
        axis.set_yticks(range(len(names)), names, fontsize=6)
        axis.invert_yaxis()
        axis.set(xlabel="us; light: launched and waiting", title=title)
    figure.savefig(path, metadata={"Date": None})
