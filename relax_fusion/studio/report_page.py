"""The page of a report: what was fused and what it costs, what was not and why, graphs, sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import Reason
from ..estimator import RangePrediction, format_seconds
from ..report import Decision, FunctionGraph, Leftover, Node, Report, Source
from ..report.calls import floor_s, least_s
from ..report.record import texts_of
from ..report.tables import (
    Table,
    calls_table,
    coverage_table,
    declined_table,
    graphs_text,
    left_out_table,
    rewrites_table,
    schedules_table,
    seconds_text,
    size_text,
    tile_text,
)
from .html import Content, Html, fold, joined, link, page, rows_of, tag, titled
from .measure import measured_parts, ratio_text
from .remedies import remedy, remedy_of_leftover

MOST_NODES = 80
"""A table shows so many bindings in front of the layers of a function, of one layer, and behind."""

MOST_CHARACTERS = 900_000
"""A page has at most so many characters of kernels' texts."""

HARMLESS = (Reason.NOT_PROFITABLE, Reason.OVERLAP)
"""These reasons are told last: what was declined for them is better off."""

NOTES = """\
The floor of a kernel is the longer of two times: its bytes, each operand counted once, at the peak
bandwidth, and its matmuls' operations at the peak rate. Launches are not in it. On a CPU, a time
below the floor means that operands stay in a cache. Operators outside of fused kernels are counted
at the least that they can take: a launch, and their bytes or operations at the rates that are
reached. Where matmuls or attentions are among them, a call takes longer than its sum."""


def report_html(report: Report, measured: Mapping[str, Any] | None = None) -> str:
    """Return the page of a report, which loads nothing from anywhere.

    Parameters
    ----------
    report : Report
        What the pipeline, or a file, filled.
    measured : mapping, optional
        What ``bench --json`` writes of the same compilation.
    """
    kernels = Counter(d.kernel for d in report.fused)
    first = {d.kernel: d for d in reversed(report.fused)}
    last_s = {k: d.predictions[-1].fused.seconds for k, d in first.items() if d.predictions}
    order = sorted(kernels, key=lambda name: -last_s.get(name, 0.0) * kernels[name])
    links = {name: f"k{number}" for number, name in enumerate(order)}
    lost, left = report.declined, report.leftovers
    texts = {source.function for source in report.material.sources}
    sections: list[tuple[str, str, Content]] = [("overview", "Overview", _overview(report))]
    if measured is not None:
        parts = measured_parts(measured, links)
        shown = [titled(it) if isinstance(it, Table) else tag("pre", it) for it in parts]
        sections.append(("measured", "Measured", shown))
    chains = [_chain(report, first[k], links[k], kernels[k]) for k in order]
    sections += [
        ("chains", f"Chains ({len(kernels)})", chains or tag("p", "No chain was fused.")),
        ("not-fused", f"Not fused ({len(lost) + len(left)})", _not_fused(report)),
        ("graph", "Graphs", _graphs(report, links)),
        ("sources", f"Kernels ({len(texts)})", _sources(report, links)),
    ]
    title = report.material.model or "Fusion report"
    lead = f"For {report.device or 'a device that the report does not name'}."
    return page(title, lead, sections)


def _overview(report: Report) -> list[Html]:
    """Return what all came to, and what a call of each function costs."""
    fused, lost = len(report.fused), len(report.declined)
    left = len(report.leftovers)
    told = (
        f"{fused} chains fused, by {len({d.kernel for d in report.fused})} kernels; {lost} left "
        f"unfused; {left} operators outside of fused kernels."
    )
    tables = [left_out_table(report.left_out), calls_table(report.calls, every=True)]
    tables.append(rewrites_table(report.rewrites))
    tables.append(coverage_table(report.coverage))
    return [tag("p", told), *map(titled, tables), tag("p", NOTES)]


