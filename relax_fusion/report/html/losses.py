"""What was not fused: declined chains and operators left over, with reasons and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import Reason
from ...hardware import DeviceSpec
from ..coverage import Leftover
from ..decision import Decision
from ..material import FunctionGraph, Node
from . import numbers
from .functions import least_s
from .remedies import remedy, remedy_of_leftover

if TYPE_CHECKING:
    from ..report import Report

MOST_PLACES = 40
"""Places of one refusal that a page names."""


HARMLESS = (Reason.NOT_PROFITABLE.value, Reason.OVERLAP.value)
"""Reasons that are told last: what was declined for them is better off."""


OTHERS = (
    "A fusing pass that has it in its chain (register_pass), or a neighbour that computes it on "
    "the way."
)
"""What it would take to fuse a kernel that no pattern covers."""


def declines_of(report: Report, graphs: Mapping[str, FunctionGraph]) -> list[dict[str, Any]]:
    """Return one record for each pass and reason, the most expensive first."""
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for decision in report.declined:
        key = (decision.function, decision.pattern, decision.spelling, str(decision.decline))
        groups.setdefault(key, []).append(decision)
    owner = {(d.function, n): d.pattern for d in report.fused for n in d.names}
    found = []
    for some in groups.values():
        entry = _decline(some, graphs, report.material.spec)
        taken = [owner.get((d.function, n)) for d in some for n in d.names]
        makers = sorted({maker for maker in taken if maker is not None})
        entry["elsewhere"] = makers
        entry["is_loss"] = entry["reason"] not in HARMLESS
        if makers:
            entry["cost"] += f" {' and '.join(makers)} took some of them."
        found.append(entry)
    return sorted(found, key=lambda d: (not d["is_loss"], -(d["seconds"] or 0)))


def _decline(
    some: list[Decision], graphs: Mapping[str, FunctionGraph], spec: DeviceSpec | None
) -> dict[str, Any]:
    first, refusal = some[0], some[0].decline
    assert refusal is not None, "only declined chains come here"
    fused, unfused = numbers.number(refusal.fused_s), numbers.number(refusal.unfused_s)
    each = [_nodes(d.function, d.names, graphs) for d in some]
    alone = [_sum_of(least_s(node, spec) for node in nodes) for nodes in each]
    return {
        "function": first.function,
        "pattern": first.pattern,
        "spelling": first.spelling,
        "count": len(some),
        "places": [d.where for d in some[:MOST_PLACES]],
        "places_left_out": max(0, len(some) - MOST_PLACES),
        "reason": refusal.reason.value,
        "detail": refusal.detail,
        "remedy": remedy(refusal.reason),
        "fused_s": fused,
        "unfused_s": unfused,
        "seconds": _sum_of(alone),
        "operators": [f"{n.name} = {n.op}" for n in each[0]],
        "elsewhere": list[str](),
        "cost": _cost(fused, unfused, alone),
    }


def _cost(fused: float | None, unfused: float | None, alone: Sequence[float | None]) -> str:
    """Return a sentence on what it costs that a chain is left apart."""
    if fused is not None and unfused is not None:
        gap = fused - unfused
        if gap >= 0:
            return f"Nothing: fused, each is predicted to take {numbers.seconds(gap)} longer."
        small = "less than the error of the prediction"
        return f"At most {numbers.seconds(-gap)} each, {small}."
    whole = _sum_of(alone)
    if whole is None:
        return "Unknown: the page has no graph of this function, or no device."
    same = len(alone) > 1 and len(set(alone)) == 1
    each = f"{numbers.seconds(alone[0])} each" if same else ""
    return f"The operators take at least {numbers.seconds(whole)} as kernels of their own" + (
        f" ({each})." if each else "."
    )


def leftovers_of(report: Report, graphs: Mapping[str, FunctionGraph]) -> list[dict[str, Any]]:
    """Return one record for each kind and reason, the most expensive first."""
    groups: dict[tuple[str, str, str], list[Leftover]] = {}
    for left in report.leftovers:
        groups.setdefault((left.function, left.kind, left.reason), []).append(left)
    found = []
    for (function, kind, reason), some in groups.items():
        nodes = _nodes(function, [left.where for left in some], graphs)
        found.append(
            {
                "function": function,
                "kind": kind,
                "reason": reason,
                "chain": some[0].chain,
                "count": len(some),
                "places": [left.where for left in some[:MOST_PLACES]],
                "places_left_out": max(0, len(some) - MOST_PLACES),
                "type": f"{nodes[0].dtype} [{nodes[0].shape}]" if nodes else "",
                "bytes": sum(node.moved for node in nodes) or None,
                "seconds": _sum_of(least_s(node, report.material.spec) for node in nodes),
                "remedy": remedy_of_leftover(kind, reason),
            }
        )
    return sorted(found, key=lambda x: -(x["seconds"] or 0))


def costliest(
    declines: Iterable[Mapping[str, Any]],
    leftovers: Iterable[Mapping[str, Any]],
    functions: Iterable[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """Return what costs most of all that is not fused; None if everything is fused.

    Kernels that no pattern covers are told only where no chain and no operator of a pattern is
    left.
    """
    found = [_answer(d["pattern"], d, d["detail"], "") for d in declines if d["is_loss"]]
    found += [_answer(x["kind"], x, x["reason"], x["type"]) for x in leftovers]
    if not found:
        why = "it is in no pattern of ours"
        for f in functions:
            name = {"function": f["function"], "remedy": OTHERS}
            found += [_answer(o["kernel"], {**o, **name}, why, "") for o in f["others"]]
    return max(found, key=lambda a: a["seconds"] or 0.0, default=None)


def _answer(what: str, entry: Mapping[str, Any], reason: str, kind: str) -> dict[str, Any]:
    names = ("function", "count", "seconds", "remedy")
    places = entry.get("places", ("",))
    told = {"what": what, "where": places[0], "reason": reason.rstrip("."), "type": kind}
    return {**told, **{name: entry[name] for name in names}}


def _nodes(function: str, names: Iterable[str], graphs: Mapping[str, FunctionGraph]) -> list[Node]:
    wanted = set(names)
    graph = graphs.get(function)
    return [node for node in graph.nodes if node.name in wanted] if graph is not None else []


def _sum_of(each: Iterable[float | None]) -> float | None:
    known = [s for s in each if s is not None]
    return sum(known) if known else None
