"""``relax-fusion inspect``: the page of a dump, from what the dump recorded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..estimator import format_seconds
from ..report.html.dump_page import dump_html
from ..report.passes import DumpRecord, read_passes
from ..report.tables import table
from ..transforms.debug_dump import INDEX, PAGE, modules_in
from .console import Console
from .page import write_page


def inspect_command(args: argparse.Namespace, console: Console) -> int:
    """Write the page of the dump in ``args.directory``."""
    directory = Path(args.directory)
    record = read_passes(directory)
    page = directory / INDEX
    report = PAGE if (directory / PAGE).is_file() else ""
    write_page(dump_html(record, modules_in(directory), report), str(page), console)
    if args.json:
        console.json({"page": str(page), "failed": record.failed, "phases": _phases(record)})
    else:
        console.result(_text(record, page))
    return 0


def _phases(record: DumpRecord) -> list[dict[str, Any]]:
    return [
        {
            "title": phase.title,
            "file": phase.file,
            "seconds": phase.seconds,
            "passes": len(phase.passes),
            "changing": [one.name for one in phase.passes if one.changes],
        }
        for phase in record.phases
    ]


def _text(record: DumpRecord, page: Path) -> str:
    rows: list[tuple[str, ...]] = [("phase", "module behind it", "passes", "that changed", "time")]
    for each in _phases(record):
        counts = str(each["passes"]), str(len(each["changing"]))
        rows.append((each["title"], each["file"], *counts, format_seconds(each["seconds"])))
    failed = f"{record.failed} raised an error\n\n" if record.failed else ""
    return f"{page}\n\n{failed}{table(rows)}"
