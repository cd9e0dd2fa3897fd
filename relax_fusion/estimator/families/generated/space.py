"""The plans of the chain engine that are priced: structures, tiles, parts, warps and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations, product
from math import prod
from typing import TypeAlias

from ....hardware import DeviceSpec
from ....tiling import IterationSpace, Structure, expressions, split_loops
from ....tiling.placement import distinct, keeps_partial_results
from ....tiling.space import Loops, TileLoop
from ....tiling.split import PART
from ....workload.graph import Graph
from .plan import FAMILY, GeneratedPlan, many, space_of, split_graph

LEAST_ROWS, MOST_ROWS = 16, 128
"""Tiles of the rows of the result: of its first loop that is no batch."""

LEAST_TILE, MOST_TILE = 32, 256
"""Tiles of the other loops."""

MOST_WHOLE = 512
"""Elements of a loop that is one tile."""

MOST_ELEMENTS = 1 << 15
"""Elements of a tile of a tensor that is made: 128 KiB of registers in float32."""

PARTS = (2, 4, 8, 16)
"""How many blocks share a sum."""

WARPS, MANY_ELEMENTS = (4, 8), 1 << 12
"""Of a block, the second only where a tile that is made has more elements."""

BEAM = 24
"""Of the cheapest plans, how many have their neighbours priced: the cheapest of all is found for
MCFuser's G4, G6 and G12 (tested)."""

Tiles: TypeAlias = tuple[int, ...]
"""The parts of a sum, and the tile of each loop."""

STAGES = (3, 2, 4, 1)
"""Tiles in flight; all plans are priced with the first, and the cheapest with the others."""


def tiles_of(loop: TileLoop, is_row: bool) -> list[int]:
    """Return the tiles of a loop: powers of two, and all of it."""
    if loop.batch or loop.size == 1:
        return [1]
    least, most = (LEAST_ROWS, MOST_ROWS) if is_row else (LEAST_TILE, MOST_TILE)
    powers = [1 << p for p in range(least.bit_length() - 1, most.bit_length())]
    return [t for t in powers if t < loop.size] + [loop.size] * (loop.size <= MOST_WHOLE)


@lru_cache(maxsize=256)
def structures(
    graph: Graph, most: int = MOST_WHOLE, inside: Loops = frozenset()
) -> Mapping[frozenset[str], Mapping[Structure, str]]:
    """Return the structures of a graph with their expressions, by which loops are one tile.

    `most`: elements of a loop that may be one tile.
    `inside`: loops that are no axes of the grid.
    """
    space = space_of(graph)
    whole = [a.name for a in space.loops if not a.batch and 1 < a.size <= most]
    found = {}
    subsets = chain.from_iterable(combinations(whole, n) for n in range(len(whole) + 1))
    every = expressions(space)
    for single in map(frozenset, subsets):
        known = distinct(space, every, single, inside)
        found[single] = {
            structure: str(expression)
            for structure, expression in known.items()
            if not structure.kept and not keeps_partial_results(space, structure)
        }
    return found


