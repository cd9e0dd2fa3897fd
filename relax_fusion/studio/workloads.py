"""``relax-fusion workloads``: what a model multiplies, how often, and what it costs where."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from ..cli.artifact import check_written, write_page
from ..cli.build import guarded
from ..cli.console import CliError, Console
from ..cli.model_arguments import pipeline_options
from ..cli.source import ConfigSource, bounds, described, longest, open_source
from ..hardware.target import device_of, make_target
from ..options import PipelineOptions, make_options
from ..pipeline import phase0_annotate, phase1_fuse
from ..report import Item, Report
from ..report.costs import function_cost
from ..report.sizes import BATCHES, SizeRange, grid
from ..report.tables import leftovers_table
from ..validation import json_text, shown
from .compilation import check_unasked, is_compiled, read_compilation
from .expert_load import record_load
from .workload_tables import (
    DeviceCosts,
    Points,
    csv_text,
    devices_table,
    function_record,
    function_text,
    unfused_table,
)


@dataclass(frozen=True)
class Model:
    """What the command looks at, for one target."""

    name: str
    description: str
    target: Target
    dtype: str
    report: Report
    bounds: dict[str, int] = field(default_factory=dict)


def workloads_command(args: argparse.Namespace, console: Console) -> int:
    """Print, and write, what ``args.source`` multiplies."""
    if args.record is not None:
        return record_load(args, console)
    for name in ("prompt", "prompt_ids", "seed", "max_new_tokens"):
        if getattr(args, name) is not None:
            told = f"--{name.replace('_', '-')} is for --record FILE; without it nothing is run"
            raise CliError(told, code=2)
    if args.csv == "-" and args.json == "-":
        raise CliError("--csv - and --json - cannot both be stdout; give one a file", code=2)
    files = {"--csv": args.csv, "--json": args.json}
    check_written(files, args.source, stdout=files)
    if args.target is None:
        anew = args.on and not is_compiled(Path(args.source))
        args.target = args.on[0] if anew else make_target("llvm")
    model = _model(args, console)
    points = points_of(model.report.work, args, model.bounds)
    devices = [_device(target, args, console, model, points) for target in args.on or ()]
    if args.csv is not None:
        _write(args.csv, csv_text(model.report.work, points), console)
    if args.json is not None:
        _write(args.json, json_text(_record(model, points, devices)) + "\n", console)
    if "-" not in (args.csv, args.json):
        console.result(_text(model, points, devices))
    return 0


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
    known, report = bounds(model), Report()
    told = {"report": report, "variable_bounds": known}
    options = make_options(wanted, {**pipeline_options(args), **told})
    console.step(f"looking for chains to fuse for {device.description}")
    passes = [*phase0_annotate(options), *phase1_fuse(options)]
    with wanted:
        guarded(lambda: tvm.transform.Sequential(passes)(model.mod), wanted)
    sizes = described(model) if args.batch is None else f"{model.dtype}, batch {args.batch}"
    description = f"{source.name}, {sizes}, for {device.description}"
    return Model(source.name, description, wanted, model.dtype, report, {**longest(model), **known})


def _compiled(args: argparse.Namespace) -> Model:
    """Read what a compilation recorded; it has its target, and sizes that are numbers."""
    found = read_compilation(args.source)
    check_unasked(args, str(found.fact("target")), besides=("batch", "backend"))
    target, source = make_target(found.fact("target")), str(found.fact("source"))
    dtype = str(found.fact("dtype"))
    told = f"{source}, {found.fact('quantization') or dtype}, compiled for "
    told += device_of(target).description
    return Model(source, told, target, dtype, found.report, found.bounds)


def _device(
    target: Target,
    args: argparse.Namespace,
    console: Console,
    model: Model,
    points: Sequence[Points],
) -> DeviceCosts:
    """Predict the time of each function on a device, with the chains of the model."""
    device, work = device_of(target), model.report.work
    name = str(target.attrs.get("model", target.kind.name))
    backend = PipelineOptions(target, backend=args.backend).fuse.backend
    console.step(f"pricing {len(work)} chains and matmuls on {device.label}")
    costs = [
        function_cost(p.function, model.report.work_of(p.function), values, device, backend)
        for p in points
        for values in p.values
    ]
    return DeviceCosts(name, device, model.dtype, tuple(costs))


def _record(
    model: Model, points: Sequence[Points], devices: Sequence[DeviceCosts]
) -> dict[str, Any]:
    report = model.report
    return {
        "source": model.name,
        "target": str(model.target),
        "device": device_of(model.target).description,
        "dtype": model.dtype,
        "functions": [function_record(report.work_of(p.function), p) for p in points],
        "leftovers": [vars(leftover) for leftover in report.leftovers],
        "devices": [each.to_record() for each in devices],
    }


def _text(model: Model, points: Sequence[Points], devices: Sequence[DeviceCosts]) -> str:
    work = model.report.work
    parts = [model.description]
    if not work:
        parts.append("It has no matmul, no attention and no convolution.")
    parts += [function_text(model.report.work_of(each.function), each) for each in points]
    parts.append(unfused_table(work).text())
    others = [x for x in model.report.leftovers if x.kind not in ("matmul", "attention")]
    parts.append(leftovers_table(others, "Beside them, outside of fused kernels").text())
    parts.append(devices_table(devices).text() if work else "")
    if work and any(not each.device.measured for each in devices):
        parts.append("* prices were not compared with times of kernels on this device")
    return "\n\n".join(part for part in parts if part)


LENGTHS = ("seq_len", "total_len", "seq", "sequence", "sequence_length", "total_seq_len")
"""``--seq`` gives a value to sizes of these names: one for all, as in a prompt at the beginning."""

USUAL = {**dict.fromkeys(LENGTHS, 512), **dict.fromkeys(BATCHES, 1)}
OTHER = 64
"""Sizes that nobody gave have this value, or that of `USUAL`, by their name."""


def points_of(
    items: Sequence[Item], args: argparse.Namespace, bounds: Mapping[str, int]
) -> list[Points]:
    """Return the sizes at which each function is counted, by the command's batch, seq and size.

    Raises `CliError` if a size that was given is none of the model, or beyond what it was made for.
    """
    functions = dict.fromkeys(item.function for item in items)
    symbols = {f: sorted({n for i in items if i.function == f for n in i.names}) for f in functions}
    _check_names(args, set().union(*symbols.values()), bounds)
    return [_given(f, names, args, bounds) for f, names in symbols.items()]


def _check_names(args: argparse.Namespace, names: set[str], bounds: Mapping[str, int]) -> None:
    known = ", ".join(sorted(names)) or "none"
    for name in dict(args.size):
        if name not in names:
            raise CliError(f"--size names {shown(name)}; the symbolic sizes are {known}", code=2)
    for option, accepted in (("batch", BATCHES), ("seq", LENGTHS)):
        if getattr(args, option) is None or names & set(accepted):
            continue
        if option == "batch" and getattr(args, "batch_is_static", False):
            continue
        raise CliError(
            f"--{option} {getattr(args, option)}: no symbolic size is called "
            f"{' or '.join(accepted)}; there are {known}, which --size takes",
            code=2,
        )
    for name in sorted(names):
        wanted, option = _wanted(name, args)
        most = bounds.get(name)
        if wanted is not None and most is not None and wanted.last > most:
            raise CliError(
                f"{option} {wanted}: {name} is at most {most}, for which the model is made", code=2
            )


def _wanted(name: str, args: argparse.Namespace) -> tuple[SizeRange | None, str]:
    given = dict(args.size)
    if name in given:
        return given[name], f"--size {name}="
    if name in BATCHES:
        return args.batch, "--batch"
    return (args.seq, "--seq") if name in LENGTHS else (None, "")


def _given(
    function: str, names: Sequence[str], args: argparse.Namespace, bounds: Mapping[str, int]
) -> Points:
    """Combine ranges; the names of ``--seq`` have one value together, and so have others."""
    ranges: dict[str, SizeRange] = {}
    fixed: dict[str, int] = {}
    groups: dict[str, list[str]] = {}
    for name in names:
        wanted, option = _wanted(name, args)
        if wanted is None:
            fixed[name] = min(USUAL.get(name, OTHER), bounds.get(name, 2**31))
        else:
            ranges[name] = wanted
            groups.setdefault(option, []).append(name)
    by_option = {option: ranges[members[0]] for option, members in groups.items()}
    values = [
        fixed | {name: point[option] for option, members in groups.items() for name in members}
        for point in grid(by_option)
    ]
    return Points(function, ranges, values)
