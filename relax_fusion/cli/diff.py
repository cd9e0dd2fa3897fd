"""``relax-fusion diff``: what changed between two compilations."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..estimator import format_seconds
from ..report.html.diff_page import chain_seconds, diff_html
from ..report.html.numbers import times
from ..report.tables import table
from ..validation import shown
from .compilation import read_compilation
from .console import Console
from .difference import difference, is_equal
from .page import check_written, write_page

LOST = 1
"""The exit code where chains were lost."""

_MOST = 40
"""Rows of a table; JSON has all."""


def diff_command(args: argparse.Namespace, console: Console) -> int:
    """Compare ``args.a`` with ``args.b``."""
    check_written({"--html": args.html}, args.a, args.b)
    a, b = read_compilation(args.a), read_compilation(args.b)
    found = difference(a, b)
    told = {"equal": is_equal(found), **found}
    if args.html is not None:
        page = diff_html((args.a, args.b), told, (a.sources, b.sources))
        write_page(page, args.html, console)
    if args.json:
        console.json({"a": args.a, "b": args.b, **told})
    else:
        console.result(_text(found, args.a, args.b))
    return LOST if found["lost"] else 0


def _text(found: Mapping[str, Any], a: str, b: str) -> str:
    parts = [_facts(found["facts"])]
    if is_equal(found):
        parts.append(f"{a} and {b} are equal in all that was compared.")
    parts.append(_calls(found["calls"]))
    for name, heading in (
        ("lost", "Lost: chains of A that are no kernels in B"),
        ("replaced", "Replaced: chains of A whose operations are in other kernels in B"),
        ("gained", "Gained: chains that are kernels in B only"),
    ):
        parts.append(_chains(heading, found[name]))
    parts.append(_left(found["left"]))
    parts.append(_plans(found["plans"]))
    parts.append(_times(found["times"]))
    parts.append(_files(found["files"]))
    parts.append(_kernels(found["kernels"]))
    return "\n\n".join(part for part in parts if part)


def _facts(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Say first that two compilations are of different models, or for different targets."""
    if not facts:
        return ""
    heads = {"source": "models differ", "target": "targets differ"}
    lines = [
        f"{heads.get(name, f'{name} differs')}: A {shown(each['a'])}, B {shown(each['b'])}"
        for name, each in facts.items()
    ]
    return "\n".join(lines)


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (c["function"], times(c["rows"], "row"), _seconds(c["a"]), _seconds(c["b"]), _ratio(c))
        for c in calls
    ]
    head = ("function", "at", "in A", "in B", "B / A")
    return _part("Predicted time of all fused kernels of a call", head, rows)


def _chains(heading: str, chains: Sequence[Mapping[str, Any]]) -> str:
    names = ("function", "count", "chain", "sizes")
    rows = [(*(str(c[n]) for n in names), chain_seconds(c, format_seconds)) for c in chains]
    return _part(heading, ("function", "times", "chain", "sizes", "predicted, each"), rows)


def _left(left: Sequence[Mapping[str, Any]]) -> str:
    rows = [(x["function"], x["kind"], str(x["a"]), str(x["b"]), x["reason"]) for x in left]
    head = ("function", "left", "in A", "in B", "because")
    return _part("Outside of fused kernels, in more or fewer places", head, rows)


def _plans(plans: Sequence[Mapping[str, Any]]) -> str:
    rows, last = [], None
    for each in plans:
        key = (each["function"], each["chain"], each["sizes"])
        names = key if key != last else ("", "", "")
        rows.append((*names, each["range"], each["a"] or "-", each["b"] or "-"))
        last = key
    head = ("function", "chain", "sizes", "range", "tiles of A", "tiles of B")
    return _part("Plans that changed", head, rows)


def _times(times: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in times:
        for name, what in (("fused_s", "predicted"), ("measured_s", "measured")):
            if name in each:
                one, two = each[name]["a"], each[name]["b"]
                cells = (each["function"], each["chain"], each["sizes"], each["size"], what)
                rows.append((*cells, _seconds(one), _seconds(two), _ratio(each[name])))
    head = ("function", "chain", "sizes", "at", "time", "of A", "of B", "B / A")
    return _part("Times that changed", head, rows)


def _ratio(times: Mapping[str, Any]) -> str:
    return f"{times['b'] / times['a']:.2f}" if times["a"] and times["b"] else ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _files(files: Mapping[str, Mapping[str, int | None]]) -> str:
    rows = [(name, _size(each["a"]), _size(each["b"])) for name, each in files.items()]
    return _part("Files of other sizes, in bytes", ("file", "in A", "in B"), rows)


def _size(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _kernels(kernels: Mapping[str, Any]) -> str:
    if not kernels["known"]:
        return "Code of kernels was not compared: `explain` writes none; give what `compile` wrote."
    rows = [(what, name) for what in ("new", "gone", "changed") for name in kernels[what]]
    return _part("Kernels that are new, gone, or have other code", ("", "kernel"), rows)


def _part(heading: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table under a heading, or nothing; of many rows, the first and how many follow."""
    if not rows:
        return ""
    more = f"\n... and {len(rows) - _MOST} more; --json has all" if len(rows) > _MOST else ""
    return f"{heading}\n\n{table([head, *rows[:_MOST]])}{more}"
