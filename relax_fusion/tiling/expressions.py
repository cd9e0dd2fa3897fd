"""Tiling expressions: in which order loops over tiles stand, and which stand beside each other.

A deep expression nests all loops: ``mhnk``.  In a flat one, ``mn(k,h)``, loops that no statement
has both of follow one another inside those around them.  The notation is MCFuser's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from ..errors import TilingError
from .space import IterationSpace, Loops

_SHORT = re.compile(r"[A-Za-z]\d*")
_TOKEN = re.compile(r"\w+|[(),.]")


@dataclass(frozen=True)
class Expression:
    """A nest of loops, and in the innermost of them branches that follow one another.

    Loops are outermost first.  There are two branches or more, or none.
    """

    loops: tuple[str, ...]
    branches: tuple[Expression, ...] = ()

    def __str__(self) -> str:
        """Return the notation; there are dots where a name is longer than a letter and a number."""
        short = all(_SHORT.fullmatch(name) for name in self.names())
        return self._text("" if short else ".")

    def _text(self, between: str) -> str:
        head = between.join(self.loops)
        inner = ",".join(branch._text(between) for branch in self.branches)
        return f"{head}({inner})" if inner else head

    def names(self) -> Iterator[str]:
        """Yield all loops."""
        yield from self.loops
        for branch in self.branches:
            yield from branch.names()

    def without(self, names: Collection[str]) -> Expression:
        """Return what is left when loops are removed."""
        loops = tuple(name for name in self.loops if name not in names)
        rest = [branch.without(names) for branch in self.branches]
        rest = [branch for branch in rest if branch.loops or branch.branches]
        if len(rest) == 1:
            return Expression(loops + rest[0].loops, rest[0].branches)
        return Expression(loops, tuple(rest))

    def path_to(self, loops: Collection[str]) -> tuple[str, ...]:
        """Return the loops around a statement that has some: all outside the innermost of them."""
        for branch in self.branches:
            inner = branch.path_to(loops)
            if inner:
                return self.loops + inner
        last = max((n for n, name in enumerate(self.loops) if name in loops), default=-1)
        return self.loops[: last + 1]


def parse(text: str, names: Collection[str]) -> Expression:
    """Return the expression that a text denotes: the reverse of ``str``.

    `text`: loops in order, as ``mhnk`` or ``mn(k,h)``.  Names longer than a letter with a number
    have dots between them: ``row.col``.
    `names`: the loops that there are.
    Raises `TilingError` if it is none, or has a loop twice, or one that there is not.
    """
    tokens, names = _TOKEN.findall(text), tuple(names)
    whole = "".join(tokens) == text
    found = _nest(tokens, names) if whole else Expression(())
    if not whole or tokens or not text or found != found.without(()):
        raise TilingError(f"tiling expression {text!r}: must be loops, as mhnk or mn(k,h)")
    loops = list(found.names())
    for name in loops:
        if name not in names:
            raise TilingError(f"tiling expression {text!r}: no loop {name!r} of {', '.join(names)}")
        if loops.count(name) > 1:
            raise TilingError(f"tiling expression {text!r} has the loop {name!r} twice")
    return found


def _nest(tokens: list[str], names: Collection[str]) -> Expression:
    """Take a nest of loops from the front of a list; what is left shows that it is none."""
    loops: list[str] = []
    branches: list[Expression] = []
    while tokens and tokens[0] not in "(),":
        word = tokens.pop(0)
        short = _SHORT.findall(word)
        loops += short if word not in names and "".join(short) == word else [word] * (word != ".")
    if tokens[:1] == ["("]:
        while tokens[:1] in (["("], [","]):
            tokens.pop(0)
            branches.append(_nest(tokens, names))
        tokens[:1] = [] if tokens[:1] == [")"] else ["unclosed"]
    return Expression(tuple(loops), tuple(branches))


def expressions(space: IterationSpace) -> tuple[Expression, ...]:
    """Return all tiling expressions of a space, the deep ones first.

    ``C = A B, E = C D`` has 26: the 24 orders of m, n, k and h, and ``mn(k,h)`` and ``nm(k,h)``,
    because k and h alone have no statement in common.  A third product, ``G = E F`` with the loop
    p, has 146: the 120 orders of five loops, and 26 flat ones.  Of these, 4 have m and n outside k
    and the nest of h and p, 4 have m and h outside the nest of n and k and p, and 18 have three
    loops in any order outside two: k and p, k and h, or n and p.
    """
    found = _expressions(space, frozenset(space.ordered), space.ordered)
    return tuple(sorted(found, key=lambda e: bool(e.branches)))


def _expressions(space: IterationSpace, left: Loops, order: Sequence[str]) -> Iterator[Expression]:
    yield from (Expression(each) for each in permutations([a for a in order if a in left]))
    for count in range(len(left)):
        for head in permutations([a for a in order if a in left], count):
            yield from (Expression(head, rest) for rest in _branches(space, left - {*head}, order))


def _branches(
    space: IterationSpace, left: Loops, order: Sequence[str]
) -> Iterator[tuple[Expression, ...]]:
    """Yield the ways to do some loops one after the other: in groups of no common statement."""
    parts = _apart(space, left)
    for cuts in _cuts(len(parts)):
        groups = [frozenset().union(*parts[a:b]) for a, b in cuts]
        choices: list[tuple[Expression, ...]] = [()]
        for group in groups:
            inner = [e for e in _expressions(space, group, order) if e.loops]
            choices = [(*done, e) for done in choices for e in inner]
        yield from choices


def _cuts(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the ways to cut a sequence into two or more runs."""
    for first in range(1, count):
        yield [(0, first), (first, count)]
        for rest in _cuts(count - first):
            yield [(0, first), *((a + first, b + first) for a, b in rest)]


def _apart(space: IterationSpace, left: Loops) -> list[Loops]:
    """Return the groups of loops that have no statement in common, in the order of statements."""
    groups: list[Loops] = []
    for step in space.steps:
        here = step.loops & left
        if here:
            joined = here.union(*(g for g in groups if g & here))
            groups = [*(g for g in groups if not g & here), joined]
    return sorted(groups, key=lambda g: next(n for n, s in enumerate(space.steps) if s.loops & g))
