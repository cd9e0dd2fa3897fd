"""The chains of a page: what each kernel computes, costs, and was chosen among."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...estimator.family import Backend
from ..decision import Decision
from ..material import FunctionGraph, Node
from . import numbers
from .candidates import Clock, candidates_of
from .kernels import Kernel, Point, how_text, plan_text, span_text, title_of

MOST_STEPS = 100
"""Ranges of one plan that a table lists."""


def chain_entry(
    kernel: Kernel, graphs: Mapping[str, FunctionGraph], backend: Backend, clock: Clock
) -> dict[str, Any]:
    """Return the data of one kernel's card."""
    decision, work = kernel.decision, kernel.work
    last = kernel.points[-1] if kernel.points else None
    return {
        "id": kernel.id,
        "colour": kernel.colour,
        "title": title_of(decision),
        "kernel": decision.kernel,
        "pattern": decision.pattern,
        "where": decision.where,
        "calls": [{"function": name, "count": n} for name, n in kernel.calls.items()],
        "unit": kernel.unit,
        "is_static": kernel.is_static,
        "fixed": kernel.fixed,
        "validation": decision.validation,
        "facts": _facts(kernel, last),
        "operators": _operators(decision, graphs.get(decision.function)),
        "graph": str(work.graph) if work is not None else "",
        "reads": [str(o) for o in work.graph.inputs] if work is not None else [],
        "returns": [str(o) for o in work.graph.outputs] if work is not None else [],
        "ranges": [point_entry(point) for point in kernel.points],
        "steps": _steps(kernel),
        "steps_left_out": max(0, len(kernel.steps) - MOST_STEPS),
        "boxes": len(decision.plans.boxes) if decision.plans is not None else 0,
        "candidates": candidates_of(kernel, backend, clock),
    }


def point_entry(point: Point) -> dict[str, Any]:
    """Return what a kernel costs in one range of rows."""
    floor = point.floor
    return {
        "rows": point.rows,
        "size": point.text,
        "lower": point.lower,
        "upper": point.upper,
        "span": span_text(point.lower, point.upper),
        "plan": plan_text(point.plan),
        "how": how_text(point.plan),
        "fused_s": numbers.number(point.fused.seconds),
        "unfused_s": numbers.number(point.unfused_s),
        "measured_s": numbers.number(point.measured_s),
        "is_miss": point.is_miss,
        "floor_s": numbers.number(floor.seconds) if floor is not None else None,
        "share": numbers.number(point.share),
        "bound": point.fused.bound,
        "bytes": floor.bytes if floor is not None else None,
        "flops": floor.flops if floor is not None else None,
        "intensity": floor.intensity if floor is not None else None,
    }


def _facts(kernel: Kernel, last: Point | None) -> list[str]:
    """Return short sentences about a workload."""
    work, facts = kernel.work, []
    for name, label in (("k", "k"), ("n", "n"), ("dtype", "")):
        value = getattr(work, name, None)
        if isinstance(value, int | str):
            shown = numbers.count(value) if isinstance(value, int) else value
            facts.append(f"{label} = {shown}" if label else shown)
    heads = getattr(work, "q_heads", None), getattr(work, "kv_heads", None)
    if all(isinstance(n, int) for n in heads):
        facts.append(f"{heads[0]} query heads, {heads[1]} of keys")
    if last is not None and last.floor is not None:
        facts.append(f"{numbers.scaled(last.floor.bytes, 'B')} at {last.text}")
        facts.append(numbers.scaled(last.floor.flops, "flop"))
    return facts


def _operators(decision: Decision, graph: FunctionGraph | None) -> list[dict[str, Any]]:
    """Return the operators that the first of the chains had."""
    names = set(decision.chain) | set(decision.where.split(", "))
    nodes = graph.nodes if graph is not None else ()
    return [operator_entry(node) for node in nodes if node.name in names]


def operator_entry(node: Node) -> dict[str, Any]:
    """Return a row of a table of operators."""
    return {
        "name": node.name,
        "op": node.op,
        "type": type_text(node),
        "reads": [*node.reads, *node.weights],
        "bytes": node.moved,
    }


def type_text(node: Node) -> str:
    """Return dtype and shape of a result."""
    return f"{node.dtype} [{node.shape}]" if node.dtype else ""


def _steps(kernel: Kernel) -> list[dict[str, Any]]:
    """Return which plan serves which rows."""
    return [
        {"lower": a, "upper": b, "span": span_text(a, b), "plan": plan_text(p)}
        | {"how": how_text(p), "family": p.family or p.backend}
        for a, b, p in kernel.steps[:MOST_STEPS]
    ]


def graphs_by_function(graphs: Sequence[FunctionGraph]) -> dict[str, FunctionGraph]:
    """Return the last graph of each function."""
    return {graph.function: graph for graph in graphs}
