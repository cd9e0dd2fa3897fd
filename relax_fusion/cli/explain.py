"""``relax-fusion explain``: what would be fused, why not the rest, and which rules make kernels."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from tvm.ir.transform import Pass

from ..hardware.target import device_of, has_triton
from ..options import PipelineOptions, make_options
from ..phases import run_phases
from ..pipeline import PHASES, plan_memory, schedule_kernels
from ..report import Material, Report
from ..report.record import record_of
from ..report.tables import WIDTH, report_text
from ..triton_bridge.append import AppendInAttention
from ..triton_bridge.sources import RecordSources
from .artifact import check_written, write_page
from .build import guarded
from .console import Console
from .model_arguments import named, pipeline_options
from .source import bounds, described, exported_source, facts_of, longest


def explain_command(args: argparse.Namespace, console: Console) -> int:
    """Run the phases that decide, and print what they decided."""
    check_written({"--html": args.html}, args.source, args.database)
    device = device_of(args.target)
    source, model = exported_source(args, console)
    report = Report(material=Material(tvm_memory={} if args.coverage else None))
    told = {"report": report, "progress": console.step, "variable_bounds": bounds(model)}
    options = make_options(args.target, {**pipeline_options(args), **told})
    console.step(f"looking for chains to fuse for {device.description}")
    report.material.model = f"{source.name}, {described(model)}"
    report.material.most = longest(model)
    guarded(lambda: run_phases(options, _PHASES)(model.mod), args.target)
    if args.html is not None:
        write_page(named(args.page)(report), args.html, console)
    facts = facts_of(source.name, model, args)
    facts |= {"fused": len(report.fused), "declined": len(report.declined)}
    if args.json:
        console.json({**record_of(report), **facts})
        return 0
    console.result(
        f"{source.name}, {described(model)}, for {device.description}: "
        f"{len(report.fused)} chains fused, {left_text(len(report.leftovers))}"
    )
    wanted = {"every": args.all, "coverage": args.coverage, "graphs": args.graphs}
    console.result("\n" + report_text(report, None if args.all else WIDTH, **wanted))
    return 0


def left_text(count: int) -> str:
    """Say how many operators are in no kernel of ours."""
    return f"{count or 'no'} operator{'s' * (count != 1)} of transformers left to TVM"


def _scheduled(options: PipelineOptions) -> list[Pass]:
    """Return what takes the place of phase 4: Triton's kernels are not compiled."""
    passes: list[Pass] = [AppendInAttention()] if has_triton(options.target) else []
    passes.append(schedule_kernels(options))
    if options.report is not None:
        passes.append(RecordSources(options.target, options.report.material.sources))
    return [*passes, *plan_memory(options)]


_PHASES = (*PHASES[:4], ("debug-phase4.py", _scheduled, "scheduling kernels"))


def summary(report: Report) -> dict[str, Any]:
    """Count what was fused by pass, what was declined, and the operators left over."""
    by_pass = Counter(d.pattern for d in report.fused)
    left = len(report.leftovers)
    return {"fused": dict(by_pass), "declined": len(report.declined), "left": left}
