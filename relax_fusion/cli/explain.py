"""``relax-fusion explain``: what would be fused, why not the rest, and which rules make kernels."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeVar

from tvm.ir.transform import Pass

from ..estimator import AttentionSize, RangePrediction, format_seconds
from ..estimator.choose import size_text
from ..estimator.shape import box_sizes
from ..hardware.target import device_of
from ..options import PipelineOptions
from ..phases import run_phases
from ..pipeline import PHASES, count_launches, schedule_kernels
from ..report import (
    Report,
    coverage_table,
    declined_table,
    graphs_text,
    left_out_table,
    leftovers_table,
    schedules_table,
    validation_table,
)
from ..report.decision import Decision
from ..report.html.functions import calls_of
from ..report.tables import table
from ..triton_bridge.texts import record_sources
from .build import guarded
from .compilation import report_record
from .console import Console
from .model_arguments import asked
from .page import check_written, write_page
from .source import bounds, described, longest, open_source

WIDTH = 120
"""A line without ``--all`` has no more characters."""

_T = TypeVar("_T")


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
        f"{len(report.fused)} chains fused, {left_text(len(report.leftovers))}"
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
        debug_dump=None if args.debug_dump is None else Path(args.debug_dump),
        dump_functions=args.dump_functions,
        dump_phases=args.dump_phases,
        report=report,
        progress=console.step,
        variable_bounds=known,
    )


def _parts(report: Report, args: argparse.Namespace) -> list[str]:
    """Return the tables of a report, those that were asked for among them, and sums at the end."""
    width = None if args.all else WIDTH
    lost = report.declined
    parts = [left_out_table(report.left_out), fused_text(report.fused, width)]
    parts += [validation_table(report.fused)]
    parts += [_headed("Left apart", declined_table(lost, width))]
    if args.all:
        others = [d for d in report.decisions if not d.fused and d not in lost]
        title = "Declined by one pass, taken by a kernel of another"
        parts.append(_headed(title, declined_table(others)))
    parts.append(_headed("Outside of fused kernels", leftovers_table(report.leftovers, width)))
    title = "Kernels, by the rule that schedules them"
    parts.append(_headed(title, schedules_table(report.schedules, width)))
    if args.coverage:
        title = "\n".join(wrap(f"Coverage ({_COLUMNS})", WIDTH))
        parts.append(_headed(title, coverage_table(report.coverage, width)))
    if args.graphs:
        parts.append("What each kernel computes\n\n" + graphs_text(report.fused))
    return [*parts, summary_text(report, width)]


def _headed(title: str, text: str) -> str:
    return f"{title}\n\n{text}" if text else ""


def left_text(count: int) -> str:
    """Say how many operators are in no kernel of ours."""
    return f"{count or 'no'} operator{'s' * (count != 1)} of transformers left to TVM"


def summary_text(report: Report, width: int | None) -> str:
    """One row per function and number of rows: the sums of its predictions."""
    rows: list[tuple[str, ...]] = [
        ("function", "size", "predicted", "floor", "fused chains", "unfused", "gain over unfused")
    ]
    calls = calls_of(report)
    for name in dict.fromkeys(call["function"] for call in calls):
        own = [call for call in calls if call["function"] == name]
        for call in _ends(own) if width else own:
            apart, fused = call["unfused_s"], call["fused_s"]
            floor, rest = call["floor_s"], call["rest_s"]
            known = apart is not None and fused
            rows.append(
                (
                    name,
                    size_text(call["rows"]),
                    format_seconds(call["seconds"]),
                    "?" if floor is None or rest is None else format_seconds(floor + rest),
                    format_seconds(fused),
                    "?" if apart is None else format_seconds(apart),
                    f"{apart / fused:.2f}x" if known else "?",
                )
            )
    if len(rows) == 1:
        return ""
    title = (
        "In all (predicted seconds of one call; unfused: the best kernels of ours for the parts of "
        "the fused chains, launched apart; TVM's default is not predicted: bench measures it)"
    )
    return _headed("\n".join(wrap(title, WIDTH)), table(rows, width))


def _ends(rows: Sequence[_T]) -> list[_T]:
    """Return the first, the middle and the last of some rows, as far as there are so many."""
    return [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})]


def _scheduled(options: PipelineOptions) -> list[Pass]:
    """Return what takes the place of phase 4: Triton's kernels are not compiled."""
    passes: list[Pass] = [schedule_kernels(options)]
    if options.report is not None:
        passes += record_sources(options.target, options.report.material.sources)
    return [*passes, *count_launches(options)]


_PHASES = (*PHASES[:4], ("debug-phase4.py", _scheduled, "scheduling kernels"))


def fused_text(decisions: list[Decision], width: int | None = None) -> str:
    """One row per kernel and range of the dynamic dimension; equal kernels are counted.

    Within a `width` only the first, the middle and the last range are told.
    """
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
        ranges = _ranges(decision)
        for cells in _ends(ranges) if width and ranges else ranges:
            rows.append((*names, *cells))
            names = ("",) * 4
    title = "Fused (predicted seconds of one call, at the size given; unfused: our kernels apart)"
    return _headed(title, table(rows, width))


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


_COLUMNS = (
    "chains in fused kernels, of those there are; launches in all, and until they repeat; kernels "
    "that only move or cast elements, and the bytes that they read and write at the sizes given"
)


def summary(report: Report) -> dict[str, Any]:
    """Count what was fused by pass, what was declined, and the operators left over."""
    by_pass = Counter(d.pattern for d in report.fused)
    left = len(report.leftovers)
    return {"fused": dict(by_pass), "declined": len(report.declined), "left": left}
