"""The page of a dump: what each pass changed, equal changes once, and passes without any folded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

from ..passes import PASSES, DumpRecord, FunctionChange, PassRecord, PhaseRecord
from .hunks import hunk_entry
from .numbers import times
from .page import made_page


def dump_html(record: DumpRecord, files: Collection[str], report: str = "") -> str:
    """Return the page of a dump.

    Parameters
    ----------
    record : DumpRecord
        What ``passes.json`` holds.
    files : collection of str
        Names of the phases' modules that are beside the page.
    report : str
        Name of the report's page beside it; empty if there is none.
    """
    return made_page("dump.html", ("base.js",), data=dump_data(record, files, report))


def dump_data(record: DumpRecord, files: Collection[str], report: str = "") -> dict[str, Any]:
    """Return the data of the page, with the arguments of `dump_html`."""
    phases = [
        _phase(phase, f"phase{i}", phase.file in files) for i, phase in enumerate(record.phases)
    ]
    every = [one for phase in phases for one in phase["passes"]]
    return {
        "phases": phases,
        "options": dict(record.options),
        "failed": record.failed,
        "report": report,
        "passes_file": PASSES,
        "ran": len(every),
        "changing": sum(phase["changing"] for phase in phases),
        "seconds": sum(phase["seconds"] for phase in phases),
        "slowest": max(every, key=lambda one: one["seconds"], default=None),
        "last": every[-1] if every else None,
    }


def _phase(phase: PhaseRecord, name: str, there: bool) -> dict[str, Any]:
    passes = [_pass(one, f"{name}-{i}") for i, one in enumerate(phase.passes)]
    runs = groupby(passes, key=lambda one: one["is_quiet"])
    return {
        "id": name,
        "title": phase.title,
        "file": phase.file,
        "is_there": there,
        "seconds": phase.seconds,
        "passes": passes,
        "changing": sum(not one["is_quiet"] for one in passes),
        "last": passes[-1] if passes else None,
        "parts": [part for quiet, run in runs for part in _parts(quiet, list(run))],
    }


def _parts(quiet: bool, run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the page shows of passes in a row: of those without changes, one line."""
    if not quiet:
        return [{"quiet": [], "one": one} for one in run]
    return [{"quiet": run, "seconds": sum(one["seconds"] for one in run)}]


def _pass(one: PassRecord, name: str) -> dict[str, Any]:
    kernels = [c for c in one.changes if c.kind == "kernel"]
    more = sum(c.after - c.before for c in one.changes)
    return {
        "id": name,
        "name": one.name,
        "seconds": one.seconds,
        "is_quiet": not one.changes,
        "told": _told(one.changes),
        "graphs": one.graphs,
        "kernels": one.kernels,
        "lines": one.lines,
        "bindings": one.bindings,
        "more": f"{'+' if more > 0 else '−'}{times(abs(more), 'line')}" if more else "",
        "groups": _groups(c for c in one.changes if c.kind != "kernel"),
        "kernel_groups": _groups(kernels),
        "kernels_told": times(len(kernels), "kernel"),
    }


def _told(changes: Sequence[FunctionChange]) -> str:
    """Return how many functions were changed, added and removed, graphs by their names."""
    parts = []
    for what in ("changed", "added", "removed"):
        found = [c for c in changes if c.what == what]
        names = [c.function for c in found if c.kind != "kernel"]
        kernels = len(found) - len(names)
        names = names if len(names) <= 3 else [times(len(names), "function")]
        names += [times(kernels, "kernel")] if kernels else []
        parts += [f"{', '.join(names)} {what}"] if names else []
    return "; ".join(parts)


def _groups(changes: Iterable[FunctionChange]) -> list[dict[str, Any]]:
    """Return changes that are the same but for the function's name and place as one."""
    found: dict[Any, dict[str, Any]] = {}
    for c in changes:
        lines = tuple((h.times, *(x.replace(c.function, "%") for x in h.lines)) for h in c.hunks)
        group = found.setdefault((c.what, c.kind, c.left_out, lines), _group(c))
        if group["change"] is not c:
            group["others"].append(c.function)
    return list(found.values())


def _group(c: FunctionChange) -> dict[str, Any]:
    return {
        "change": c,
        "others": [],
        "places": sum(hunk.times for hunk in c.hunks),
        "hunks": [hunk_entry(hunk) for hunk in c.hunks],
    }
