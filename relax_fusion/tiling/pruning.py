"""MCFuser's four rules, by which most schedules are never looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..hardware import DeviceSpec
from .expressions import Expression
from .placement import place_ordered
from .space import IterationSpace, TileLoop
from .structure import Structure

TILE = 16
"""What tiles are multiples of: the side of a product of tensor cores."""

MOST_PADDING = 0.05
"""Of a size that is no power of two; the others are not padded.  MCFuser's rule 3."""

MEMORY_SLACK = 1.2
"""Times the shared memory of a block that a footprint may reach: it is an estimate.  MCFuser's."""


@dataclass(frozen=True)
class Pruning:
    """What is left after a rule.

    Parameters
    ----------
    rule : str
        Its name.
    expressions : int
        Tiling expressions, or what they denote, where all loops have several tiles.
    candidates : int
        Schedules: these with all tiles that each may have.
    """

    rule: str
    expressions: int
    candidates: int


@dataclass(frozen=True)
class SpaceReport:
    """What each rule leaves, in order; the first entry is the whole space."""

    prunings: tuple[Pruning, ...]

    def __str__(self) -> str:
        """Return a table."""
        width = max(len(p.rule) for p in self.prunings)
        rows = [f"{'':{width}}  expressions   candidates"]
        rows += [f"{p.rule:{width}}  {p.expressions:11}  {p.candidates:11,}" for p in self.prunings]
        return "\n".join(rows)


def distinct(
    space: IterationSpace, found: Iterable[Expression], single: Collection[str] = ()
) -> dict[Structure, Expression]:
    """Rule 1: keep one expression of those for which a block does the same.

    Where the loops of the results are axes of the grid, their order says nothing; nor does that of
    loops without a common statement.  Loops in `single` have one tile, which makes more the same.
    """
    kept: dict[Structure, Expression] = {}
    seen: set[Expression] = set()
    for expression in found:
        left = expression.without({*single, *space.common})
        if left not in seen:
            seen.add(left)
            kept.setdefault(place_ordered(space, left, single), expression)
    return kept


def keeps_partial_results(space: IterationSpace, structure: Structure) -> bool:
    """Rule 2: tell whether tiles of an intermediate are kept for all iterations of a loop.

    So it is where a loop over sums of an intermediate stands around one over its elements, as in
    ``kn`` of ``C[m, n] = sum k``.  Results that are kept (E in ``mn(k,h)``) are not meant, nor sums
    of which results are made element by element.
    """
    return any(name not in space.final for name, _ in structure.kept)


def all_tiles(loop: TileLoop) -> list[int]:
    """Return the tiles of a loop: multiples of 16; all of it where it is shorter, 1 of a batch."""
    if loop.batch:
        return [1]
    return list(range(TILE, loop.size + TILE, TILE)) if loop.size > TILE else [loop.size]


def little_padded(loop: TileLoop, tiles: list[int]) -> list[int]:
    """Rule 3: keep the tiles that pad little, or least where none does."""
    ratio = {tile: -(-loop.size // tile) * tile / loop.size - 1 for tile in tiles}
    is_power = loop.size & (loop.size - 1) == 0
    kept = [t for t in tiles if ratio[t] == 0 or (not is_power and ratio[t] < MOST_PADDING)]
    least = min(ratio.values())
    return kept or [t for t in tiles if ratio[t] == least]


def fits(footprint: int, dev: DeviceSpec) -> bool:
    """Rule 4: tell whether tiles fit shared memory, or the second-level cache of a core."""
    memory = dev.smem_per_block_bytes if dev.kind == "gpu" else dev.l2_bytes
    return footprint <= MEMORY_SLACK * memory
