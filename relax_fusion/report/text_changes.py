"""What differs between two texts of a function; equal differences are told once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Kind = Literal["graph", "kernel", "other"]
"""The kind of a function: of Relax, a PrimFunc, or neither."""

CONTEXT = 2
"""This many unchanged lines are told before and after a change."""

MOST_COMPARED: dict[Kind, int] = {"graph": 20_000, "kernel": 500, "other": 500}
"""At most this many lines, between the first and the last that differ, are compared, by the kind of
the function."""

MOST_TOLD: dict[Kind, int] = {"graph": 600, "kernel": 200, "other": 200}
"""At most this many lines of one function's changes are told, by its kind; equal changes count
once."""

LONGEST_LINE = 400
"""This many characters of a line are kept: attributes hold whole kernels, and tuples a whole
cache."""

_END = 60
"""A line that is cut keeps this many characters of its end."""

_DEFINED = re.compile(r"(?:^\s*|\b)([A-Za-z_]\w*): (?:R|T)\.|^\s*([A-Za-z_]\w*) = ")
_NAME = re.compile(r"(?<![.\"\w])[A-Za-z_]\w*")


@dataclass(frozen=True)
class Hunk:
    """One place where a text changed, or several that changed in the same way."""

    before: int
    after: int
    """The line, from 1 on, at which the first of the places begins in each of the texts."""
    lines: tuple[str, ...]
    """The lines of that place; the first character of each is ``-``, ``+`` or a space."""
    times: int = 1
    """How many places: the same lines, but for the names of their variables."""


def changes(
    before: Sequence[str], after: Sequence[str], kind: Kind = "graph"
) -> tuple[tuple[Hunk, ...], str]:
    """Return where two texts of a function differ, and what was left out, as a sentence."""
    start = _same(before, after)
    end = _same(before[start:][::-1], after[start:][::-1])
    longest = max(len(before), len(after)) - start - end
    if longest > MOST_COMPARED[kind]:
        most = f"{MOST_COMPARED[kind]:,}"
        return (), f"{longest:,} lines in a row are other ones; at most {most} are compared."
    start, end = max(0, start - CONTEXT), max(0, end - CONTEXT)
    hunks = [*_hunks(before[start : len(before) - end], after[start : len(after) - end], start)]
    if len(hunks) > 1:
        defined = {name for line in (*before, *after) for name in _defined_by(line)}
        hunks = _folded(hunks, defined)
    return _limited(hunks, MOST_TOLD[kind])


def _same(before: Sequence[str], after: Sequence[str]) -> int:
    """Return how many lines are the same from the start on."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))


def added(lines: Sequence[str], kind: Kind = "graph") -> tuple[tuple[Hunk, ...], str]:
    """Return the text of a new function as `changes` does."""
    return _limited([Hunk(0, 1, tuple(f"+{line}" for line in lines))], MOST_TOLD[kind])


def shortened(line: str) -> str:
    """Return a line without its middle, if it is long."""
    if len(line) <= LONGEST_LINE:
        return line
    start = LONGEST_LINE - _END
    return f"{line[:start]} … {len(line) - LONGEST_LINE:,} characters … {line[-_END:]}"


def _hunks(before: Sequence[str], after: Sequence[str], skipped: int) -> Iterable[Hunk]:
    matcher = difflib.SequenceMatcher(None, before, after)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        lines: list[str] = []
        for what, i1, i2, j1, j2 in group:
            if what == "equal":
                lines += [f" {line}" for line in before[i1:i2]]
                continue
            lines += [f"-{line}" for line in before[i1:i2]]
            lines += [f"+{line}" for line in after[j1:j2]]
        yield Hunk(skipped + group[0][1] + 1, skipped + group[0][3] + 1, tuple(lines))


@lru_cache(maxsize=1 << 14)
def _defined_by(line: str) -> tuple[str, ...]:
    """Return the names that a line gives; a function is compared many times, mostly unchanged."""
    return tuple(a or b for a, b in _DEFINED.findall(line))


def _folded(hunks: Iterable[Hunk], variables: set[str]) -> list[Hunk]:
    """Count hunks that are the same but for the names of variables; of these, keep the first."""
    found: dict[tuple[str, ...], Hunk] = {}
    for hunk in hunks:
        shape = _shape(hunk.lines, variables)
        first = found.get(shape)
        found[shape] = hunk if first is None else replace(first, times=first.times + 1)
    return list(found.values())


def _shape(lines: Sequence[str], variables: set[str]) -> tuple[str, ...]:
    """Return lines with numbers for variables, in the order in which they are met."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        name = found[0]
        return numbers.setdefault(name, f"%{len(numbers)}") if name in variables else name

    return tuple(_NAME.sub(number, line) for line in lines)


def _limited(hunks: Sequence[Hunk], most: int) -> tuple[tuple[Hunk, ...], str]:
    """Keep hunks up to a number of lines; the last of them may be cut."""
    told: list[Hunk] = []
    room = most
    for hunk in hunks:
        if room <= 0:
            break
        lines = tuple(shortened(line) for line in hunk.lines[:room])
        told.append(replace(hunk, lines=lines))
        room -= len(lines)
    total = sum(len(hunk.lines) for hunk in hunks)
    left = total - sum(len(hunk.lines) for hunk in told)
    return tuple(told), f"{left:,} of {total:,} lines are left out." if left else ""
