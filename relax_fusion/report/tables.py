"""The tables of a report, which its text and its page show: what was fused, what not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import indent, wrap
from typing import TYPE_CHECKING, TypeVar

from ..estimator import AttentionSize, RangePrediction, format_seconds
from ..validation import printable
from .calls import Call
from .coverage import Coverage, Leftover
from .decision import Decision, Joining, LeftOut, Rewrite, Scheduling
from .sizes import sizes_text

if TYPE_CHECKING:
    from .report import Report


WIDTH = 120
"""A line of a title has so many characters, and one of a narrow table."""

MOST_TILES = 2
"""A table names so many tiles of a kernel, unless all are wanted."""

MOST_OPERATORS = 5
"""A table names so many of the operators that are one kernel."""

_T = TypeVar("_T")


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Lay out rows of text in columns; the first row is the head.

    Beyond `width` characters the widest columns are made narrower, and their cells go on below.
    """
    rows = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    longest = [max(len(word) for cell in c for word in cell.split() or [""]) for c in columns]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        slack = [i for i, w in enumerate(widths) if w > longest[i]] or range(len(widths))
        widths[max(slack, key=widths.__getitem__)] -= 1  # words stay whole where that is possible
    lines = []
    for row in [rows[0], ["-" * w for w in widths], *rows[1:]]:
        cells = [
            wrap(cell, w) if len(cell) > w else [cell] for cell, w in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(w) for part, w in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class Table:
    """Rows under a title."""

    title: str
    """What they tell; empty where their head says it."""
    rows: Sequence[Sequence[str]]
    """The first is the head; where it is alone, there is nothing to tell."""

    def __bool__(self) -> bool:
        """Tell whether there is a row below the head."""
        return len(self.rows) > 1

    def text(self, width: int | None = None) -> str:
        """Return the title and the rows as text; nothing where there are none."""
        if not self:
            return ""
        told = table(self.rows, width)
        return "\n".join([*wrap(self.title, WIDTH), "", told]) if self.title else told


def seconds_text(seconds: float | None) -> str:
    """Return a time for people; what is not known is a question mark."""
    return "?" if seconds is None else format_seconds(seconds)


def left_out_table(left: Sequence[LeftOut]) -> Table:
    """One row for what was left out, with what failed where it was not."""
    rows = [("left out", "failed in", "with"), *((x.name, x.where, x.error) for x in left)]
    return Table("", rows)


def rewrites_table(rewrites: Sequence[Rewrite]) -> Table:
    """One row per function and rule: how often it was applied, and what it saves in all."""
    every: dict[tuple[str, str, str], list[float]] = {}
    for each in rewrites:
        every.setdefault((each.function, each.rule, each.numbers), []).append(each.saved_s)
    rows = [("function", "before -> after", "numbers", "times", "saves")]
    rows += [(*key, str(len(s)), format_seconds(sum(s))) for key, s in every.items()]
    return Table("Rewritten by algebra (numbers: exact, or by which sentence of numerics.md)", rows)


def fused_table(decisions: Sequence[Decision], every: bool = False) -> Table:
    """One row per kernel and range of the dynamic dimension; equal kernels are counted.

    Unless `every` range is wanted, the first, the middle and the last are told.
    """
    counts = Counter((d.function, d.kernel) for d in decisions)
    first = {(d.function, d.kernel): d for d in reversed(decisions)}
    rows: list[tuple[str, ...]] = [
        ("function", "pass", "chain", "calls", "size", "tile", "fused", "unfused", "limited by")
    ]
    for key, count in counts.items():
        decision = first[key]
        names = (decision.function, decision.pattern, decision.spelling, str(count))
        ranges = [_range(decision, each) for each in decision.predictions] or [("",) * 5]
        for cells in ranges if every else _ends(ranges):
            rows.append((*names, *cells))
            names = ("",) * 4
    title = "Fused (predicted seconds of a call, at the size given; unfused: our separate kernels)"
    return Table(title, rows)


def _ends(rows: Sequence[_T]) -> list[_T]:
    """Return the first, the middle and the last of some rows, as far as there are so many."""
    return [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})]