def tilings(graph: Graph) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield expressions with tiles, where no tile of an intermediate is too large for registers."""
    space = space_of(graph)
    rows = result_loops(graph)[0]
    every = {a: tiles_of(a, a.name == rows) for a in space.loops}
    for single, known in structures(graph).items():
        choices = [
            [t for t in tiles if (t >= a.size) == (a.name in single) or a.batch or a.size == 1]
            for a, tiles in every.items()
        ]
        for tiles in product(*choices):
            tile = dict(zip((a.name for a in space.loops), tiles, strict=True))
            if _fits(space, tile):
                yield from ((expression, tile) for expression in known.values())


def _fits(space: IterationSpace, tile: Mapping[str, int]) -> bool:
    made = (prod(tile[n] for n in s.makes.loops) for s in space.steps)
    read = (prod(tile[n] for n in r.loops) for s in space.steps for r in s.reads)
    return max(chain(made, read)) <= MOST_ELEMENTS


def splits(graph: Graph) -> Iterator[str]:
    """Yield what sums may be shared by blocks, where no product is left behind: nothing first."""
    yield ""
    space = space_of(graph)
    size = {a.name: a.size for a in space.loops}
    for loop in split_loops(graph, many(graph)):
        counts = [n for n in PARTS if size[loop] % n == 0 and size[loop] // n >= LEAST_TILE]
        if not counts:
            continue
        merging = split_graph(graph, loop, counts[0]).merging
        if not any(s.dtype for s in space_of(merging).steps):
            yield from (f"{loop}={n}" for n in counts)


def plans(graph: Graph) -> Iterator[GeneratedPlan]:
    """Yield the plans of a graph: each tiling with four and eight warps, and three stages."""
    for split in splits(graph):
        loop, _, count = split.partition("=")
        first = split_graph(graph, loop, int(count)).partial if split else graph
        for expression, tile in tilings(first):
            rows, *_, columns = (tile[n] for n in result_loops(first))
            inner = max(tile.values())
            made = max(prod(tile[n] for n in s.makes.loops) for s in space_of(first).steps)
            for warps in WARPS[: 1 + (made > MANY_ELEMENTS)]:
                yield GeneratedPlan(
                    *(rows, columns, inner),
                    num_stages=STAGES[0],
                    num_warps=warps,
                    family=FAMILY,
                    expression=expression,
                    tiles=" ".join(f"{name}={t}" for name, t in tile.items()),
                    split=split,
                )


def descended(
    every: Iterable[GeneratedPlan],
    seconds: Callable[[GeneratedPlan], float],
    starts: Iterable[GeneratedPlan] = (),
) -> list[GeneratedPlan]:
    """Return most of the cheapest plans, in order; price `starts`, but not all.

    Every other tile of a loop is priced; then, again and again, what differs from one of the
    cheapest by one step of one tile, or of the parts of a sum.
    """
    by_loop: dict[str, dict[Tiles, list[GeneratedPlan]]] = {}
    for plan in every:
        by_loop.setdefault(_summed(plan), {}).setdefault(_tiles(plan), []).append(plan)
    known: dict[GeneratedPlan, float] = {}
    begun = [(_summed(plan), _tiles(plan)) for plan in starts]
    for loop, by_tiles in by_loop.items():
        columns = [sorted(set(column)) for column in zip(*by_tiles, strict=True)]
        coarse = [{*columns[0]}, *({*column[::2]} for column in columns[1:])]
        wanted = {t for t in by_tiles if all(map(set.__contains__, coarse, t))}
        wanted = {tiles for name, tiles in begun if name == loop} if begun else wanted
        found: dict[GeneratedPlan, float] = {}
        seen: set[Tiles] = set()
        while wanted:
            seen |= wanted
            found |= {plan: seconds(plan) for tiles in wanted for plan in by_tiles[tiles]}
            best = sorted(found, key=found.__getitem__)[:BEAM]
            near = (t for start in {*map(_tiles, best)} for t in _neighbours(start, columns))
            wanted = {tiles for tiles in near if tiles in by_tiles} - seen
        known |= found
    return sorted(known, key=known.__getitem__)


def _summed(plan: GeneratedPlan) -> str:
    """Return the loop of whose sums blocks have parts."""
    return plan.split.partition("=")[0]


def _tiles(plan: GeneratedPlan) -> Tiles:
    return (int(plan.split.partition("=")[2] or 1), *plan.tile.values())


def _neighbours(start: Tiles, columns: Sequence[Sequence[int]]) -> Iterator[Tiles]:
    """Yield tiles that differ in one number by one step."""
    for n, column in enumerate(columns):
        place = column.index(start[n])
        for value in column[max(0, place - 1) : place + 2]:
            yield (*start[:n], value, *start[n + 1 :])


def variants(plan: GeneratedPlan, dev: DeviceSpec) -> Iterator[GeneratedPlan]:
    """Yield a plan with all numbers of stages, and with tensor maps where the device has some."""
    for stages, maps in product(STAGES, (0, 1)[: 1 + dev.capabilities.tma]):
        yield replace(plan, num_stages=stages, tensor_maps=maps)


def result_loops(graph: Graph) -> tuple[str, ...]:
    """Return the loops of the first result, at least two: those of one element count again."""
    space = space_of(graph)
    found = [n for n in space.step[space.results[0]].makes.loops if n != PART]
    return (*found, *found[:1])[: max(2, len(found))]
