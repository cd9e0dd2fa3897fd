"""``relax-fusion workloads``: what a model multiplies, how often, and what it costs where."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from ..hardware.target import device_of, make_target
from ..inventory import function_cost
from ..options import PipelineOptions
from ..pipeline import phase0_annotate, phase1_fuse
from ..report import Item, Report, leftovers_table
from ..validation import json_text
from .build import guarded
from .compilation import check_unasked, is_compiled, read_compilation
from .console import CliError, Console
from .page import check_written, write_page
from .source import ConfigSource, bounds, described, open_source
from .traffic import Traffic, read_traffic
from .workload_sizes import BATCHES, LENGTHS, Points, points_of
from .workload_tables import (
    DeviceCosts,
    csv_text,
    devices_text,
    function_record,
    function_text,
    traffic_text,
    unfused_text,
)


@dataclass(frozen=True)
class Model:
    """What the command looks at, for one target.

    Parameters
    ----------
    name, description : str
        For headings.
    target : Target
        What chains were chosen for.
    dtype : str
        Of the model.
    report : Report
        With work and leftovers.
    bounds : dict of str to int
        Largest values of symbolic sizes.
    """

    name: str
    description: str
    target: Target
    dtype: str
    report: Report
    bounds: dict[str, int] = field(default_factory=dict)


def workloads_command(args: argparse.Namespace, console: Console) -> int:
    """Print, and write, what ``args.source`` multiplies."""
    if args.csv == "-" and args.json == "-":
        raise CliError("--csv - and --json - cannot both be stdout; give one a file", code=2)
    files = {"--csv": args.csv, "--json": args.json}
    check_written(files, args.source, args.record, stdout=files)
    given = [name for name in ("batch", "seq") if getattr(args, name) is not None]
    given += ["size"] * bool(args.size)
    if args.record is not None and given:
        raise CliError(f"--record gives the sizes; leave out --{given[0]}", code=2)
    if args.target is None:
        anew = args.on and not is_compiled(Path(args.source))
        args.target = args.on[0] if anew else make_target("llvm")
    model = _model(args, console)
    traffic = None if args.record is None else _traffic(args.record, model)
    points = points_of(model.report.work, args, model.bounds, traffic)
    devices = _devices(args, console, model, traffic)
    if args.csv is not None:
        by_name = {each.function: each for each in points}
        _write(args.csv, csv_text(model.report.work, by_name), console)
    if args.json is not None:
        _write(args.json, json_text(_record(model, points, devices)) + "\n", console)
    if "-" not in (args.csv, args.json):
        console.result(_text(model, points, devices))
    return 0


def _traffic(file: str, model: Model) -> Traffic:
    traffic = read_traffic(Path(file))
    functions = {item.function for item in model.report.work}
    if not functions & set(traffic.functions):
        known = ", ".join(sorted(functions)) or "none"
        raise CliError(
            f"{file} has calls of {', '.join(traffic.functions) or 'no function'} of "
            f"{traffic.source}; the functions of {model.name} are {known}",
            code=2,
        )
    return traffic


def _write(file: str, text: str, console: Console) -> None:
    if file == "-":
        console.result(text.rstrip("\n"))
        return
    write_page(text, file, console)


def _model(args: argparse.Namespace, console: Console) -> Model:
    """Read a compiled directory, or fuse the chains of a model for a target."""
    if is_compiled(Path(args.source)):
        return _compiled(args)
    source, wanted = open_source(args.source), args.target
    own = argparse.Namespace(**vars(args))
    own.batch = None
    if isinstance(source, ConfigSource) and args.batch is not None:
        one = args.batch.first == args.batch.last
        own.batch = args.batch.first if one else BATCHES[0]
        args.batch_is_static = one
    source.check(own)
    device = device_of(wanted)
    console.step(f"exporting {source.name}")
    model = source.model(own)
    known = bounds(model)
    report = Report()
    options = PipelineOptions(
        wanted,
        disable=tuple(args.disable),
        always_fuse=args.always_fuse,
        allow_tf32=args.allow_tf32,
        validate=args.validate,
        backend=args.backend,
        report=report,
        variable_bounds=known,
    )
    console.step(f"looking for chains to fuse for {device.description}")
    passes = [*phase0_annotate(options), *phase1_fuse(options)]
    with wanted:
        guarded(lambda: tvm.transform.Sequential(passes)(model.mod), wanted)
    longest = getattr(model, "max_seq_len", None)
    most = dict.fromkeys(LENGTHS[:2], longest) if longest else {}
    sizes = described(model) if args.batch is None else f"{model.dtype}, batch {args.batch}"
    told = f"{source.name}, {sizes}, for {device.description}"
    return Model(source.name, told, wanted, model.dtype, report, {**most, **known})


def _compiled(args: argparse.Namespace) -> Model:
    """Read what a compilation recorded; it has its target, and sizes that are numbers."""
    found = read_compilation(args.source)
    check_unasked(args, str(found.fact("target")), besides=("batch", "backend"))
    target, source = make_target(found.fact("target")), str(found.fact("source"))
    report = Report(work=found.items, leftovers=found.leftovers)
    dtype = str(found.fact("dtype"))
    told = f"{source}, {found.fact('quantization') or dtype}, compiled for "
    told += device_of(target).description
    return Model(source, told, target, dtype, report, dict(found.bounds))


def _devices(
    args: argparse.Namespace, console: Console, model: Model, traffic: Traffic | None
) -> list[DeviceCosts]:
    """Predict the time of each function on each device that was asked for, with the same chains."""
    found, work = [], model.report.work
    for target in args.on or ():
        device = device_of(target)
        name = str(target.attrs.get("model", target.kind.name))
        backend = PipelineOptions(target, backend=args.backend).fuse.backend
        console.step(f"pricing {len(work)} chains and matmuls on {device.label}")
        costs = [
            function_cost(each.function, _of(work, each.function), values, device, backend)
            for each in points_of(work, args, model.bounds, traffic)
            for values in each.values
        ]
        found.append(DeviceCosts(name, device, model.dtype, tuple(costs)))
    return found


def _of(items: Sequence[Item], function: str) -> list[Item]:
    return [item for item in items if item.function == function]


def _record(
    model: Model, points: Sequence[Points], devices: Sequence[DeviceCosts]
) -> dict[str, Any]:
    work = model.report.work
    left = model.report.leftovers
    return {
        "source": model.name,
        "target": str(model.target),
        "device": device_of(model.target).description,
        "dtype": model.dtype,
        "functions": [function_record(_of(work, p.function), p) for p in points],
        "leftovers": [vars(leftover) for leftover in left],
        "devices": [each.to_record() for each in devices],
    }


def _text(model: Model, points: Sequence[Points], devices: Sequence[DeviceCosts]) -> str:
    work = model.report.work
    parts = [model.description]
    if not work:
        parts.append("It has no matmul, no attention and no convolution.")
    for each in points:
        items = _of(work, each.function)
        parts.append(function_text(items, each))
        if each.calls or not each.values:
            parts.append(traffic_text(items, each))
    parts.append(unfused_text(work))
    others = [x for x in model.report.leftovers if x.kind not in ("matmul", "attention")]
    if others:
        parts.append(f"Beside them, outside of fused kernels\n\n{leftovers_table(others)}")
    parts.append(devices_text(devices) if devices and work else "")
    return "\n\n".join(part for part in parts if part)