def _chain(report: Report, decision: Decision, name: str, count: int) -> Html:
    """Return the card of one kernel: its sizes with what was predicted and measured of them."""
    head = (
        "size",
        *("tile", "predicted", "unfused", "gain", "floor", "of floor", "limited by"),
        *("measured", "measured/predicted"),
    )
    rows = [head, *(_prediction(report, decision, each) for each in decision.predictions)]
    last = decision.predictions[-1] if decision.predictions else None
    cost = f": {last.fused_text} at {size_text(last)}" if last is not None else ""
    times = f"{count} {'time' if count == 1 else 'times'}"
    calls = Counter(d.function for d in report.fused if d.kernel == decision.kernel)
    where = ", ".join(f"{n} in {function}" for function, n in calls.items())
    title = f"{decision.pattern}: {decision.spelling}, {times}{cost}"
    facts = [f"{decision.kernel}; {where}; the first makes {decision.where}."]
    facts += [f"Validation: {decision.validation}."] if decision.validation else []
    operators = [("variable", "operator", "result", "reads"), *_operators(report, decision)]
    parts: list[Html] = [tag("p", " ".join(facts)), rows_of(rows)]
    if len(operators) > 1:
        parts.append(fold(f"Operators that it replaces ({len(operators) - 1})", rows_of(operators)))
    if decision.workload is not None:
        parts.append(fold("What it computes", tag("pre", graphs_text([decision]))))
    if any(source.function == decision.kernel for source in report.material.sources):
        parts.append(tag("p", link("Its text", f"#source-{name}")))
    return fold(title, *parts, name=name)


def _prediction(report: Report, decision: Decision, prediction: RangePrediction) -> tuple[str, ...]:
    """Return the row of one size."""
    fused, unfused = prediction.fused.seconds, prediction.unfused.seconds
    spec, work, measured = report.material.spec, decision.workload, prediction.measured_s
    floor = floor_s(work, spec, prediction.size) if work is not None and spec is not None else None
    return (
        size_text(prediction),
        tile_text(decision, prediction),
        format_seconds(fused),
        format_seconds(unfused),
        f"{unfused / fused:.2f}x" if fused else "",
        seconds_text(floor),
        f"{100 * floor / fused:.0f} %" if floor is not None and fused else "",
        prediction.fused.bound,
        "" if measured is None else format_seconds(measured),
        ratio_text(measured, fused),
    )


def _operators(report: Report, decision: Decision) -> list[tuple[str, ...]]:
    """Return the operators that the first of the chains had."""
    names = set(decision.names)
    graph = _graph_of(report.material.before, decision.function)
    return [
        (n.name, n.op, _type(n), ", ".join([*n.reads, *n.weights]))
        for n in graph
        if n.name in names
    ]


def _graph_of(graphs: Sequence[FunctionGraph], function: str) -> Sequence[Node]:
    return next((g.nodes for g in reversed(graphs) if g.function == function), ())


def _type(node: Node) -> str:
    return f"{node.dtype} [{node.shape}]" if node.dtype else ""


# --- what was not fused --------------------------------------------------------------------------


def _not_fused(report: Report) -> list[Html]:
    lost = sorted(report.declined, key=lambda d: getattr(d.decline, "reason", None) in HARMLESS)
    declined = declined_table(lost, "Chains that a pass declined, those that lose nothing last.")
    head, *found = declined.rows
    reasons = {str(d.decline): d.decline.reason for d in lost if d.decline is not None}
    rows = [(*head, "what it would take"), *((*r, remedy(reasons[r[-1]])) for r in found)]
    parts = [titled(Table(declined.title, rows)), titled(_left_over(report)), titled(_rest(report))]
    return [part for part in parts if part] or [tag("p", "Every kernel is one of ours.")]


