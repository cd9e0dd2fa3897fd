"""The page of what differs between two compilations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..material import Text
from ..text_changes import changes
from . import numbers
from .hunks import hunk_entry
from .page import made_page

Texts = Sequence[Text]
"""The texts of one function's kernels."""


def diff_html(
    names: tuple[str, str],
    found: Mapping[str, Any],
    sources: tuple[Mapping[str, Texts], Mapping[str, Texts]],
) -> str:
    """Return the page.

    Parameters
    ----------
    names : tuple of str
        What the compilations are called.
    found : mapping
        What differs, as ``diff --json`` writes it.
    sources : tuple of mapping of str to Texts
        The texts of each compilation's kernels, by the name of the kernel; empty if it has none.
    """
    return made_page("diff.html", ("base.js",), data=diff_data(names, found, sources))


def diff_data(
    names: tuple[str, str],
    found: Mapping[str, Any],
    sources: tuple[Mapping[str, Texts], Mapping[str, Texts]],
) -> dict[str, Any]:
    """Return the data of the page, with the arguments of `diff_html`."""
    kernels, times = found["kernels"], _by_chain(found["times"])
    nothing: Mapping[str, Texts] = {}
    pairs = {"changed": sources, "new": (nothing, sources[1]), "gone": (sources[0], nothing)}
    entries = [
        {"name": name, "what": what, "parts": _parts(*(one.get(name, ()) for one in of))}
        for what, of in pairs.items()
        for name in kernels[what]
    ]
    chains = {
        part: [{**c, "predicted": chain_seconds(c, numbers.seconds)} for c in found[part]]
        for part in ("lost", "replaced", "gained")
    }
    return {
        "a": names[0],
        "b": names[1],
        "found": {**found, **chains},
        "chains": sum(map(len, chains.values())),
        "plans": _by_chain(found["plans"]),
        "calls": [{**c, "slower": numbers.slower(c["b"], c["a"])} for c in found["calls"]],
        "times": [{**each, "rows": [_time(t) for t in each["rows"]]} for each in times],
        "kernels": entries,
        "is_equal": found["equal"],
    }


def chain_seconds(chain: Mapping[str, Any], seconds: Callable[[float], str]) -> str:
    """Return the predicted times of one kernel of a chain at its first and last size."""
    told = [f"{seconds(value)} at {size}" for size, value in chain["seconds"].items()]
    return ", ".join(dict.fromkeys((told[0], told[-1]))) if told else "-"


def _by_chain(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in groups, each of one chain of one function and its sizes."""
    names = ("function", "chain", "sizes")
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return [{**dict(zip(names, key, strict=True)), "rows": of} for key, of in found.items()]


def _time(each: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of a chain at one size, each with how much longer it takes in B."""
    told = {}
    for name, key in (("predicted", "fused_s"), ("measured", "measured_s")):
        if key in each:
            a, b = each[key]["a"], each[key]["b"]
            slower = numbers.slower(b, a) if a is not None and b is not None else ""
            told[name] = {"a": a, "b": b, "slower": slower, "is_worse": bool(a and b and b > a)}
    return {"size": each["size"], "told": told}


def _parts(a: Texts, b: Texts) -> list[dict[str, Any]]:
    """Return the texts of one kernel in two compilations, those of one title beside each other."""
    one, two = ({(t.title, t.language): t.text.splitlines() for t in ts} for ts in (a, b))
    parts = []
    for key in dict.fromkeys([*one, *two]):
        hunks, left = changes(one.get(key, ()), two.get(key, ()), "kernel")
        parts.append(
            {
                "title": key[0],
                "language": key[1],
                "is_whole": key not in one or key not in two,
                "hunks": [hunk_entry(hunk) for hunk in hunks],
                "left_out": left,
            }
        )
    return parts
