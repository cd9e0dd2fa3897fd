"""The decisions of one compilation: as data, as text, as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from textwrap import indent
from typing import Annotated, Any

from pydantic import InstanceOf

from ..errors import PipelineError
from ..estimator import format_seconds
from ..estimator.choose import size_text
from ..estimator.shape import box_sizes
from ..validation import check, json_text
from ..workload import Graph, Workload
from ..workload.json import as_record
from .coverage import Coverage, Launches, Leftover, coverage_of
from .decision import Decision, LeftOut, Scheduling
from .item import Item
from .material import Material
from .tables import (
    declined_table,
    left_out_table,
    leftovers_table,
    schedules_table,
    table,
    validation_table,
)


@dataclass
class Report:
    """Collects what the fusing passes decided, and which rule scheduled which kernel.

    Parameters
    ----------
    decisions : list of Decision
        In the order in which they were made; pass the report to the pipeline to have it filled.
    schedules : list of Scheduling
        One for each PrimFunc, in the order of the module.
    leftovers : list of Leftover
        One for each operation of transformers that is in no fused kernel, with the reason.
    launches : list of Launches
        What each function runs; filled in the last phase.
    work : list of Item
        What each function multiplies, fused or not: sizes, bytes and operations follow.
    kernels : dict of str to str
        By the name of each PrimFunc a hash of its code; filled when kernels are scheduled.
    device : str
        What was compiled for; the pipeline fills it in.  Where the target names no device, the one
        whose numbers were taken instead is named here.
    material : Material
        What `to_html` shows beside all that; the pipeline fills it in.
    left_out : list of LeftOut
        Passes and chains without which a module was compiled, as it could not be with them.
    """

    decisions: Annotated[list[Decision], InstanceOf()] = field(default_factory=list)
    schedules: Annotated[list[Scheduling], InstanceOf()] = field(default_factory=list)
    leftovers: Annotated[list[Leftover], InstanceOf()] = field(default_factory=list)
    launches: Annotated[list[Launches], InstanceOf()] = field(default_factory=list)
    work: Annotated[list[Item], InstanceOf()] = field(default_factory=list)
    kernels: Annotated[dict[str, str], InstanceOf()] = field(default_factory=dict)
    device: str = ""
    material: Annotated[Material, InstanceOf()] = field(default_factory=Material)
    left_out: Annotated[list[LeftOut], InstanceOf()] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(self, PipelineError, "report")

    @property
    def fused(self) -> list[Decision]:
        """The chains that became kernels."""
        return [d for d in self.decisions if d.fused]

    @property
    def declined(self) -> list[Decision]:
        """The chains that were left alone, and of which no other kernel of ours took the result.

        Those with an operation among the `leftovers` are here, too, whoever took the rest.  All
        that a pass declined on the way is in `decisions`.
        """
        taken = {(d.function, name) for d in self.fused for name in d.names}
        left = {(x.function, x.where) for x in self.leftovers}
        lost = []
        for d in self.decisions:
            names = {(d.function, name) for name in d.names} - taken
            result = (d.function, d.where.rpartition(", ")[2])
            if not d.fused and (result in names or names & left):
                lost.append(d)
        return lost

    @property
    def coverage(self) -> list[Coverage]:
        """What became of each function: chains found of those there are, launches, copies."""
        return coverage_of(self.decisions, self.leftovers, self.launches)

    def to_json(self) -> str:
        """Return every decision as JSON, workloads and plans included: a list of objects.

        Infinities and NaN, which JSON does not have, are null.

        ``pattern``, ``spelling``, ``function``, ``where``, ``kernel``
            Text, as in `Decision`; ``kernel`` is empty for a chain that was left.
        ``fused``
            Whether it became a kernel.
        ``workload``
            The fields of the workload, and its ``key``; missing where none was derived.
        ``graph``
            What the workload computes: its statements, one a string; missing with it.
        ``plans``
            The fields of each `TilePlan`, with ``upper``, the last size that it serves (-1: all
            that are left); missing where nothing was fused.
        ``predictions``
            ``upper``, the ``size`` that was priced, ``fused_s`` and ``unfused_s`` in seconds,
            ``bound``, what limits the kernel, and ``measured_s``, its seconds in a tuning database
            (null where it was not measured).
        ``validation``
            ``"checked"``, or ``"not checked: "`` and why; missing where nobody asked.
        ``decline``
            ``reason`` (a value of `Reason`), ``detail``, and the two times where they were asked
            for; missing for a chain that was fused.
        """
        return json_text([_record(d) for d in self.decisions])

    def schedules_to_json(self) -> str:
        """Return which rule scheduled which PrimFunc as JSON: a list of objects.

        ``function``, ``rule``
            Text, as in `Scheduling`; ``rule`` is empty where no rule had a schedule.
        ``plans``
            As in `to_json`; missing where the rule goes by no plan of ours.
        ``refusals``
            ``rule``, ``reason`` and ``detail`` of each rule that was asked before and could not.
        """
        return json_text([_scheduling(s) for s in self.schedules])

    def leftovers_to_json(self) -> str:
        """Return what was left as JSON: a list of objects with the fields of `Leftover`."""
        return json_text(self.leftovers)

    def work_to_json(self) -> str:
        """Return what each function multiplies as JSON: a list of objects.

        They have the fields of `Item`, whose ``workload`` is an object (null where nothing was
        fused); sizes are numbers, or text in the names of symbolic sizes.
        """
        return json_text([item.to_record() for item in self.work])

    def coverage_to_json(self) -> str:
        """Return what became of each function as JSON: a list of objects.

        ``function``, ``chains``
            Its name, and by chain how many are in fused kernels and how many there are.
        ``launches``, ``per_layer``
            The names of the kernels in the order of their calls, and how many a layer takes (null
            where nothing repeats); missing where the pipeline did not come that far.
        ``copies``, ``copied_bytes``, ``symbols``
            Kernels that only move or cast elements, each with the bytes that it reads and writes;
            their sum; the values of symbolic sizes for which they were counted.
        """
        return json_text([_covered(c) for c in self.coverage])

    def calls_to_json(self) -> str:
        """Return what one call of each function is predicted to take as JSON: a list of objects.

        A function that runs no fused kernel is not in it: nothing says how many rows it has.  What
        functions of the module take that it calls is in their own entries.

        ``function``, ``rows``
            Its name, and how many rows its matmuls have in this call.
        ``seconds``, ``fused_s``, ``rest_s``
            All kernels, of which those of fused chains, and the least that the others take.  The
            others are counted once, at the `symbols` of `coverage_to_json`, whatever the rows are,
            and without the operations of matmuls among them.  ``rest_s`` is null where they are not
            known, as after `partition`; ``seconds`` are those of the fused chains alone then.
        ``unfused_s``, ``floor_s``
            What the fused chains would take apart, and the least that their kernels could take;
            null where it is not known.
        """
        from .html.functions import calls_of

        return json_text(calls_of(self))

    def text(self) -> str:
        """Return the device and tables: what was fused (equal kernels counted), what not, rules."""
        lines = [
            left_out_table(self.left_out),
            _fused_table(self.fused),
            validation_table(self.fused),
            declined_table(self.declined),
            leftovers_table(self.leftovers),
            schedules_table(self.schedules),
        ]
        found = [line for line in lines if line] or ["no chain of any pattern was found"]
        return "\n\n".join([f"for {self.device}", *found] if self.device else found)

    def to_html(self, seconds: float | None = None) -> str:
        """Return one page for a browser: graphs, plans, times, what was declined, and why.

        It loads nothing: styles, pictures and script are in it.

        Parameters
        ----------
        seconds : float, optional
            How long candidates may be priced and texts of kernels be written; a tenth of the time
            that the phases took by default, 1 s at least.  The page names what was left out.
        """
        from .html import to_html

        return to_html(self, seconds)


def graphs_text(decisions: list[Decision]) -> str:
    """Return what each kernel computes, statement by statement, under its name."""
    graphs = {d.kernel: d.workload.graph for d in decisions if d.workload is not None}
    return "\n\n".join(f"{name}\n{_picture(graph)}" for name, graph in graphs.items())


def _picture(graph: Graph) -> str:
    lines = ["reads " + ", ".join(map(str, graph.inputs)), *str(graph).splitlines()]
    lines.append("returns " + ", ".join(map(str, graph.outputs)))
    return indent("\n".join(lines), "  ")


def _record(decision: Decision) -> dict[str, Any]:
    record: dict[str, Any] = {
        "pattern": decision.pattern,
        "spelling": decision.spelling,
        "function": decision.function,
        "where": decision.where,
        "kernel": decision.kernel,
        "fused": decision.fused,
    }
    if decision.workload is not None:
        record |= _work_record(decision.workload)
    if decision.plans is not None:
        record["plans"] = decision.plans.to_attr()
    record["predictions"] = [
        {
            "upper": p.upper,
            "size": p.size if isinstance(p.size, int) else p.size._asdict(),
            "fused_s": p.fused.seconds,
            "unfused_s": p.unfused.seconds,
            "bound": p.fused.bound,
            "measured_s": p.measured_s,
        }
        for p in decision.predictions
    ]
    if decision.validation:
        record["validation"] = decision.validation
    if decision.decline is not None:
        record["decline"] = {
            "reason": decision.decline.reason.value,
            "detail": decision.decline.detail,
            "fused_s": decision.decline.fused_s,
            "unfused_s": decision.decline.unfused_s,
        }
    return record


@lru_cache(maxsize=256)
def _work_record(work: Workload) -> dict[str, Any]:
    workload = {"key": work.key, **as_record(work)}
    return {"workload": workload, "graph": str(work.graph).splitlines()}


def _covered(coverage: Coverage) -> dict[str, Any]:
    record: dict[str, Any] = {"function": coverage.function, "chains": coverage.chains}
    if coverage.launches is not None:
        record |= {
            "launches": coverage.launches.kernels,
            "per_layer": coverage.per_layer,
            "copies": coverage.launches.copies,
            "copied_bytes": coverage.copied,
            "symbols": dict(coverage.launches.symbols),
        }
    return record


def _scheduling(scheduling: Scheduling) -> dict[str, Any]:
    record: dict[str, Any] = {"function": scheduling.function, "rule": scheduling.rule}
    if scheduling.plans is not None:
        record["plans"] = scheduling.plans.to_attr()
    record["refusals"] = [
        {"rule": rule, "reason": decline.reason.value, "detail": decline.detail}
        for rule, decline in scheduling.refusals
    ]
    return record


def _fused_table(decisions: list[Decision]) -> str:
    """One row per kernel and function, with how often it is called."""
    if not decisions:
        return ""
    counts = Counter((d.function, d.kernel) for d in decisions)
    names = ("function", "pass", "chain", "calls", "size", "tile", "predicted", "unfused")
    rows: list[tuple[str, ...]] = [names]
    seen = set()
    for d in decisions:
        if (d.function, d.kernel) in seen:
            continue
        seen.add((d.function, d.kernel))
        rows.append(
            (
                d.function,
                d.pattern,
                d.spelling,
                str(counts[d.function, d.kernel]),
                *_last(d),
            )
        )
    return table(rows)


def _last(decision: Decision) -> tuple[str, ...]:
    """Return the last size that was priced, its tile, and the two times there."""
    if not decision.predictions:
        return ("",) * 4
    last = decision.predictions[-1]
    assert decision.plans is not None and decision.workload is not None, "a fused chain has plans"
    plan = decision.plans.plan_for(**box_sizes(decision.workload, last.size))
    return size_text(last.size), plan.text, last.fused_text, format_seconds(last.unfused.seconds)
