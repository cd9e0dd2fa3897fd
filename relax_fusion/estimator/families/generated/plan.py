"""Plans of the chain engine: a tiling expression, tiles, and how it is launched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated

import pydantic

from ....errors import TilePlanError, TilingError
from ....tiling import (
    IterationSpace,
    Schedule,
    SplitGraph,
    Structure,
    iteration_space,
    parse,
    place,
    split_sum,
)
from ....tiling.axes import loop_names
from ....tiling.space import Loops
from ....tiling.split import PART
from ....tiling.structure import block_sizes
from ....workload.graph import Graph
from ....workload.roofline import Sizes
from ...tile_plan import TilePlan

FAMILY = "generated"

MANY = 1 << 20
"""A dynamic dimension, where a schedule is made for all its sizes."""

MERGED_ROWS, MERGED_COLUMNS = 8, 64
"""Tile of a launch that merges partial sums; assumed."""

MERGING_WARPS = 4

_TILE = re.compile(r"(\w+)=([0-9]{1,9})")


@dataclass(frozen=True)
class TilingPlan(TilePlan):
    """A plan of the chain engine: what all of its kernels have."""

    expression: str = ""  # the order of the loops, as :func:`relax_fusion.tiling.parse` reads it
    tiles: str = ""  # elements of a tile along each loop: ``"m=64 n=128 k=64 h=128"``

    @property
    def text(self) -> str:
        """The tiling for people to read."""
        return f"{self.family} {self.expression}: {self.tiles}"

    @cached_property
    def tile(self) -> Mapping[str, int]:
        """The tiles by loop."""
        return _numbers(self.tiles, "tiles")


@dataclass(frozen=True)
class GeneratedPlan(TilingPlan):
    """A plan of a kernel of Triton."""

    split: str = ""
    """A loop whose parts several blocks sum, and how many: ``"n=4"``; empty: none."""
    tensor_maps: Annotated[int, pydantic.Field(ge=0, le=1)] = 0
    """1: tiles that are boxes of a tensor are loaded by the tensor memory accelerator."""

    @property
    def text(self) -> str:
        """The tiling for people to read."""
        split = f", {self.split} parts" if self.split else ""
        return f"{super().text}{split}"


def _numbers(text: str, what: str) -> dict[str, int]:
    found = _TILE.findall(text)
    if text.split() != [f"{name}={number}" for name, number in found]:
        raise TilePlanError(f"{what} are {text!r}; must be loops with numbers: 'm=64 n=128'")
    numbers = {name: int(number) for name, number in found}
    if len(numbers) < len(found):
        raise TilePlanError(f"{what} are {text!r}; must be one number for each loop")
    return numbers


@dataclass(frozen=True)
class Launched:
    """One launch of a plan: the warps and the stages of its blocks."""

    graph: Graph
    schedule: Schedule
    warps: int
    stages: int

    def __hash__(self) -> int:
        """Hash what tells the launches of a graph apart, once: there are thousands."""
        return self._hash

    @cached_property
    def block(self) -> Mapping[str, int]:
        """Elements of a block along each loop: powers of two."""
        return block_sizes(self.schedule)

    @cached_property
    def _hash(self) -> int:
        schedule = self.schedule
        return hash((schedule.structure, schedule.tiles, self.warps, self.stages))


@lru_cache(maxsize=1 << 14)
def launches(graph: Graph, plan: GeneratedPlan) -> tuple[Launched, ...]:
    """Return the launches of a plan: one, or two where partial sums are merged.

    Raises `TilingError` if the plan is none for the graph.  Raises `TilePlanError` if a field is no
    text of loops with numbers.
    """
    if not plan.split:
        return (_first(graph, plan),)
    parts = _numbers(plan.split, "split")
    if len(parts) != 1:
        raise TilePlanError(f"split is {plan.split!r}; must be of one loop: 'n=4'")
    ((loop, count),) = parts.items()
    two = split_graph(graph, loop, count)
    merging = Launched(two.merging, merging_schedule(two.merging), MERGING_WARPS, 1)
    return _first(two.partial, plan), merging


@lru_cache(maxsize=256)
def split_graph(graph: Graph, loop: str, count: int) -> SplitGraph:
    """Return a graph as two, of which the first sums the parts of a loop."""
    return split_sum(graph, loop, count, many(graph))


def _first(graph: Graph, plan: GeneratedPlan) -> Launched:
    schedule = scheduled(graph, plan.expression, plan.tile)
    return Launched(graph, schedule, plan.num_warps, plan.num_stages)


def scheduled(
    graph: Graph, expression: str, tile: Mapping[str, int], inside: Loops = frozenset()
) -> Schedule:
    """Return a schedule that a text denotes, where some loops are no axes of the grid.

    Raises `TilingError` if the text is none, or a tile is missing, or one of no loop.
    """
    space = space_of(graph)
    missing = [a.name for a in space.loops if a.name not in tile and not a.batch]
    if missing:
        raise TilingError(f"the loop {missing[0]} has no tile")
    names = [a.name for a in space.loops]
    unknown = [name for name in tile if name not in names]
    if unknown:
        raise TilingError(f"{unknown[0]} has a tile and is no loop; there are {', '.join(names)}")
    tiles = tuple(tile.get(a.name, 1) for a in space.loops)
    single = frozenset(a.name for a, t in zip(space.loops, tiles, strict=True) if t >= a.size)
    return Schedule(space, _placed(graph, expression, single, inside), tiles)


@lru_cache(maxsize=512)
def space_of(graph: Graph) -> IterationSpace:
    """Return the iteration space of a graph, whose dynamic dimensions have many elements."""
    return iteration_space(graph, many(graph))


def many(graph: Graph) -> Sizes:
    """Return sizes of dynamic dimensions that no tile covers."""
    return dict.fromkeys(graph.dims, MANY)


@lru_cache(maxsize=1024)
def loop_sizes(graph: Graph, sizes: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    """Return the elements of each loop at sizes of the dynamic dimensions."""
    return loop_names(graph, dict(sizes))[1]


@lru_cache(maxsize=4096)
def _placed(graph: Graph, expression: str, single: Loops, inside: Loops) -> Structure:
    space = space_of(graph)
    return place(space, parse(expression, space.ordered), single, inside)


def merging_schedule(graph: Graph) -> Schedule:
    """Return the schedule of a launch that merges partial sums: one part after another."""
    space = space_of(graph)
    inner = [a.name for a in space.loops if not a.batch and a.name != PART]
    tile = {PART: 1, **dict.fromkeys(inner, MERGED_ROWS), inner[-1]: MERGED_COLUMNS}
    tiles = {a.name: min(a.size, tile[a.name]) for a in space.loops if not a.batch}
    return scheduled(graph, ".".join(space.ordered), tiles)
