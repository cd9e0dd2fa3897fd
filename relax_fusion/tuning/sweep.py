"""Measuring the rates of a device: one sweep of kernels, to which the launch model is fitted."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.target import Target

from ..errors import TargetError, TuningError
from ..estimator.database import package_version, target_fields
from ..estimator.tile_plan import PlanTable, TilePlan
from ..hardware import DeviceSpec
from ..hardware.detect import by_driver, cuda_here, uncalibrated
from ..hardware.device_file import TOLD, DeviceFile, Rate, Source, Timed, read_device_file
from ..hardware.target import device_of, is_cpu, is_cuda, make_target
from ..transforms.modules import OPAQUE, functions_of, with_functions
from ..validation import reason, shown
from .device import FOREIGN_ERRORS, Function, MeasuringDevice, compiled, open_device
from .inputs import dims_at, draw
from .probes import Probe, probes
from .rates import ALIKE, LAUNCHES, RATES, fitted

SECONDS = 300
"""A sweep begins nothing after so many seconds, unless it is told otherwise."""

SAMPLES, ENOUGH_S, LEAST_SAMPLES = 30, 0.5, 3
"""Times of a kernel: the most, how long they may take together, and the fewest."""

FEW_LAUNCHES, MANY_LAUNCHES = 16, 144

ALONE_S = 2.65e-6
"""A kernel alone in a CUDA graph adds 2.65e-6 seconds more than one more in a row.  Measured on an
H200: 3.4e-6 (`DeviceSpec.launch_s`) and 0.73e-6 (`2026-11-29-calibrate-h200.log`, where this is
added); assumed elsewhere."""


@dataclass(frozen=True)
class Sweep:
    """A sweep over the kernels for one device."""

    target: Target  # what they are compiled for
    base: DeviceSpec  # what the device is by the table, and by its driver
    device: MeasuringDevice  # where they run

    @property
    def machine(self) -> str:
        """What the device calls itself."""
        return self.device.machine or str(self.target.attrs.get("mcpu", ""))

    def seconds(self, probe: Probe, plan: TilePlan) -> float:
        """Compile a kernel, and return its time.

        Caches are not emptied: a GPU's would be by writing, and dirty lines that make room take
        bandwidth from the kernel, a fifth of it on an H200.  What waits for memory is larger.

        Raises `TuningError` if it does not compile, or fails.
        """
        made, failed = compiled(probe.work, {plan: PlanTable.single(plan)}, self.target)
        if failed:
            raise TuningError(f"does not compile: {failed[plan]}")
        executable, names = made[0]
        function = self.device.load(executable), names[plan]
        sizes = dims_at(probe.work, probe.rows)
        arguments = [
            self.device.tensor(draw(probe.work, o, sizes)) for o in probe.work.graph.inputs
        ]
        return self._time(function, arguments)

    def _time(self, function: Function, arguments: list[Any]) -> float:
        """Return the median of some times; of a CPU, which others use as well, the least."""
        self.device.warm_up(function, arguments)
        sample = partial(self.device.sample, function, arguments, flush=False)
        found = sample(LEAST_SAMPLES)
        more = min(SAMPLES, int(ENOUGH_S / max(min(found), 1e-9)))
        found += sample(more) if more else []
        return statistics.median(found) if self.device.on_gpu else min(found)

    def launch_s(self) -> float:
        """Return what a kernel adds that is alone in a CUDA graph."""
        few, many = (self._in_a_row(count) for count in (FEW_LAUNCHES, MANY_LAUNCHES))
        each = (many - few) / (MANY_LAUNCHES - FEW_LAUNCHES)
        if each <= 0:
            raise TuningError(f"{MANY_LAUNCHES} kernels take no longer than {FEW_LAUNCHES}")
        return each + ALONE_S

    def _in_a_row(self, count: int) -> float:
        """Return the seconds of small kernels, each of which reads what the last one wrote."""
        x = relax.Var("x", relax.TensorType([1024], "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                value = x
                for _ in range(count):
                    value = builder.emit(relax.op.add(value, value))
                made = builder.emit_output(value)
            builder.emit_func_output(made)
        mod = relax.transform.LegalizeOps()(builder.get())
        found = functions_of(mod, tirx.PrimFunc).items()
        # So that no two become one kernel
        apart = with_functions(mod, {g: f.with_attr("op_pattern", OPAQUE) for g, f in found})
        pipeline = relax.get_pipeline("relax_fusion", target=self.target)
        made = tvm.compile(apart, target=self.target, relax_pipeline=pipeline)
        arguments = [self.device.tensor(np.ones(1024, "float32"))]
        return self._time((self.device.load(made), "main"), arguments)


def calibrate(
    path: Path | str,
    target: Target | str | None = None,
    *,
    device: str | None = None,
    seconds: float = SECONDS,
    again: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> DeviceFile:
    """Measure the rates of the device of this machine, and write them to a file.

    The file is a target from then on: ``make_target("mine.json")``, ``--target mine.json``.  It is
    written after each kernel, so that an interrupted sweep loses nothing and the next one goes on.

    Parameters
    ----------
    path : Path or str
        The file.  If it is there, it must be of the same device, and what it has is not measured
        again.
    target : Target or str, optional
        What the device is; found out by default.
    device : {"cpu", "cuda"}, optional
        Which device; that of `target`, or the processor.
    seconds : float
        After which no kernel is begun.
    again : bool
        Measure everything, whatever the file has.
    progress : callable
        Told what is measured.

    Returns
    -------
    DeviceFile
        What was written.

    Raises
    ------
    TuningError
        If there is no such device, or no kernel could be measured.
    TargetError
        If the file is of another device or none at all, or the target is refused.
    OSError
        If the file cannot be written.
    """
    if not 0 <= seconds < math.inf:
        raise TuningError(f"seconds is {shown(seconds)}; must be from 0 on")
    path, sweep = Path(path), _sweep(target, device)
    found = _begun(path, sweep, again)
    deadline = time.monotonic() + seconds
    for name, measure in _steps(sweep, found):
        if time.monotonic() >= deadline:
            found = replace(found, left=(*found.left, f"{name}: there was no time for it"))
            continue
        progress(f"measuring {name}")
        try:
            timed = measure()
        except (TuningError, *FOREIGN_ERRORS) as err:
            why = str(err) if isinstance(err, TuningError) else reason(err)
            found = replace(found, left=(*found.left, f"{name}: {why}"))
            continue
        found = fitted(replace(found, times=(*found.times, timed)), sweep.base)
        found.write(path)
    if not found.times:
        raise TuningError(
            f"nothing was measured; {'; '.join(found.left[:1]) or 'no kernel is known'}"
        )
    found.write(path)
    return found


def _steps(sweep: Sweep, found: DeviceFile) -> Iterator[tuple[str, Callable[[], Timed]]]:
    """Yield what has no time yet, by name."""
    known = {(timed.probe, timed.plan) for timed in found.times}
    if sweep.base.kind == "gpu" and (LAUNCHES, "") not in known:
        yield LAUNCHES, lambda: Timed(LAUNCHES, "", sweep.launch_s(), 0.0)

    def measured(probe: Probe, plan: TilePlan | str) -> Timed:
        if isinstance(plan, str):
            raise TuningError(plan)
        return Timed(probe.name, plan.key, sweep.seconds(probe, plan), 0.0)

    for probe in probes(sweep.base):
        plan = probe.plan(sweep.base)
        if isinstance(plan, str) or (probe.name, plan.key) not in known:
            yield probe.name, partial(measured, probe, plan)


def _sweep(target: Target | str | None, device: str | None) -> Sweep:
    """Return the sweep over the device that was asked for."""
    if device not in (None, "cpu", "cuda"):
        raise TuningError(f"device is {shown(device)}; must be 'cpu' or 'cuda'")
    if target is None:
        target = cuda_here() if device == "cuda" else "llvm"
    found = uncalibrated(make_target(target))
    if not (is_cpu(found) or is_cuda(found)):
        raise TuningError(f"target {found.kind.name}: only CPUs (llvm) and cuda are calibrated")
    if device is not None and (device == "cpu") != is_cpu(found):
        raise TuningError(f"device is {device!r}, but the target is of kind {found.kind.name}")
    if not tvm.device("cpu" if is_cpu(found) else "cuda").exist:
        raise TuningError("target cuda: no such device on this machine")
    where, spec = open_device(found, None), device_of(found)
    return Sweep(found, by_driver(spec, where.device) if where.on_gpu else spec, where)


def _begun(path: Path, sweep: Sweep, again: bool) -> DeviceFile:
    """Return what a file has of the device, or a new one."""
    base, kind = sweep.base, sweep.base.kind
    source: Source = "assumed" if kind == "cpu" or base.modelled_on else "from data sheet"
    rates = (n for n in (*RATES[kind], *ALIKE[kind]) if getattr(base, n) > 0)
    name = sweep.machine.partition(",")[0] if kind == "gpu" else base.label
    new = DeviceFile(
        label=f"{name}, calibrated",
        base=base.name,
        target=target_fields(str(sweep.target)),
        machine=sweep.machine,
        versions={p: package_version(p) for p in ("relax-fusion", "apache-tvm")},
        numbers={n: getattr(base, n) for n in TOLD[kind]},
        rates={n: Rate(float(getattr(base, n)), source) for n in rates},
    )
    if not path.exists():
        return new
    old = read_device_file(path)
    for what in ("target", "machine", "numbers"):
        here, there = getattr(new, what), getattr(old, what)
        if here != there:
            told_of = f"its {what} is {shown(there)}, here it is {shown(here)}"
            raise TargetError(f"device file {path}: {told_of}; give another file")
    is_same = old.versions == new.versions and not again
    return replace(new, times=old.times, rates=old.rates) if is_same else new
