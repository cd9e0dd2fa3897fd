"""``relax-fusion inspect``: the pages of a compilation, or of a dump, from what it recorded."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cli.artifact import check_written, write_page
from ..cli.console import CliError, Console
from ..estimator import format_seconds
from ..report.passes import PASSES, DumpRecord, FunctionChange, PhaseRecord, read_passes
from ..report.tables import table
from ..transforms.debug_dump import REPORT
from .compilation import read_compilation
from .html import Content, Html, fold, hunks, joined, link, page, rows_of, tag
from .report_page import report_html

INDEX, PAGE = "index.html", "report.html"
"""The pages of a dump, and of its report, have these names."""


def inspect_command(args: argparse.Namespace, console: Console) -> int:
    """Write the page of a report, or both pages of a dump."""
    source = Path(args.source)
    if (source / PASSES).exists():
        if args.output is not None:
            raise CliError(f"-o {args.output}: the pages of a dump are written into it", code=2)
        return _dump(source, args, console)
    output = PAGE if args.output is None else args.output
    check_written({"-o": output}, args.source)
    found = read_compilation(args.source)
    write_page(report_html(found.report), output, console)
    fused, left = len(found.report.fused), len(found.report.leftovers)
    if args.json:
        console.json({"page": output, "fused": fused, "left": left})
    else:
        console.result(f"{output}: {fused} chains fused, {left} operators left")
    return 0


def _dump(directory: Path, args: argparse.Namespace, console: Console) -> int:
    record = read_passes(directory)
    if (directory / REPORT).is_file():
        report = read_compilation(str(directory / REPORT)).report
        write_page(report_html(report), str(directory / PAGE), console)
    files = [each.name for each in directory.iterdir() if each.is_file()]
    write_page(dump_html(record, files), str(directory / INDEX), console)
    if args.json:
        phases = [
            {
                "title": phase.title,
                "file": phase.file,
                "seconds": phase.seconds,
                "passes": len(phase.passes),
                "changing": [one.name for one in phase.passes if one.changes],
            }
            for phase in record.phases
        ]
        page = str(directory / INDEX)
        console.json({"page": page, "failed": record.failed, "phases": phases})
    else:
        console.result(_text(record, directory / INDEX))
    return 0


def _text(record: DumpRecord, page: Path) -> str:
    rows: list[tuple[str, ...]] = [("phase", "module behind it", "passes", "that changed", "time")]
    for each in record.phases:
        changing = sum(bool(one.changes) for one in each.passes)
        counts = str(len(each.passes)), str(changing)
        rows.append((each.title, each.file, *counts, format_seconds(each.seconds)))
    failed = f"{record.failed} raised an error\n\n" if record.failed else ""
    return f"{page}\n\n{failed}{table(rows)}"


def dump_html(record: DumpRecord, files: Collection[str]) -> str:
    """Return the page of a dump, with links to `files`, which are beside the page."""
    head = ("phase", "module behind it", "time", "passes", "changed something")
    size = ("graphs", "bindings", "kernels", "lines")
    rows: list[Sequence[str]] = [(*head, *size)]
    for i, phase in enumerate(record.phases):
        file = link(phase.file, phase.file) if phase.file in files else phase.file
        changing = sum(bool(one.changes) for one in phase.passes)
        told = (format_seconds(phase.seconds), str(len(phase.passes)), str(changing))
        last = phase.passes[-1:]
        ends = [f"{getattr(one, name):,}" for one in last for name in size] or [""] * len(size)
        rows.append((link(phase.title, f"#phase{i}"), file, *told, *ends))
    overview: list[Html] = []
    if record.failed:
        told_of = f"The pass {record.failed} raised an error; what is below ran before."
        overview.append(tag("p", told_of, class_="bad"))
    options = [("option", "value"), *record.options.items()]
    overview += [rows_of(rows), rows_of(options)]
    overview += [tag("p", link(name, name)) for name in ("report.html", PASSES) if name in files]
    sections: list[tuple[str, str, Content]] = [("overview", "Overview", overview)]
    sections += [
        (f"phase{i}", p.title.capitalize(), _phase(p)) for i, p in enumerate(record.phases)
    ]
    return page("What each pass changed", "Phase by phase, function by function.", sections)


def _phase(phase: PhaseRecord) -> list[Html]:
    """Return what each pass changed; those that changed nothing are named in one line."""
    quiet = [one for one in phase.passes if not one.changes]
    seconds = format_seconds(sum(one.seconds for one in quiet))
    parts = []
    for one in phase.passes:
        if one.changes:
            counts = f"{one.graphs} graphs, {one.kernels} kernels, {one.lines:,} lines behind it"
            told = f"{one.name}: {told_of(one.changes)}; {format_seconds(one.seconds)}; {counts}"
            parts.append(fold(told, *(_group(each) for each in groups_of(one.changes))))
    if quiet:
        names = ", ".join(one.name for one in quiet)
        parts.append(tag("p", f"Without a change, in {seconds}: {names}."))
    return parts or [tag("p", "No pass ran to its end.")]


def told_of(changes: Sequence[FunctionChange]) -> str:
    """Return how many functions were changed, added and removed, graphs by their names."""
    parts = []
    for what in ("changed", "added", "removed"):
        found = [c for c in changes if c.what == what]
        names = [c.function for c in found if c.kind != "kernel"]
        kernels = len(found) - len(names)
        names = names if len(names) <= 3 else [f"{len(names)} functions"]
        names += [f"{kernels} kernel{'s' * (kernels > 1)}"] if kernels else []
        parts += [f"{', '.join(names)} {what}"] if names else []
    return ", ".join(parts)


def groups_of(changes: Iterable[FunctionChange]) -> list[list[FunctionChange]]:
    """Return changes that are the same but for the function's name and place together."""
    found: dict[Any, list[FunctionChange]] = {}
    for c in changes:
        own = c.function
        lines = tuple((h.times, *(x.replace(own, "%") for x in h.lines)) for h in c.hunks)
        found.setdefault((c.what, c.kind, c.left_out, lines), []).append(c)
    return list(found.values())


def _group(changes: Sequence[FunctionChange]) -> Html:
    first = changes[0]
    lines = f"{first.before:,} to {first.after:,} lines"
    parts: list[Html] = []
    if len(changes) > 1:
        others = ", ".join(c.function for c in changes[1:])
        parts.append(tag("p", f"In the same way: {others}"))
    added = [replace(h, lines=tuple(x[1:] for x in h.lines)) for h in first.hunks]
    shown = hunks(added if first.what == "added" else first.hunks)
    return fold(
        f"{first.function} {first.what}, {lines}", joined(parts), shown, tag("p", first.left_out)
    )
