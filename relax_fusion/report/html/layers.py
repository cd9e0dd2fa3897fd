"""The graph of a function before and after fusing, with its layers folded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..decision import Decision
from ..material import FunctionGraph, Node
from .chains import type_text
from .kernels import Kernel, title_of

MOST_NODES = 80
"""Bindings of one stretch that a picture shows."""

VIEWS = ("reshape", "memory.view", "expand_dims", "squeeze", "flatten")
"""Operators that are no kernel and only tell another shape."""


def fold(labels: Sequence[str]) -> tuple[int, int, int]:
    """Return where a layer begins, how long it is, and how often it comes; 0 and 1 for none.

    Examples
    --------
    >>> fold(["take", "norm", "ffn", "norm", "ffn", "norm", "ffn", "head"])
    (1, 2, 3)
    """
    best = (0, 0, 0)
    for distance in range(1, len(labels) // 2 + 1):
        run = 0
        for i in range(len(labels) - distance):
            run = run + 1 if labels[i] == labels[i + distance] else 0
            if run >= max(distance, best[0] + 1):
                best = (run, distance, i - run + 1)
        if 2 * best[0] > len(labels):
            break
    run, distance, start = best
    return (start, distance, run // distance + 1) if distance else (0, 0, 1)


def layers_of(
    before: Sequence[FunctionGraph],
    after: Sequence[FunctionGraph],
    decisions: Sequence[Decision],
    kernels: Sequence[Kernel],
) -> list[dict[str, Any]]:
    """Return both graphs of each function."""
    by_kernel = {k.decision.kernel: k for k in kernels}
    owner: dict[tuple[str, str], str] = {}
    for d in decisions:
        for name in (*d.chain, *d.where.split(", ")) if d.fused else ():
            owner.setdefault((d.function, name), d.kernel)
    later = {g.function: g for g in after}
    found = []
    for graph in {g.function: g for g in before}.values():
        made = later.get(graph.function)
        kernel_of = {n.name: owner.get((graph.function, n.name), "") for n in graph.nodes}
        found.append(
            {
                "function": graph.function,
                "symbols": dict(graph.symbols),
                "before": _stretches(list(graph.nodes), kernel_of, by_kernel),
                "after": _after(made, by_kernel) if made is not None else [],
            }
        )
    return found


def _after(graph: FunctionGraph, by_kernel: Mapping[str, Kernel]) -> list[dict[str, Any]]:
    """Return the kernels that a function launches; what only tells another shape is left out."""
    nodes, through = [], dict[str, tuple[str, ...]]()
    for node in graph.nodes:
        reads = tuple(dict.fromkeys(n for r in node.reads for n in through.get(r, (r,))))
        if not node.is_kernel and node.op in VIEWS:
            through[node.name] = reads
        else:
            nodes.append(replace(node, reads=reads))
    return _stretches(nodes, {n.name: n.op for n in nodes}, by_kernel)


def _stretches(
    nodes: Sequence[Node], kernel_of: Mapping[str, str], by_kernel: Mapping[str, Kernel]
) -> list[dict[str, Any]]:
    """Return what comes before the layers, one of them, and what comes behind."""
    start, length, repeats = fold([f"{n.op} {n.shape} {n.dtype}" for n in nodes])
    end = start + length * repeats
    cuts = [(0, start, 1), (start, start + length, repeats), (end, len(nodes), 1)]
    found = []
    for first, last, times in cuts:
        some = nodes[first:last]
        if some:
            found.append(
                {
                    "repeats": times,
                    "nodes": [_entry(n, kernel_of, by_kernel) for n in some[:MOST_NODES]],
                    "left_out": max(0, len(some) - MOST_NODES),
                }
            )
    return found


def _entry(
    node: Node, kernel_of: Mapping[str, str], by_kernel: Mapping[str, Kernel]
) -> dict[str, Any]:
    kernel = by_kernel.get(kernel_of.get(node.name, ""))
    what = node.op
    if node.is_kernel and kernel is not None:
        what = title_of(kernel.decision)
    return {
        "name": node.name,
        "op": what.removeprefix("nn."),
        "reads": list(node.reads),
        "weights": list(node.weights),
        "type": type_text(node),
        "bytes": node.moved,
        "kernel": kernel.id if kernel is not None else "",
        "colour": kernel.colour if kernel is not None else None,
        "is_kernel": node.is_kernel,
    }
