"""Tables of a report: columns of text, and what they say of coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import wrap

from ..validation import printable
from .coverage import Coverage, Leftover
from .decision import Decision, LeftOut, Scheduling

MOST_TILES = 2
"""A narrow table names so many tiles of a kernel."""


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


def validation_table(decisions: Sequence[Decision]) -> str:
    """One row for what was found out about kernels, with how many of them it holds for."""
    counts = Counter(d.validation for d in decisions if d.validation)
    if not counts:
        return ""
    return table([("kernels", "validation"), *((str(n), what) for what, n in counts.items())])


def left_out_table(left: Sequence[LeftOut]) -> str:
    """One row for what was left out, with what failed where it was not."""
    if not left:
        return ""
    return table([("left out", "failed in", "with"), *((x.name, x.where, x.error) for x in left)])


def leftovers_table(leftovers: Sequence[Leftover], width: int | None = None) -> str:
    """One row for what was left for a reason, with how often that was and where first."""
    if not leftovers:
        return ""
    counts = Counter((x.function, x.kind, x.reason) for x in leftovers)
    first = {(x.function, x.kind, x.reason): x.where for x in reversed(leftovers)}
    rows: list[tuple[str, ...]] = [("function", "left", "times", "first", "because")]
    rows += [(*key[:2], str(count), first[key], key[2]) for key, count in counts.items()]
    return table(rows, width)


def coverage_table(coverage: Sequence[Coverage], width: int | None = None) -> str:
    """One row per function: chains found of those there are, launches, bytes that are copied."""
    if not coverage:
        return ""
    chains = list(dict.fromkeys(name for c in coverage for name in c.chains))
    rows: list[tuple[str, ...]] = [
        ("function", *chains, "launches", "a layer", "copies", "bytes copied", "where")
    ]
    for c in coverage:
        counts = ("{} of {}".format(*c.chains[n]) if n in c.chains else "" for n in chains)
        rows.append((c.function, *counts, *_launched(c)))
    return table(rows, width)


def _launched(coverage: Coverage) -> tuple[str, ...]:
    launches = coverage.launches
    if launches is None:
        return ("",) * 5
    return (
        str(len(launches.kernels)),
        str(coverage.per_layer or ""),
        str(len(launches.copies)),
        f"{coverage.copied:,}",
        ", ".join(f"{name} = {value}" for name, value in launches.symbols),
    )


def declined_table(decisions: Sequence[Decision], width: int | None = None) -> str:
    """One row per reason, with how often it was met and where first."""
    if not decisions:
        return ""
    keys = [(d.function, d.pattern, d.spelling or "-", str(d.decline)) for d in decisions]
    first = {key: d.where for key, d in reversed(list(zip(keys, decisions, strict=True)))}
    rows: list[tuple[str, ...]] = [("function", "pass", "chain", "times", "first at", "because")]
    rows += [(*k[:3], str(count), first[k], k[3]) for k, count in Counter(keys).items()]
    return table(rows, width)


def schedules_table(schedules: Sequence[Scheduling], width: int | None = None) -> str:
    """One row per rule and tiles, with how many functions it scheduled and the first of them.

    Within a `width` only the first tiles are told, and how many more there are.
    """
    if not schedules:
        return ""
    found: dict[tuple[str, str, str], list[str]] = {}
    for s in schedules:
        tiles = list(dict.fromkeys(plan.text for _, plan in s.plans.boxes)) if s.plans else []
        if width is not None and len(tiles) > MOST_TILES:
            tiles[MOST_TILES:] = [f"{len(tiles) - MOST_TILES} more"]
        why = "; ".join(f"{rule}: {decline}" for rule, decline in s.refusals)
        found.setdefault((s.rule or "none", "; ".join(tiles), why), []).append(s.function)
    rows = [("rule", "functions", "first", "tiles", "could not")]
    rows += [
        (rule, str(len(names)), names[0], tiles, why) for (rule, tiles, why), names in found.items()
    ]
    return table(rows, width)
