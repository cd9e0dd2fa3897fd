"""The texts of kernels, as much of them as a page may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from ..material import Source, Text
from . import numbers
from .candidates import Clock

if TYPE_CHECKING:
    from ..report import Report

MOST_CHARACTERS = 16_000
"""Of one text."""

MOST_TEXTS = 3
"""Texts of one PrimFunc in one language."""

MOST_OF_ALL = 900_000
"""Characters of all texts together."""


def sources_of(
    sources: Sequence[Source], ids: Mapping[str, str], clock: Clock
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the texts of PrimFuncs, those of fused kernels first, and what was left out.

    Parameters
    ----------
    ids : mapping of str to str
        What the page calls fused kernels.
    """
    order = {name: i for i, name in enumerate(ids)}
    every = {source.function: source for source in sources}.values()
    found, cuts, used, skipped = [], [], 0, 0
    for source in sorted(every, key=lambda s: order.get(s.function, len(order))):
        if clock.is_over or used >= MOST_OF_ALL:
            skipped += 1
            continue
        texts, told = _texts(source)
        used += sum(len(text["text"]) for text in texts)
        if texts:
            kernel = ids.get(source.function, "")
            entry = {"function": source.function, "kernel": kernel, "texts": texts, "cut": told}
            found.append(entry)
    if skipped:
        limits = f"{numbers.seconds(clock.seconds)} and {MOST_OF_ALL:,} characters"
        cuts.append(f"Texts of {skipped} PrimFuncs are left out: texts may take {limits}.")
    return found, cuts


def kernel_texts(report: Report) -> list[dict[str, Any]]:
    """Return the texts of all functions' kernels, as long as a page's but however long it takes."""
    fused = dict.fromkeys((d.kernel for d in report.fused), "")
    found, _ = sources_of(report.material.sources, fused, Clock(inf))
    return [{"function": each["function"], "texts": each["texts"]} for each in found]


def _texts(source: Source) -> tuple[list[dict[str, str]], str]:
    """Return the texts of one PrimFunc, and what was left out of it."""
    try:
        every = source.texts
    except Exception as err:  # a text is no reason to lose the page
        return [_entry(Text(source.function, "TVMScript", f"# no text: {err}"))], ""
    kept: list[Text] = []
    for text in every:
        if sum(k.language == text.language for k in kept) < MOST_TEXTS:
            kept.append(text)
    left = len(every) - len(kept)
    told = f"{left} more texts, which differ in their tiles, are left out." if left > 0 else ""
    return [_entry(text) for text in kept], told


def _entry(text: Text) -> dict[str, str]:
    shown, rest = text.text[:MOST_CHARACTERS], len(text.text) - MOST_CHARACTERS
    if rest > 0:
        mark = "//" if text.language == "CUDA C++" else "#"
        shown += f"\n{mark} … {rest:,} more characters are left out of this page\n"
    return {"title": text.title, "language": text.language, "text": shown}
