"""``relax-fusion inspect``: the pages of a compilation or of a dump, from what it recorded."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli.console import CliError, Console
from ..cli.page import check_written, write_page
from ..estimator import format_seconds
from ..report.passes import PASSES, DumpRecord, read_passes
from ..report.tables import table
from ..transforms.debug_dump import REPORT
from .compilation import read_compilation
from .dump_page import dump_html
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
