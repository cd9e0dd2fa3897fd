"""MCFuser's first two rules, by which most orders of loops are never looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .expressions import Expression
from .placement import place_ordered
from .space import IterationSpace
from .structure import Structure


def distinct(
    space: IterationSpace,
    found: Iterable[Expression],
    single: Collection[str] = (),
    inside: Collection[str] = (),
) -> dict[Structure, Expression]:
    """Rule 1: keep one expression of those for which a block does the same.

    Where the loops of the results are axes of the grid, their order says nothing; nor does that of
    loops without a common statement.  Loops in `single` have one tile, which makes more the same;
    those `inside` are no axes of the grid.
    """
    kept: dict[Structure, Expression] = {}
    seen: set[Expression] = set()
    for expression in found:
        left = expression.without({*single, *space.common})
        if left not in seen:
            seen.add(left)
            kept.setdefault(place_ordered(space, left, single, inside), expression)
    return kept


def keeps_partial_results(space: IterationSpace, structure: Structure) -> bool:
    """Rule 2: tell whether tiles of an intermediate are kept for all iterations of a loop.

    So it is where a loop over sums of an intermediate stands around one over its elements, as in
    ``kn`` of ``C[m, n] = sum k``.  Results that are kept (E in ``mn(k,h)``) are not meant, nor sums
    of which results are made element by element.
    """
    return any(name not in space.final for name, _ in structure.kept)
