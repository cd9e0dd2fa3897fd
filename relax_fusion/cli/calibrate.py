"""``relax-fusion calibrate``: measure the rates of a device, for `--target FILE.json`."""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import asdict
from pathlib import Path

from ..estimator import format_seconds
from ..hardware.device_file import DeviceFile
from ..models.threads import use_all_cores
from ..report.tables import table
from ..tuning.rates import LAUNCHES
from ..tuning.sweep import calibrate
from .artifact import check_written
from .console import CliError, Console


def calibrate_command(args: argparse.Namespace, console: Console) -> int:
    """Measure, and print the rates and how far predictions are off."""
    if not args.output.endswith(".json"):
        raise CliError(f"{args.output}: a device file must end in .json, as --target knows it", 2)
    check_written({"--output": args.output})
    console.load()
    use_all_cores()
    found = calibrate(
        Path(args.output),
        args.target,
        device=args.device,
        seconds=args.seconds,
        again=args.again,
        progress=console.step,
    )
    if args.json:
        console.json({**asdict(found), "name": found.spec.name, "error": error_of(found)})
    else:
        console.result(text_of(found, args.output))
    for each in found.left:
        console.warn(f"not measured: {each}")
    return 0


def error_of(found: DeviceFile) -> float:
    """Return how far predictions of the kernels of a sweep are off, in the mean, as a part."""
    errors = [abs(math.log(t.predicted_s / t.seconds)) for t in found.times if t.probe != LAUNCHES]
    return math.expm1(statistics.fmean(errors)) if errors else 0.0


def text_of(found: DeviceFile, name: str) -> str:
    """Return the rates, with where each comes from, and the kernels, as tables."""
    rates = [(n, f"{rate.value:.4g}", rate.source) for n, rate in found.rates.items()]
    times = [
        (t.probe, format_seconds(t.seconds), format_seconds(t.predicted_s)) for t in found.times
    ]
    return "\n\n".join(
        (
            f"{found.label}: {len(found.times)} times; predictions of kernels are off by "
            f"{error_of(found):.0%} in the mean",
            table([("rate", "value", "source"), *rates]),
            table([("kernel", "measured", "predicted"), *times]),
            f"--target {name} compiles for it",
        )
    )
