"""``relax-fusion tune``: measure the plans of a model's kernels, and keep the times in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..hardware.target import device_of
from ..tuning import Tuning, tune
from .build import guarded
from .console import CliError, Console
from .model_arguments import pipeline_options
from .source import bounds, described, exported_source


def tune_command(args: argparse.Namespace, console: Console) -> int:
    """Measure, and print by how much the fastest plans are faster."""
    device = device_of(args.target)
    source, model = exported_source(args, console)
    console.step(f"looking for chains to measure for {device.description}")
    if args.rpc is None:
        console.load()
    told = pipeline_options(args)
    tuning = guarded(
        lambda: tune(
            model.mod,
            Path(told.pop("database")),
            args.target,
            seconds=args.seconds,
            rpc=args.rpc,
            again=args.again,
            most=args.most,
            **told,
            variable_bounds=bounds(model),
            progress=console.step,
        ),
        args.target,
    )
    if args.json:
        console.json({"source": source.name, "target": str(args.target), **_facts(tuning)})
    else:
        console.result(
            f"{source.name}, {described(model)}, on {device.description}: {tuning.measurements} "
            f"measurements added to {args.database}\n\n{tuning.text()}"
        )
    if tuning.nothing:
        raise CliError(f"nothing was measured: {tuning.nothing}")
    return 0


def _facts(tuning: Tuning) -> dict[str, object]:
    return {
        "measurements": tuning.measurements,
        "outcomes": [
            {
                "chain": each.chain,
                "workload": each.key,
                "calls": each.calls,
                "size": each.size if isinstance(each.size, int) else each.size._asdict(),
                "priced": each.priced.to_attr(),
                "priced_s": each.priced_s,
                "fastest": each.fastest.to_attr(),
                "fastest_s": each.fastest_s,
            }
            for each in tuning.outcomes
        ],
        "wrong": tuning.wrong,
        "left": tuning.left,
    }
