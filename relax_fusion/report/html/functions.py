"""What one call of each function costs, and how that comes about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...estimator.prediction import DRAM_EFFICIENCY
from ...hardware import DeviceSpec
from ..material import FunctionGraph, Node
from ..sizes import names_in, value_of
from . import numbers
from .kernels import Kernel, kernels_of

if TYPE_CHECKING:
    from ..report import Report

SHOWN_ROWS = (1, 16, 64, 256, 1024, 4096)
"""Rows at which a call is priced, those among them that a function can have."""

LIMITS = {
    "dram": "memory bandwidth",
    "l2": "L2 bandwidth",
    "compute": "arithmetic",
    "latency": "latency",
    "launch": "overheads",
}
"""What bounds of predictions are called."""


def calls_of(report: Report) -> list[dict[str, Any]]:
    """Return the predicted times of one call of each function, as `Report.calls_to_json` says."""
    names = ("rows", "seconds", "fused_s", "rest_s", "unfused_s", "floor_s")
    return [
        {"function": function["function"], **{name: call[name] for name in names}}
        for function in functions_of(report, kernels_of(report.fused, report.material.spec))
        for call in function["calls"]
    ]


def functions_of(report: Report, kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Return one record for each function that runs kernels."""
    coverage = {c.function: c for c in report.coverage}
    graphs = {g.function: g for g in report.material.after}
    names = dict.fromkeys([*(n for k in kernels for n in k.calls), *coverage])
    found = []
    for name in names:
        covered = coverage.get(name)
        runs = covered.launches if covered is not None else None
        own = [k for k in kernels if name in k.calls]
        declined = sum(d.function == name for d in report.declined)
        graph = graphs.get(name)
        others = other_kernels(graph, report)
        each = [other["seconds"] for other in others]
        rest = None if graph is None or None in each else float(sum(each))
        rows = _rows(own, _limit(name, graph, report))
        found.append(
            {
                "function": name,
                "launches": len(runs.kernels) if runs is not None else None,
                "per_layer": covered.per_layer if covered is not None else None,
                "fused": sum(k.calls[name] for k in own),
                "declined": declined,
                "left": sum(left.function == name for left in report.leftovers),
                "copies": len(runs.copies) if runs is not None else None,
                "copied": covered.copied if covered is not None else 0,
                "symbols": dict(runs.symbols) if runs is not None else {},
                "chains": covered.chains if covered is not None else {},
                "others": others,
                "calls": [call_at(name, own, rest, n) for n in rows],
            }
        )
    return found


def _limit(function: str, graph: FunctionGraph | None, report: Report) -> int | None:
    """Return the most rows that a function's matmuls can have; None where no bound says it."""
    limits = dict(graph.limits) if graph is not None else {}
    for name, n in report.material.most.items():
        limits[name] = min(n, limits.get(name, n))
    own = [i for i in report.work if i.function == function and i.status == "fused"]
    rows = [p.m for i in own if i.kind != "attention" for p in i.products if names_in(p.m)]
    most = [value_of(each, limits) for each in rows]
    known = [n for n in most if n is not None]
    return max(known) if known and len(known) == len(most) else None


def _rows(kernels: Sequence[Kernel], limit: int | None) -> list[int]:
    """Return the rows at which a function is priced, up to its limit."""
    priced = [k for k in kernels if len(k.points) > 1]
    most = max((p.rows * k.sequences for k in priced for p in k.points), default=0)
    most = min(most, limit or most)
    if not most:
        static = Counter(k.points[0].rows * k.sequences for k in kernels if k.points)
        return [max(static, key=lambda n: (static[n], -n))] if static else []
    least = max(k.sequences for k in kernels)  # a row of each, where the sequences are told
    return sorted({*(max(n, least) for n in SHOWN_ROWS if n <= most), most})


def call_at(
    function: str, kernels: Sequence[Kernel], rest: float | None, rows: int
) -> dict[str, Any]:
    """Return what one call costs at so many rows; kernels of fixed sizes have their own.

    `rest` is the least that kernels take which no pass of ours made, None where nobody knows them.
    """
    fused = moved = flops = 0.0
    unfused: float | None = 0.0
    floor: float | None = 0.0
    bounds: dict[str, float] = {}
    parts: list[dict[str, Any]] = []
    for kernel in kernels:
        point = kernel.at(max(1, rows // kernel.sequences))
        seconds = numbers.number(point.fused.seconds) if point is not None else None
        if point is None or seconds is None:
            continue
        n = kernel.calls[function]
        fused += n * seconds
        limit = LIMITS.get(point.fused.bound, point.fused.bound)
        bounds[limit] = bounds.get(limit, 0.0) + n * seconds
        apart = numbers.number(point.unfused_s)
        unfused = unfused + n * apart if unfused is not None and apart is not None else None
        if point.floor is None:
            floor = None
        elif floor is not None:
            floor += n * point.floor.seconds
            moved, flops = moved + n * point.floor.bytes, flops + n * point.floor.flops
        parts.append({"id": kernel.id, "seconds": n * seconds, "count": n})
    parts.sort(key=lambda p: -p["seconds"])
    return {
        "rows": rows,
        "fused_s": fused,
        "rest_s": rest,
        "seconds": fused + (rest or 0.0),
        "unfused_s": unfused,
        "floor_s": floor or None,
        "share": floor / fused if fused and floor else None,
        "bytes": moved if floor else None,
        "flops": flops if floor else None,
        "limits": [
            [name, bounds[name] / fused] for name in sorted(bounds, key=lambda b: -bounds[b])
        ]
        if fused
        else [],
        "parts": parts,
    }


def other_kernels(graph: FunctionGraph | None, report: Report) -> list[dict[str, Any]]:
    """Return the kernels of a function that no pass of ours made, with the least they take."""
    ours = {d.kernel for d in report.fused}
    rules = {s.function: s.rule for s in report.schedules}
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes if graph is not None else ():
        if node.is_kernel and node.op not in ours:
            groups.setdefault(node.op, []).append(node)
    found = []
    for name, nodes in groups.items():
        each = [least_s(node, report.material.spec) for node in nodes]
        known = [s for s in each if s is not None]
        found.append(
            {
                "kernel": name,
                "rule": rules.get(name, ""),
                "count": len(nodes),
                "result": f"{nodes[0].dtype} [{nodes[0].shape}]",
                "bytes": sum(node.moved for node in nodes),
                "seconds": sum(known) if known else None,
                "first": nodes[0].name,
            }
        )
    return sorted(found, key=lambda o: -(o["seconds"] or 0))


def least_s(node: Node, spec: DeviceSpec | None) -> float | None:
    """Return the least that an operator takes as a kernel of its own.

    A launch, and the longer of its bytes at the bandwidth that is reached and its operations at
    the peak rate.
    """
    if spec is None:
        return None
    rate = spec.tensor_flops_per_s(node.dtype) if node.dtype != "float32" else 0.0
    compute = node.flops / (rate or spec.fma_float32_flops_per_s)
    return spec.launch_s + max(node.moved / (spec.dram_bytes_per_s * DRAM_EFFICIENCY), compute)
