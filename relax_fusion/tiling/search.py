"""The search space of a graph: every structure with every tile, pruned, and sorted by price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from math import prod

from ..hardware import DeviceSpec
from ..workload.graph import Graph
from ..workload.roofline import Sizes
from .expressions import Expression, expressions
from .price import Cost
from .pruning import (
    Pruning,
    SpaceReport,
    all_tiles,
    distinct,
    fits,
    keeps_partial_results,
    little_padded,
)
from .space import IterationSpace, TileLoop, iteration_space
from .structure import Schedule, Structure

Single = frozenset[str]
"""The loops of one tile."""

Tiles = Mapping[str, list[int]]
"""The tiles that each loop may have."""


@dataclass(frozen=True)
class Candidate:
    """A schedule with its price.

    Parameters
    ----------
    schedule : Schedule
        Structure and tiles.
    seconds : float
        What MCFuser's formula predicts.
    footprint, resident : int
        Bytes of one tile of each tensor, which rule 4 goes by, and of all that are kept at a time.
    """

    schedule: Schedule
    seconds: float
    footprint: int
    resident: int


class SearchSpace:
    """All schedules of an iteration space, and what the rules leave of them.

    Parameters
    ----------
    space : IterationSpace
        The loops and statements.
    """

    def __init__(self, space: IterationSpace):
        self.space = space
        self.tiles: Tiles = {a.name: all_tiles(a) for a in space.loops}
        self.kept_tiles: Tiles = {a.name: little_padded(a, self.tiles[a.name]) for a in space.loops}

    @cached_property
    def expressions(self) -> tuple[Expression, ...]:
        """All tiling expressions."""
        return expressions(self.space)

    @cached_property
    def distinct(self) -> Mapping[Single, tuple[Structure, ...]]:
        """What rule 1 leaves, by which loops have one tile."""
        names = self.space.ordered
        subsets = chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))
        return {
            frozenset(each): tuple(distinct(self.space, self.expressions, each))
            for each in subsets
            if self._vectors(self.tiles, frozenset(each))
        }

    @cached_property
    def lean(self) -> Mapping[Single, tuple[Structure, ...]]:
        """What rule 2 leaves of it."""
        return {
            single: tuple(s for s in found if not keeps_partial_results(self.space, s))
            for single, found in self.distinct.items()
        }

    def report(self, dev: DeviceSpec) -> SpaceReport:
        """Return what each rule leaves; only what the last looks at is enumerated."""
        first = len(self.expressions) * prod(len(tiles) for tiles in self.tiles.values())
        fitting = sum(1 for _ in self._fitting(dev))
        several = _most_live(self.distinct)
        merged, lean = len(self.distinct[several]), len(self.lean[several])
        return SpaceReport(
            (
                Pruning("all", len(self.expressions), first),
                Pruning("1 distinct", merged, self._count(self.distinct, self.tiles)),
                Pruning("2 partial results", lean, self._count(self.lean, self.tiles)),
                Pruning("3 padding", lean, self._count(self.lean, self.kept_tiles)),
                Pruning("4 memory", lean, fitting),
            )
        )

    def candidates(self, dev: DeviceSpec) -> Iterator[Candidate]:
        """Yield what all rules leave, the cheapest first."""
        found = [(cost.seconds(tiles), s, cost, tiles) for s, cost, tiles in self._fitting(dev)]
        for seconds, structure, cost, tiles in sorted(found, key=lambda each: each[0]):
            schedule = Schedule(self.space, structure, tiles)
            yield Candidate(schedule, seconds, cost.footprint(tiles), cost.resident(tiles))

    def _fitting(self, dev: DeviceSpec) -> Iterator[tuple[Structure, Cost, tuple[int, ...]]]:
        """Yield structures and tiles that pass rule 4."""
        for single, found in self.lean.items():
            choices = [self._choices(self.kept_tiles, single, a.name) for a in self.space.loops]
            if not all(choices):
                continue
            for structure in found:
                cost = Cost(self.space, structure, dev)
                for tiles in _within(choices, cost, dev):
                    yield structure, cost, tiles

    def _count(self, found: Mapping[Single, tuple[Structure, ...]], tiles: Tiles) -> int:
        """Return how many schedules structures and tiles come to."""
        return sum(len(each) * self._vectors(tiles, single) for single, each in found.items())

    def _vectors(self, tiles: Tiles, single: Single) -> int:
        """Return how many tile vectors give one tile to these loops, and several to the others."""
        return prod(len(self._choices(tiles, single, name)) for name in self.tiles)

    def _choices(self, tiles: Tiles, single: Single, name: str) -> list[int]:
        loop = self._loops[name]
        if loop.batch or name not in self.space.ordered:
            return tiles[name]
        return [t for t in tiles[name] if (t >= loop.size) == (name in single)]

    @cached_property
    def _loops(self) -> Mapping[str, TileLoop]:
        return {a.name: a for a in self.space.loops}


def candidates(graph: Graph, dev: DeviceSpec, sizes: Sizes | None = None) -> Iterator[Candidate]:
    """Yield the schedules of a graph that MCFuser's rules leave, the cheapest first.

    Parameters
    ----------
    graph : Graph
        Contractions, element-wise maps and reductions.
    dev : DeviceSpec
        The device.
    sizes : mapping of str to int, optional
        Sizes of the dynamic dimensions.

    Raises
    ------
    TilingError, GraphError
        As `iteration_space`.
    """
    return SearchSpace(iteration_space(graph, sizes)).candidates(dev)


def _within(
    choices: list[list[int]], cost: Cost, dev: DeviceSpec, chosen: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Yield the tile vectors that fit; what does not with the least of the rest is left at once."""
    if len(chosen) == len(choices):
        yield chosen
        return
    least = tuple(min(tiles) for tiles in choices[len(chosen) + 1 :])
    for tile in choices[len(chosen)]:
        if not fits(cost.footprint((*chosen, tile, *least)), dev):
            return  # larger tiles do not either
        yield from _within(choices, cost, dev, (*chosen, tile))


def _most_live(found: Mapping[Single, tuple[Structure, ...]]) -> Single:
    """Return the fewest loops of one tile that there are."""
    return min(found, key=len)
