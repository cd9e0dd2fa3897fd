"""``relax-fusion explain``: what would be fused, why not the rest, and which rules make kernels."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvm.ir.transform import Pass

from ..estimator import AttentionSize, RangePrediction, format_seconds
from ..estimator.shape import box_sizes
from ..hardware.target import device_of
from ..options import PipelineOptions
from ..phases import run_phases
from ..pipeline import PHASES, count_launches, schedule_kernels
from ..report import (
    Report,
    autotune_table,
    coverage_table,
    graphs_text,
    left_out_table,
    leftovers_table,
    schedules_table,
    validation_table,
)
from ..report.decision import Decision
from ..report.tables import table
from ..triton_bridge.texts import record_sources
from .build import guarded
from .compilation import report_record
from .console import Console
from .model_arguments import asked
from .page import check_written, write_page
from .source import bounds, described, longest, open_source


def explain_command(args: argparse.Namespace, console: Console) -> int:
    """Run the phases that decide, and print what they decided."""
    check_written({"--html": args.html}, args.source, args.database)
    source = open_source(args.source)
    source.check(args)
    device = device_of(args.target)
    console.step(f"exporting {source.name}")
    model = source.model(args)
    report = Report()
    options = _options(args, report, bounds(model), console)
    console.step(f"looking for chains to fuse for {device.description}")
    report.material.model = f"{source.name}, {described(model)}"
    report.material.most = longest(model)
    guarded(lambda: run_phases(options, _PHASES)(model.mod), args.target)
    if args.html is not None:
        write_page(report.to_html(), args.html, console)
    facts = {
        "source": source.name,
        "target": str(args.target),
        "device": device.description,
        "dtype": model.dtype,
        "quantization": getattr(model, "quantization", None),
        "max_seq_len": getattr(model, "max_seq_len", None),
        "batch": getattr(model, "batch", None),
        "options": asked(args),
        "fused": len(report.fused),
        "declined": len(report.declined),
    }
    if args.json:
        console.json({**facts, **report_record(report)})
        return 0
    console.result(
        f"{source.name}, {described(model)}, for {device.description}: "
        f"{len(report.fused)} chains fused, {len(report.declined)} left to TVM"
    )
    for part in _parts(report, args):
        if part:
            console.result("\n" + part)
    return 0


def _options(
    args: argparse.Namespace, report: Report, known: Mapping[str, int], console: Console
) -> PipelineOptions:
    """Return what the pipeline is told."""
    return PipelineOptions(
        args.target,
        disable=tuple(args.disable),
        always_fuse=args.always_fuse,
        allow_tf32=args.allow_tf32,
        validate=args.validate,
        backend=args.backend,
        database=None if args.database is None else Path(args.database),
        autotune=args.autotune,
        debug_dump=None if args.debug_dump is None else Path(args.debug_dump),
        dump_functions=args.dump_functions,
        dump_phases=args.dump_phases,
        report=report,
        progress=console.step,
        variable_bounds=known,
    )


def _parts(report: Report, args: argparse.Namespace) -> list[str]:
    """Return the tables of a report, those that were asked for among them."""
    rules = "Kernels, by the rule that schedules them\n\n" + schedules_table(report.schedules)
    parts = [left_out_table(report.left_out), fused_text(report.fused)]
    parts += [autotune_table(report.fused), validation_table(report.fused)]
    parts += [declined_text(report.declined), leftovers_text(report), rules]
    if args.coverage:
        parts.append(coverage_text(report))
    if args.graphs:
        parts.append("What each kernel computes\n\n" + graphs_text(report.fused))
    return parts


def _scheduled(options: PipelineOptions) -> list[Pass]:
    """Return what takes the place of phase 4: Triton's kernels are not compiled."""
    passes: list[Pass] = [schedule_kernels(options)]
    if options.report is not None:
        passes += record_sources(options.target, options.report.material.sources)
    return [*passes, *count_launches(options)]


_PHASES = (*PHASES[:4], ("debug-phase4.py", _scheduled, "scheduling kernels"))


def fused_text(decisions: list[Decision]) -> str:
    """One row per kernel and range of the dynamic dimension; equal kernels are counted."""
    if not decisions:
        return ""
    counts = Counter((d.function, d.kernel) for d in decisions)
    first = {(d.function, d.kernel): d for d in reversed(decisions)}
    rows: list[tuple[str, ...]] = [
        ("function", "pass", "chain", "calls", "size", "tile", "fused", "unfused", "limited by")
    ]
    for key, count in counts.items():
        decision = first[key]
        names: tuple[str, ...] = (
            decision.function,
            decision.pattern,
            decision.spelling,
            str(count),
        )
        for cells in _ranges(decision):
            rows.append((*names, *cells))
            names = ("",) * 4
    return "Fused (predicted seconds of one call, at the size given)\n\n" + table(rows)


def _ranges(decision: Decision) -> list[tuple[str, ...]]:
    """Size, tile, times and bound of each range."""
    rows: list[tuple[str, ...]] = []
    for prediction in decision.predictions:
        plans, work = decision.plans, decision.workload
        assert plans is not None and work is not None, "a fused chain has plans and a workload"
        plan = plans.plan_for(**box_sizes(work, prediction.size))
        rows.append(
            (
                _size(prediction),
                plan.text,
                prediction.fused_text,
                format_seconds(prediction.unfused.seconds),
                prediction.fused.bound,
            )
        )
    return rows


def _size(prediction: RangePrediction) -> str:
    size = prediction.size
    if isinstance(size, AttentionSize):
        return f"{size.q_len} x {size.kv_len} keys"
    return "1 row" if size == 1 else f"{size} rows"


def declined_text(decisions: list[Decision]) -> str:
    """One row per reason; equal ones are counted."""
    if not decisions:
        return ""
    counts: Counter[tuple[str, ...]] = Counter()
    example: dict[tuple[str, ...], str] = {}
    for d in decisions:
        why = (d.function, d.pattern, d.spelling or "-", str(d.decline))
        counts[why] += 1
        example.setdefault(why, d.where)
    rows: list[tuple[str, ...]] = [("function", "pass", "chain", "times", "first at", "because")]
    rows += [(*why[:3], str(count), example[why], why[3]) for why, count in counts.items()]
    return "Left to TVM\n\n" + table(rows)


def leftovers_text(report: Report) -> str:
    """One row for what stands outside of fused kernels for one reason."""
    found = leftovers_table(report.leftovers)
    return f"Outside of fused kernels\n\n{found}" if found else ""


def coverage_text(report: Report) -> str:
    """One row per function, with what its columns mean."""
    return f"Coverage ({_COLUMNS})\n\n{coverage_table(report.coverage)}"


_COLUMNS = (
    "chains in fused kernels, of those there are; launches in all, and until they repeat; kernels "
    "that only move or cast elements, and the bytes that they read and write at the sizes given"
)


def summary(report: Report) -> dict[str, Any]:
    """Count what was fused by pass, and what was declined."""
    by_pass = Counter(d.pattern for d in report.fused)
    return {"fused": dict(by_pass), "declined": len(report.declined)}
