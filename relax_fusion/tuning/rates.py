"""Fitting the launch model to the times of a sweep."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..estimator.families.matmuls import TilePrice
from ..estimator.fitting import least_errors, slopes_of
from ..estimator.registry import option_of
from ..estimator.shape import Problem
from ..estimator.tile_plan import TilePlan
from ..hardware import DeviceSpec
from ..hardware.device_file import DeviceFile, Rate
from .probes import Probe, probes

TELLS = 0.3
"""A rate counts as measured if the price of a kernel changes by this part of its own change."""

RATES = {
    "cpu": ("clock_hz", "dram_bytes_per_s", "l2_bytes_per_s", "l3_cycles_per_byte", "launch_s"),
    "gpu": (
        *("clock_hz", "dram_bytes_per_s", "l2_bytes_per_s"),
        *("tensor_float16_flops_per_s", "tensor_bfloat16_flops_per_s", "tensor_int8_flops_per_s"),
    ),
}
"""What is fitted; `launch_s` of a GPU is measured by itself."""

ALIKE = {
    "cpu": {"fma_float32_flops_per_s": "clock_hz"},
    "gpu": {
        "fma_float32_flops_per_s": "clock_hz",
        "tensor_tf32_flops_per_s": "tensor_float16_flops_per_s",
        "launch_s": "",
    },
}
"""Rates that change as another one does."""

LAUNCHES = "launches"
"""Name of the probe that measures `launch_s` of a GPU."""


def fitted(found: DeviceFile, base: DeviceSpec) -> DeviceFile:
    """Return a file with the rates that give its times best.

    A time through the virtual machine has the call in it, which is fitted with the rates.
    """
    times = {timed.probe: timed for timed in found.times}
    launch = times.pop(LAUNCHES, None)
    if launch is not None:
        base = replace(base, launch_s=launch.seconds)
    known = [(p, p.plan(base), times[p.name].seconds) for p in probes(base) if p.name in times]
    fields = [n for n in RATES[base.kind] if getattr(base, n) > 0]
    seconds = np.array([s for _, _, s in known])
    call_s = seconds.min(initial=1e-5) / 2

    def device(x: Any) -> DeviceSpec:
        changes = dict(zip(fields, x, strict=False))
        changes |= {n: changes.get(other, 0.0) for n, other in ALIKE[base.kind].items()}
        return replace(base, **{n: getattr(base, n) * math.exp(c) for n, c in changes.items()})

    def errors(x: Any) -> Any:
        dev, call = device(x), call_s * math.exp(x[-1])
        prices = [call + alone_s(p, plan, dev) for p, plan, _ in known]
        return np.log(np.array(prices) / seconds)

    x = np.zeros(len(fields) + 1)
    told: dict[str, bool] = {"launch_s": launch is not None}
    predicted: dict[str, float] = {}
    if known:
        x = least_errors(errors, np.ones(len(known)), len(x))
        told |= dict(zip(fields, np.abs(slopes_of(errors, x)).max(axis=0) >= TELLS, strict=False))
        told |= {n: told[other] for n, other in ALIKE[base.kind].items() if other in told}
        logs = zip(known, errors(x), strict=True)
        predicted = {p.name: s * math.exp(error) for (p, _, s), error in logs}
    dev = device(x)
    rates = {
        n: Rate(float(getattr(dev, n)), "measured" if told.get(n) else rate.source)
        for n, rate in found.rates.items()
    }
    every = (replace(t, predicted_s=predicted.get(t.probe, t.seconds)) for t in found.times)
    return replace(found, rates=rates, times=tuple(every))


def alone_s(probe: Probe, plan: TilePlan | str, dev: DeviceSpec) -> float:
    """Return the price of a kernel by itself; on a GPU the call has the launch in it."""
    assert isinstance(plan, TilePlan)
    price = option_of(plan, Problem(probe.work, dev)).price
    late_s = price.tile.late_s * (probe.rows == 1) if isinstance(price, TilePrice) else 0.0
    return float(price.at(probe.rows).seconds - late_s - dev.launch_s * (dev.kind == "gpu"))