def _range(decision: Decision, prediction: RangePrediction) -> tuple[str, ...]:
    """Return size, tile, times and bound of a range."""
    return (
        size_text(prediction),
        tile_text(decision, prediction),
        prediction.fused_text,
        format_seconds(prediction.unfused.seconds),
        prediction.fused.bound,
    )


def tile_text(decision: Decision, prediction: RangePrediction) -> str:
    """Return the tiles that serve the size of a prediction."""
    assert decision.plans is not None, "a fused chain has plans"
    return decision.plans.plan_at(prediction.size).text


def size_text(prediction: RangePrediction) -> str:
    """Return the size of a prediction for people."""
    size = prediction.size
    if isinstance(size, AttentionSize):
        batch = f"batch {size.batch}, " if size.batch > 1 else ""
        return f"{batch}{size.q_len} x {size.kv_len} keys"
    return "1 row" if size == 1 else f"{size} rows"


def validation_table(decisions: Sequence[Decision]) -> Table:
    """One row for what was found out about kernels, with how many of them it holds for."""
    counts = Counter(d.validation for d in decisions if d.validation)
    rows = [("kernels", "validation"), *((str(n), what) for what, n in counts.items())]
    return Table("", rows)


def declined_table(decisions: Sequence[Decision], title: str = "Left unfused") -> Table:
    """One row per reason, with how often it was met and where first."""
    keys = [(d.function, d.pattern, d.spelling or "-", str(d.decline)) for d in decisions]
    first = {key: d.where for key, d in reversed(list(zip(keys, decisions, strict=True)))}
    rows: list[tuple[str, ...]] = [("function", "pass", "chain", "times", "first at", "because")]
    rows += [(*k[:3], str(count), first[k], k[3]) for k, count in Counter(keys).items()]
    return Table(title, rows)


def leftovers_table(
    leftovers: Iterable[Leftover], title: str = "Outside of fused kernels"
) -> Table:
    """One row for what was left for a reason, with how often that was and where first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for x in leftovers:
        found.setdefault((x.function, x.kind, x.reason), []).append(x.where)
    rows: list[tuple[str, ...]] = [("function", "left", "times", "first", "because")]
    rows += [(*key[:2], str(len(each)), each[0], key[2]) for key, each in found.items()]
    return Table(title, rows)


def joined_table(joined: Sequence[Joining]) -> Table:
    """One row for operators that one kernel computes, or two for their price; equal ones count."""
    counts = Counter((j.function, _shortened(j.names), _price(j)) for j in joined)
    rows: list[tuple[str, ...]] = [("function", "operators", "times", "two kernels, as")]
    rows += [(*key[:2], str(count), key[2]) for key, count in counts.items()]
    return Table("Operators that no pattern took, by what a kernel computes of them", rows)


def _shortened(names: Sequence[str]) -> str:
    """Return the first and the last of many operators."""
    if len(names) > MOST_OPERATORS:
        left = len(names) - MOST_OPERATORS + 1
        names = (*names[: MOST_OPERATORS - 2], f"{left} more", names[-1])
    return ", ".join(names)


def _price(joining: Joining) -> str:
    """Say why operators are two kernels, if they are."""
    if joining.joined:
        return ""
    one, two = format_seconds(joining.fused_s), format_seconds(joining.apart_s)
    return (
        f"one would take {one}, not {two}: it computes {joining.names[0]} {joining.times:.3g} times"
    )


def schedules_table(schedules: Sequence[Scheduling], every: bool = False) -> Table:
    """One row per rule and tiles, with how many functions it scheduled and the first of them.

    Unless `every` tile is wanted, the first are told, and how many more there are.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for s in schedules:
        tiles = list(dict.fromkeys(plan.text for _, plan in s.plans.boxes)) if s.plans else []
        if not every and len(tiles) > MOST_TILES:
            tiles[MOST_TILES:] = [f"{len(tiles) - MOST_TILES} more"]
        why = "; ".join(f"{rule}: {decline}" for rule, decline in s.refusals)
        found.setdefault((s.rule or "none", "; ".join(tiles), why), []).append(s.function)
    rows = [("rule", "functions", "first", "tiles", "could not")]
    rows += [
        (rule, str(len(names)), names[0], tiles, why) for (rule, tiles, why), names in found.items()
    ]
    return Table("Kernels, by the rule that schedules them", rows)


