"""A report as text: its tables, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent
from typing import TYPE_CHECKING

from ..workload import Graph
from .decision import Decision
from .tables import (
    calls_table,
    coverage_table,
    declined_table,
    fused_table,
    left_out_table,
    leftovers_table,
    schedules_table,
    validation_table,
)

if TYPE_CHECKING:
    from .report import Report


def report_text(
    report: Report,
    width: int | None = None,
    *,
    every: bool = False,
    coverage: bool = False,
    graphs: bool = False,
) -> str:
    """Return the tables of a report.

    Parameters
    ----------
    report : Report
        What is told.
    width : int, optional
        Characters of a line, beyond which cells go on below.
    every : bool
        Tell all ranges and tiles, and what one pass declined and another took.
    coverage, graphs : bool
        Tell how much is in kernels of ours, and what each of them computes.
    """
    lost = report.declined
    tables = [left_out_table(report.left_out), fused_table(report.fused, every)]
    tables += [validation_table(report.fused), declined_table(lost)]
    if every:
        others = [d for d in report.decisions if not d.fused and d not in lost]
        title = "Declined by one pass, taken by a kernel of another"
        tables.append(declined_table(others, title))
    tables += [leftovers_table(report.leftovers), schedules_table(report.schedules, every)]
    tables += [coverage_table(report.coverage)] if coverage else []
    parts = [each.text(width) for each in tables]
    parts += ["What each kernel computes\n\n" + graphs_text(report.fused)] if graphs else []
    parts.append(calls_table(report.calls, every).text(width))
    found = [part for part in parts if part] or ["no chain of any pattern was found"]
    return "\n\n".join(found)


def graphs_text(decisions: Sequence[Decision]) -> str:
    """Return what each kernel computes, statement by statement, under its name."""
    graphs = {d.kernel: d.workload.graph for d in decisions if d.workload is not None}
    return "\n\n".join(f"{name}\n{_picture(graph)}" for name, graph in graphs.items())


def _picture(graph: Graph) -> str:
    lines = ["reads " + ", ".join(map(str, graph.inputs)), *str(graph).splitlines()]
    lines.append("returns " + ", ".join(map(str, graph.outputs)))
    return indent("\n".join(lines), "  ")
