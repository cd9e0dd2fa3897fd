"""Kernels of a compiled model: what each takes, beside what was predicted of it at these sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import RelaxFusionError
from ...hardware import DeviceSpec
from ...hardware.target import device_of, make_target
from ...report import Report
from ...report.costs import planned
from ...report.sizes import sizes_text
from ...timing import KernelTime, kernel_times
from ...transforms.cuda_graph import RUN_OR_CAPTURE
from ..workload_tables import product_text
from .contenders import Contender
from .subject import Subject

REPEATS = 5
"""Calls by which the kernels of a function are timed."""


def measure_kernels(subject: Subject, contender: Contender, step: str) -> list[dict[str, Any]]:
    """Time the kernels of one step, and predict those that we made.

    Returns
    -------
    list of dict
        What JSON holds of each: its times, how often a call runs it, the chain that it fuses, the
        sizes of its matmuls, the tiles that serve them, and what is predicted of one run, on a GPU
        without the launch, which is not in the times either.
    """
    machine = contender.runs.machine
    times = kernel_times(machine, _call(subject, contender, step), subject.device, REPEATS)
    return [_beside(subject, subject.compilation.report, step, time) for time in times]


def _call(subject: Subject, contender: Contender, step: str) -> Callable[[], Any]:
    """Return what calls the function of a step, always at the same position."""
    runs = contender.runs
    if not subject.is_decoder:
        return lambda: runs()
    ids, prompt = subject.ids(), subject.sizes["prompt"]
    rows = [ids[:prompt]] * subject.batch

    def prefill() -> None:
        runs.reset()
        runs.prefill(rows)

    def decode() -> None:
        runs.length = prompt  # whose rows the caches have from the turns before
        runs.decode([ids[prompt - 1]] * subject.batch)

    return prefill if step == "prefill" else decode


def _beside(subject: Subject, report: Report, step: str, time: KernelTime) -> dict[str, Any]:
    sizes = subject.calls()[step]
    own = {
        "kernel": time.name,
        "chain": "kernels of a CUDA graph" if time.name == RUN_OR_CAPTURE else "",
        "launches": time.count,
        **time.times.to_record(),
        "predicted_s": None,
        "plan": "",
        "size": sizes_text(sizes) or "static",
        "resolution_s": time.resolution,
    }
    item = next((i for i in report.work_of(step) if i.kernel == time.name), None)
    plans = next((d.plans for d in report.decisions if d.kernel == time.name), None)
    if item is None or item.work is None or plans is None:
        return own
    own |= {"chain": item.chain, "size": product_text(item, [sizes])}
    try:
        device = device_of(make_target(subject.manifest.target))
        prediction, plan = planned(item, item.work, plans, sizes, device)
    except RelaxFusionError:  # a family that is not registered here, say
        return own
    seconds = None if prediction is None else prediction.seconds - _launch_s(device)
    return own | {"predicted_s": seconds, "plan": plan}


def _launch_s(device: DeviceSpec) -> float:
    """Return what a prediction has of a launch that times have not."""
    return device.launch_s if device.kind == "gpu" else 0.0
