"""What looks wrong in a compiled model, each with what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...workload import Attention
from ..material import FunctionGraph, Node
from . import numbers
from .functions import LIMITS, least_s
from .kernels import Kernel, title_of

if TYPE_CHECKING:
    from ..report import Report

LARGE_COPY = 1_000_000
"""Bytes from which on a copy is told."""

FAR_FROM_FLOOR = 0.05
"""Share of its roofline below which a kernel is told."""

HALVES = ("float16", "bfloat16")

RULES = {
    "transposed weight": "A weight is transposed each time the function runs",
    "large copy": "A kernel only copies more than 1 MB",
    "far from its roofline": "A kernel reaches less than 5 % of its roofline",
    "mask as data": "Attention reads a mask or a bias from memory",
    "float32 island": "A model in half precision computes in float32",
    "unfused norm": "A norm is a kernel of its own",
}
"""What is looked for; the page lists those that found nothing, too."""


def findings_of(
    report: Report, kernels: Sequence[Kernel], graphs: Mapping[str, FunctionGraph]
) -> list[dict[str, Any]]:
    """Return what was found, the most expensive first."""
    after = {g.function: g for g in report.material.after}
    found = [
        *_transposed(report, after),
        *_copies(report),
        *_far(kernels),
        *_masks(kernels),
        *_islands(report, graphs),
        *_norms(report),
    ]
    return sorted(found, key=lambda f: -(f["seconds"] or 0))


def _finding(
    rule: str, where: str, detail: str, todo: str, seconds: float | None = None
) -> dict[str, Any]:
    return {
        "rule": rule,
        "title": RULES[rule],
        "where": where,
        "detail": detail,
        "todo": todo,
        "seconds": seconds,
        "href": "",
    }


def _transposed(report: Report, after: Mapping[str, FunctionGraph]) -> Iterator[dict[str, Any]]:
    for function, graph in after.items():
        nodes = [
            n
            for n in graph.nodes
            if n.is_kernel and re.match(r"(fused_)?(transpose|permute_dims)", n.op)
            if n.weights and not n.reads
        ]
        if nodes:
            seconds = _least(nodes, report)
            moved = numbers.scaled(sum(n.moved for n in nodes), "B")
            yield _finding(
                "transposed weight",
                f"{function}: {_names(nodes)}",
                f"Kernels that only transpose parameters: {len(nodes)}, which read and write "
                f"{moved} in each call.",
                "Store the weight transposed, or let a matmul read it through R.permute_dims, "
                "which our kernels take as it is.",
                seconds,
            )


def _copies(report: Report) -> Iterator[dict[str, Any]]:
    for run in report.launches:
        large: dict[str, list[int]] = {}
        for name, size in run.copies:
            if size > LARGE_COPY:
                large.setdefault(name, []).append(size)
        at = ", ".join(f"{n} = {v}" for n, v in run.symbols)
        for name, sizes in large.items():
            spec = report.material.spec
            seconds = sum(sizes) / spec.dram_bytes_per_s if spec is not None else None
            yield _finding(
                "large copy",
                f"{run.function}: {name}",
                f"{name} only moves or casts elements: "
                f"{numbers.times(len(sizes), 'launch', 'launches')} with "
                f"{numbers.scaled(sum(sizes), 'B')} in a call" + (f" (at {at})." if at else "."),
                "Find what asks for another layout or dtype (a transposition that cannot pass a "
                "reshape, a concatenation, a cast) and move it to where the tensor is made, or to "
                "the weights.",
                seconds,
            )


def _far(kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    for kernel in kernels:
        low = [p for p in kernel.points if p.share is not None and p.share < FAR_FROM_FLOOR]
        if not low:
            continue
        worst = min(low, key=lambda p: p.share or 0.0)
        floor = numbers.seconds(worst.floor.seconds) if worst.floor is not None else ""
        limit = LIMITS.get(worst.fused.bound, worst.fused.bound)
        small = worst.fused.bound in ("launch", "latency")
        todo = (
            "The kernel is too small for the device: launching it and waiting for memory take "
            "longer than its work. Handle more rows in a call, or fuse it with its neighbours."
            if small
            else "Look at its candidates below. Measure it with `relax-fusion tune`, or give a "
            "plan of your own (plans=...); a family that fits may be missing."
        )
        found = _finding(
            "far from its roofline",
            title_of(kernel.decision),
            f"{numbers.percent(worst.share)} of the roofline at {worst.text}: "
            f"{numbers.seconds(worst.fused.seconds)}, floor {floor}, limited by "
            f"{limit}; {len(low)} of {numbers.times(len(kernel.points), 'range')}.",
            todo,
            worst.fused.seconds * max(kernel.calls.values()),
        )
        yield found | {"href": f"#{kernel.id}"}


def _masks(kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    for kernel in kernels:
        work = kernel.work
        if not isinstance(work, Attention):
            continue
        kind = next((s.name for s in work.graph.slots if s.name in ("mask", "bias")), None)
        if kind is None:
            continue
        point, moved = (kernel.points[-1] if kernel.points else None), ""
        if point is not None and not isinstance(point.size, int):
            size = work.bytes(**point.size._asdict()).get(kind)
            moved = f", {numbers.scaled(size, 'B')} at {point.text}" if size else ""
        found = _finding(
            "mask as data",
            title_of(kernel.decision),
            f"The kernel reads a {kind} from memory{moved}; a mask by position would cost nothing.",
            "If it is causal, a window or a prefix, write it as a comparison of positions in the "
            "graph, or pass causal_mask to R.nn.attention. A bias that is learned has to be read.",
        )
        yield found | {"href": f"#{kernel.id}"}


def _islands(report: Report, graphs: Mapping[str, FunctionGraph]) -> Iterator[dict[str, Any]]:
    inside = {(d.function, n) for d in report.fused for n in (*d.chain, *d.where.split(", "))}
    for function, graph in graphs.items():
        products = [n for n in graph.nodes if n.op in ("matmul", "nn.attention")]
        half = sum(n.dtype in HALVES for n in products)
        if 2 * half <= len(products):
            continue
        island = [
            n
            for n in graph.nodes
            if n.dtype == "float32" and (function, n.name) not in inside
            if n.op in ("matmul", "nn.softmax", "add", "multiply") or n.op.startswith("nn.")
        ]
        if island:
            yield _finding(
                "float32 island",
                f"{function}: {_names(island)}",
                f"{numbers.times(len(island), 'operator')} outside of fused kernels give float32, "
                f"while {half} of {len(products)} matmuls are in half precision.",
                "Remove the casts around them; fused kernels sum in float32 anyway.",
                _least(island, report),
            )


def _norms(report: Report) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for left in report.leftovers:
        if left.kind == "norm":
            groups.setdefault((left.function, left.reason), []).append(left.where)
    for (function, reason), names in groups.items():
        found = _finding(
            "unfused norm",
            f"{function}: {', '.join(names[:3])}" + (" …" * (len(names) > 3)),
            f"{numbers.times(len(names), 'norm')} read and write a whole tensor: {reason}.",
            "Let a matmul with a weight read the norm directly, or accept it where nothing "
            "multiplies its result.",
        )
        yield found | {"href": "#not-fused"}


def _least(nodes: Sequence[Node], report: Report) -> float | None:
    each = [least_s(node, report.material.spec) for node in nodes]
    return None if None in each else sum(s for s in each if s is not None)


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(n.name for n in nodes[:3]) + (" …" * (len(nodes) > 3))