def coverage_table(coverage: Sequence[Coverage]) -> Table:
    """One row per function: chains found of those there are, launches, bytes that are copied."""
    chains = list(dict.fromkeys(name for c in coverage for name in c.chains))
    head = ("launches", "a layer", "copies", "bytes copied", "memory", "TVM's", "where")
    rows: list[tuple[str, ...]] = [("function", *chains, *head)]
    for c in coverage:
        counts = ("{} of {}".format(*c.chains[n]) if n in c.chains else "" for n in chains)
        rows.append((c.function, *counts, *_launched(c)))
    title = (
        "Coverage (chains in fused kernels, of those there are; launches in all, and until they "
        "repeat; kernels that only move or cast elements, and the bytes that they read and write; "
        "bytes of all that is computed, and by TVM's default pipeline; at the sizes given)"
    )
    return Table(title, rows)


def _launched(coverage: Coverage) -> tuple[str, ...]:
    launches = coverage.launches
    if launches is None:
        return ("",) * 7
    return (
        str(len(launches.kernels)),
        str(coverage.per_layer or ""),
        str(len(launches.copies)),
        f"{coverage.copied:,}",
        *("" if m is None else f"{m:,}" for m in (launches.memory, launches.tvm_memory)),
        sizes_text(dict(launches.symbols)),
    )


def calls_table(calls: Sequence[Call], every: bool = False) -> Table:
    """One row per function and sizes: the sums of its predictions.

    Unless `every` size is wanted, the first, the middle and the last are told.
    """
    rows: list[tuple[str, ...]] = [
        ("function", "sizes", "predicted", "floor", "fused chains", "unfused", "gain over unfused")
    ]
    for name in dict.fromkeys(call.function for call in calls):
        own = [call for call in calls if call.function == name]
        for call in own if every else _ends(own):
            unfused, fused, floor = call.unfused_s, call.fused_s, call.floor_s
            whole = None if floor is None or call.rest_s is None else floor + call.rest_s
            rows.append(
                (
                    name,
                    sizes_text(call.sizes) or "static",
                    format_seconds(call.seconds),
                    seconds_text(whole),
                    format_seconds(fused),
                    seconds_text(unfused),
                    f"{unfused / fused:.2f}x" if unfused is not None and fused else "?",
                )
            )
    title = (
        "In all (predicted seconds of one call; unfused: the best kernels of ours for the parts of "
        "the fused chains, launched separately; TVM's default is not predicted: bench measures it)"
    )
    return Table(title, rows)


def report_text(
    report: Report,
    width: int | None = None,
    *,
    every: bool = False,
    coverage: bool = False,
    graphs: bool = False,
) -> str:
    """Return the tables of a report, with lines of at most `width` characters.

    With `every`, all ranges and tiles are told, and what one pass declined and another took; with
    `coverage`, how much is in kernels of ours; with `graphs`, what each of them computes.
    """
    lost = report.declined
    tables = [left_out_table(report.left_out), rewrites_table(report.rewrites)]
    tables.append(fused_table(report.fused, every))
    tables += [validation_table(report.fused), declined_table(lost)]
    if every:
        others = [d for d in report.decisions if not d.fused and d not in lost]
        title = "Declined by one pass, taken by a kernel of another"
        tables.append(declined_table(others, title))
    tables += [leftovers_table(report.leftovers), joined_table(report.joined)]
    tables += [schedules_table(report.schedules, every)]
    tables += [coverage_table(report.coverage)] if coverage else []
    parts = [each.text(width) for each in tables]
    parts += ["What each kernel computes\n\n" + graphs_text(report.fused)] if graphs else []
    parts.append(calls_table(report.calls, every).text(width))
    found = [part for part in parts if part] or ["no chain of any pattern was found"]
    return "\n\n".join(found)


def graphs_text(decisions: Sequence[Decision]) -> str:
    """Return what each kernel computes, statement by statement, under its name."""
    graphs = {d.kernel: d.workload.graph for d in decisions if d.workload is not None}
    parts = []
    for name, graph in graphs.items():
        reads, returns = (", ".join(map(str, each)) for each in (graph.inputs, graph.outputs))
        parts.append(f"{name}\n" + indent(f"reads {reads}\n{graph}\nreturns {returns}", "  "))
    return "\n\n".join(parts)