def _left_over(report: Report) -> Table:
    """One row per kind and reason, the most expensive first."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    groups: dict[tuple[str, str, str], list[Leftover]] = {}
    for each in report.leftovers:
        groups.setdefault((each.function, each.kind, each.reason), []).append(each)
    for (function, kind, reason), some in sorted(groups.items()):
        names = {x.where for x in some}
        nodes = [n for n in _graph_of(report.material.before, function) if n.name in names]
        least = _least(report, nodes)
        told = (function, kind, str(len(some)), some[0].where, _type(nodes[0]) if nodes else "")
        todo = remedy_of_leftover(kind, reason)
        rows.append((least or 0.0, (*told, seconds_text(least), reason, todo)))
    head = ("function", "operator", "times", "first", "result", "at least", "because")
    title = "Operators of transformers outside of fused kernels, the most expensive first."
    rows.sort(key=lambda pair: -pair[0])
    return Table(title, [(*head, "what it would take"), *(row for _, row in rows)])


def _least(report: Report, nodes: Sequence[Node]) -> float | None:
    each = [least_s(node, report.material.spec) for node in nodes]
    known = [seconds for seconds in each if seconds is not None]
    return sum(known) if known else None


def _rest(report: Report) -> Table:
    """One row per kernel that no fusing pass made."""
    ours = {d.kernel for d in report.fused}
    rules = {s.function: s.rule for s in report.schedules}
    head = ("function", "kernel", "launches", "result", "bytes", "at least", "scheduled by")
    rows: list[tuple[str, ...]] = [head]
    for graph in report.material.after:
        groups: dict[str, list[Node]] = {}
        for node in graph.nodes:
            if node.is_kernel and node.op not in ours:
                groups.setdefault(node.op, []).append(node)
        for kernel, nodes in groups.items():
            told = (graph.function, kernel, str(len(nodes)), _type(nodes[0]))
            moved = f"{sum(node.moved for node in nodes):,}"
            least = seconds_text(_least(report, nodes))
            rows.append((*told, moved, least, rules.get(kernel, "")))
    title = (
        "Kernels that no fusing pass made. What it would take: a pass that has them in its chain "
        "(register_pass), or a neighbour that computes them on the way."
    )
    return Table(title, rows)


# --- graphs and sources --------------------------------------------------------------------------


def fold_layers(labels: Sequence[str]) -> tuple[int, int, int]:
    """Return where a layer begins, how long it is, and how often it comes; 0 and 1 for none.

    Examples
    --------
    >>> fold_layers(["take", "norm", "ffn", "norm", "ffn", "norm", "ffn", "head"])
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


def _graphs(report: Report, links: Mapping[str, str]) -> list[Html]:
    """Return both graphs of each function, with equal layers once."""
    owners = {(d.function, n): d.kernel for d in reversed(report.fused) for n in d.names}
    parts = []
    for graph in {g.function: g for g in report.material.before}.values():
        after = _graph_of(report.material.after, graph.function)
        kernels = {n.name: owners.get((graph.function, n.name), "") for n in graph.nodes}
        made = {n.name: n.op for n in after}
        parts.append(fold(f"{graph.function}, before", *_layers(graph.nodes, kernels, links)))
        parts.append(fold(f"{graph.function}, as it runs", *_layers(after, made, links)))
    return parts or [tag("p", "The report holds no graphs.")]


def _layers(
    nodes: Sequence[Node], kernels: Mapping[str, str], links: Mapping[str, str]
) -> Iterable[Html]:
    """Return a table of what comes before the layers, of one of them, and of what comes behind."""
    start, length, times = fold_layers([f"{n.op} {n.shape} {n.dtype}" for n in nodes])
    end = start + length * times
    for first, last, repeats in (
        (0, start, 1),
        (start, start + length, times),
        (end, len(nodes), 1),
    ):
        some = nodes[first:last]
        rows: list[tuple[str, ...]] = [("variable", "operator", "reads", "result", "bytes", "in")]
        for n in some[:MOST_NODES]:
            kernel = kernels.get(n.name, "")
            own = link(kernel, f"#{links[kernel]}") if kernel in links else ""
            reads = ", ".join([*n.reads, *n.weights])
            rows.append((n.name, n.op, reads, _type(n), f"{n.moved:,}", own))
        if some:
            again = [tag("p", f"{repeats} times:")] if repeats > 1 else []
            cut = [tag("p", f"{len(some) - MOST_NODES} more")] if len(some) > MOST_NODES else []
            yield joined([*again, rows_of(rows), *cut])


def _sources(report: Report, links: Mapping[str, str]) -> list[Html]:
    """Return which rule made which kernels, and the texts of these, fused ones first."""
    order = list(links)
    every: list[Source] = list({s.function: s for s in report.material.sources}.values())
    every.sort(key=lambda s: order.index(s.function) if s.function in links else len(order))
    parts, used, skipped = [titled(schedules_table(report.schedules, every=True))], 0, 0
    for source in every:
        if used >= MOST_CHARACTERS:
            skipped += 1
            continue
        texts = texts_of(source)
        used += sum(len(text.text) for text in texts)
        name = f"source-{links[source.function]}" if source.function in links else ""
        told = [joined([tag("h3", f"{t.title}, {t.language}"), tag("pre", t.text)]) for t in texts]
        parts.append(fold(source.function, *told, name=name))
    if skipped:
        most = f"{MOST_CHARACTERS:,}"
        parts.append(tag("p", f"Texts of {skipped} more PrimFuncs: at most {most} characters."))
    return parts if every else [*parts, tag("p", "The report holds no texts of kernels.")]
