"""``relax-fusion diff``: what changed between two compilations, as text, JSON and a page."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..cli.artifact import check_written, write_page
from ..cli.console import Console
from ..report import Text
from ..report.tables import Table, seconds_text
from ..report.text_changes import changes
from ..validation import shown
from .compilation import read_compilation
from .difference import difference, is_equal
from .html import Content, Html, fold, hunks, joined, page, tag, titled

LOST = 1
"""The exit code where chains were lost."""

_MOST = 40
"""A table has at most this many rows in text; the page and JSON have all."""

_UNKNOWN = "Code of kernels was not compared: `explain` writes none; give what `compile` wrote."

_CHAIN, _COUNTED = ("function", "chain", "sizes"), ("function", "count", "chain", "sizes")
_CODE = ("changed", "new", "gone")
_CHAINS = {
    "lost": "Lost: chains of A that are no kernels in B",
    "replaced": "Replaced: chains of A whose operations are in other kernels in B",
    "gained": "Gained: chains that are kernels in B only",
}

Texts = Mapping[str, Sequence[Text]]
"""The texts of a compilation's kernels, by the name of the function."""


def diff_command(args: argparse.Namespace, console: Console) -> int:
    """Compare ``args.a`` with ``args.b``."""
    check_written({"--html": args.html}, args.a, args.b)
    a, b = read_compilation(args.a), read_compilation(args.b)
    found = difference(a, b)
    told = {"equal": is_equal(found), **found}
    if args.html is not None:
        made = diff_html((args.a, args.b), told, (a.sources, b.sources))
        write_page(made, args.html, console)
    if args.json:
        console.json({"a": args.a, "b": args.b, **told})
    else:
        console.result(_text(told, args.a, args.b))
    return LOST if found["lost"] else 0


def tables_of(found: Mapping[str, Any]) -> list[Table]:
    """Return as tables what `difference` found."""
    return [
        _table(
            "Predicted time of all fused kernels of a call",
            ("function", "at", "in A", "in B", "B / A"),
            [(c["function"], c["sizes"], *_both(c)) for c in found["calls"]],
        ),
        *(
            _table(
                title,
                ("function", "times", "chain", "sizes", "predicted, each"),
                [(*_texts(c, _COUNTED), _predicted(c["seconds"])) for c in found[name]],
            )
            for name, title in _CHAINS.items()
        ),
        _table(
            "Outside of fused kernels, in more or fewer places",
            ("function", "left", "in A", "in B", "because"),
            [_texts(x, ("function", "kind", "a", "b", "reason")) for x in found["left"]],
        ),
        _table(
            "Plans that changed",
            (*_CHAIN, "range", "tiles of A", "tiles of B"),
            [_texts(p, (*_CHAIN, "range", "a", "b")) for p in found["plans"]],
        ),
        _table(
            "Times that changed",
            (*_CHAIN, "at", "time", "of A", "of B", "B / A"),
            [
                (*_texts(each, (*_CHAIN, "size")), what, *_both(each[name]))
                for each in found["times"]
                for name, what in (("fused_s", "predicted"), ("measured_s", "measured"))
                if name in each
            ],
        ),
        _table(
            "Files of other sizes, in bytes",
            ("file", "in A", "in B"),
            [(name, _size(x["a"]), _size(x["b"])) for name, x in found["files"].items()],
        ),
        _table(
            "Kernels that are new, gone, or have other code",
            ("", "kernel"),
            [(what, name) for what in _CODE for name in found["kernels"][what]],
        ),
    ]


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    return Table(title, [head, *rows])


def _texts(record: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(record[name]) for name in names)


def _both(times: Mapping[str, float | None]) -> tuple[str, str, str]:
    a, b = times["a"], times["b"]
    return seconds_text(a), seconds_text(b), f"{b / a:.2f}" if a and b else ""


def _predicted(seconds: Mapping[str, float]) -> str:
    """Return the predicted times of one kernel of a chain at its first and last size."""
    told = [f"{seconds_text(value)} at {size}" for size, value in seconds.items()]
    return ", ".join(dict.fromkeys((told[0], told[-1]))) if told else "-"


def _size(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _text(found: Mapping[str, Any], a: str, b: str) -> str:
    parts = [_facts(found["facts"])]
    if found["equal"]:
        parts.append(f"{a} and {b} are equal in all that was compared.")
    for table in tables_of(found):
        more = len(table.rows) - 1 - _MOST
        told = replace(table, rows=table.rows[: _MOST + 1]).text()
        parts.append(told + (f"\n... and {more} more; --json has all" if more > 0 else ""))
    parts.append("" if found["kernels"]["known"] else _UNKNOWN)
    return "\n\n".join(part for part in parts if part)


def _facts(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Say first that two compilations are of different models, or for different targets."""
    heads = {"source": "models differ", "target": "targets differ"}
    return "\n".join(
        f"{heads.get(name, f'{name} differs')}: A {shown(each['a'])}, B {shown(each['b'])}"
        for name, each in facts.items()
    )


def diff_html(names: tuple[str, str], found: Mapping[str, Any], texts: tuple[Texts, Texts]) -> str:
    """Return the page of what ``diff --json`` writes, with the texts of kernels of both."""
    told = "They are equal in all that was compared." if found["equal"] else ""
    overview = [tag("p", each) for each in (told, *_facts(found["facts"]).splitlines()) if each]
    kernels = found["kernels"]
    folds = [_kernel(n, what, texts) for what in _CODE for n in kernels[what]]
    code: Content = folds or tag("p", "All have the same code." if kernels["known"] else _UNKNOWN)
    overview += [titled(table) for table in tables_of(found)[:-1]]
    lead = f"A is {names[0]}, B is {names[1]}; both are {', '.join(found['both'].values())}."
    sections = [("overview", "What differs", overview), ("kernels", "Kernels", code)]
    return page("What differs between two compilations", lead, sections)


def _kernel(name: str, what: str, texts: tuple[Texts, Texts]) -> Html:
    """Return the texts of one kernel in two compilations, those of one title beside each other."""
    one, two = (
        {(t.title, t.language): t.text.splitlines() for t in of.get(name, ())} for of in texts
    )
    parts = []
    for key in dict.fromkeys([*one, *two]):
        found, left = changes(one.get(key, ()), two.get(key, ()), "kernel")
        same = [] if found else [tag("p", "What is kept of this text is the same in both.")]
        parts.append(joined([tag("h3", ", ".join(key)), hunks(found), *same, tag("p", left)]))
    return fold(f"{name}: {what}", *(parts or [tag("p", "Its text is in neither report.")]))
