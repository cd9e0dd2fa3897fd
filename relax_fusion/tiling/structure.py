"""A schedule of a chain: a tree of loops and statements, an axis of the grid each, and tiles.

Tiles of Triton are powers of two, and have a bounded number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..errors import TilingError
from .space import Access, IterationSpace, Step

LEAST_SUMMED = 16
"""A product of matrices sums 16 elements at least (Triton, `tl.dot` of half precision)."""

MOST_TILE = 1 << 16
"""A tile has 65,536 elements at most: the registers of a multiprocessor."""

MOST_SPREAD = 1 << 15
"""A tile that is multiplied element by element, where there is no product of matrices to make of
it, has 32,768 elements at most."""


@dataclass(frozen=True)
class Load:
    """A tile of an operand comes from memory."""

    what: Access

    @property
    def tensor(self) -> str:
        """The operand."""
        return self.what.tensor

    def __str__(self) -> str:
        return f"L_{self.tensor}"


@dataclass(frozen=True)
class Compute:
    """The statement that makes `tensor` is computed for a tile."""

    tensor: str

    def __str__(self) -> str:
        return f"C_{self.tensor}"


@dataclass(frozen=True)
class Store:
    """A tile of a result goes to memory."""

    what: Access

    @property
    def tensor(self) -> str:
        """The result."""
        return self.what.tensor

    def __str__(self) -> str:
        return f"S_{self.tensor}"


@dataclass(frozen=True)
class Loop:
    """Its body is done for one tile after the other."""

    name: str
    body: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.body))})"


Statement = Load | Compute | Store
Node = Loop | Load | Compute | Store


@dataclass(frozen=True)
class Structure:
    """What a block of the grid does, for tiles of any size."""

    grid: tuple[str, ...]
    """The loops that are axes of the grid."""
    body: tuple[Node, ...]
    """What each block does, in order."""
    kept: tuple[tuple[str, tuple[str, ...]], ...]
    """Tensors of which tiles are kept for all iterations of loops: sums that are continued later,
    and what a later loop reads again."""

    def __str__(self) -> str:
        """Return the tree: ``grid m h: n(k(L_A, L_B, C_C), L_D, C_E), S_E``."""
        return f"grid {' '.join(self.grid)}: {', '.join(map(str, self.body))}"

    @cached_property
    def statements(self) -> tuple[tuple[Statement, tuple[str, ...]], ...]:
        """The statements, each with the loops around it; those of the grid first."""
        return tuple(_statements(self.body, self.grid))


def _statements(
    body: tuple[Node, ...], around: tuple[str, ...]
) -> Iterator[tuple[Statement, tuple[str, ...]]]:
    for node in body:
        if isinstance(node, Loop):
            yield from _statements(node.body, (*around, node.name))
        else:
            yield node, around


@dataclass(frozen=True)
class Schedule:
    """A structure with a tile for each loop.

    `space`: the loops and statements.
    `structure`: their order.
    `tiles`: elements of a tile of each loop of the space.
    Raises `TilingError` if a tile is missing, empty, or one of several for which there is no loop.
    """

    space: IterationSpace
    structure: Structure
    tiles: tuple[int, ...]

    def __post_init__(self) -> None:
        loops = self.space.loops
        if len(self.tiles) != len(loops) or min(self.tiles) < 1:
            names = ", ".join(a.name for a in loops)
            raise TilingError(f"tiles are {self.tiles}; must be one of each of {names}, from 1 on")
        there = {name for _, around in self.structure.statements for name in around}
        for name, count in self.trips.items():
            if count > 1 and name not in there:
                raise TilingError(
                    f"{name} has {count} tiles of {self.tile[name]}, and no loop in "
                    f"{self.structure}; its tile must be all of it"
                )

    @cached_property
    def tile(self) -> Mapping[str, int]:
        """The tiles by loop."""
        return {a.name: t for a, t in zip(self.space.loops, self.tiles, strict=True)}

    @cached_property
    def trips(self) -> Mapping[str, int]:
        """How many tiles each loop has."""
        return {a.name: -(-a.size // t) for a, t in zip(self.space.loops, self.tiles, strict=True)}

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        count = 1
        for name in self.structure.grid:
            count *= self.trips[name]
        return count

    def __str__(self) -> str:
        over = ", ".join(f"{n} {self.trips[n]} x {self.tile[n]}" for n in self.structure.grid)
        return "\n".join([f"grid {over}", *self._lines(self.structure.body, "  ")])

    def _lines(self, body: tuple[Node, ...], indent: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, Loop):
                yield f"{indent}for {node.name}: {self.trips[node.name]} x {self.tile[node.name]}"
                yield from self._lines(node.body, f"{indent}  ")
            elif isinstance(node, Compute):
                yield f"{indent}compute {node.tensor} {self._shape(node.tensor)}"
            else:
                what = "load" if isinstance(node, Load) else "store"
                shape = " x ".join(str(self.tile[n]) for n in node.what.loops) or "1"
                yield f"{indent}{what} {node.tensor} {shape}"

    def _shape(self, tensor: str) -> str:
        """Return the tile of a tensor, and over what it is combined."""
        step = self.space.step[tensor]
        summed = [a.name for a in self.space.loops if a.name in step.reduced]
        tile = " x ".join(str(self.tile[n]) for n in step.makes.loops) or "1"
        over = " x ".join(str(self.tile[n]) for n in summed)
        return f"{tile} over {over}" if over else tile


def moves(schedule: Schedule) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the loops around each load and store, and the bytes of its tile."""
    size = dict(schedule.space.element_bytes)
    for statement, around in schedule.structure.statements:
        if not isinstance(statement, Compute):
            tile = prod(schedule.tile[n] for n in statement.what.loops)
            yield around, tile * size[statement.tensor]


def block_sizes(schedule: Schedule) -> dict[str, int]:
    """Return the elements of a block along each loop: the next power of two.

    Raises `TilingError` if a loop of several tiles has one that is no such power.
    """
    found: dict[str, int] = {}
    summed = {name for step in schedule.space.steps if step.dtype for name in step.reduced}
    for loop in schedule.space.loops:
        tile = schedule.tile[loop.name]
        least = LEAST_SUMMED if loop.name in summed and loop.size > 1 else 1
        found[loop.name] = max(least, 1 << (tile - 1).bit_length())
        if schedule.trips[loop.name] > 1 and found[loop.name] != tile:
            raise TilingError(
                f"the loop {loop.name} has tiles of {tile}; blocks of Triton are powers of two"
                f"{f' from {least} on' if least > 1 else ''}"
            )
    return found


def refuse_blocks(schedule: Schedule) -> None:
    """Refuse schedules that no kernel of Triton can do.

    Raises `TilingError` if tiles of a tensor are kept for several iterations of a loop, or if a
    tile of several is no power of two, or is too large.
    """
    for name, loops in schedule.structure.kept:
        raise TilingError(f"tiles of {name} are kept for all iterations of {', '.join(loops)}")
    block = block_sizes(schedule)
    for step in schedule.space.steps:
        for tile in (step.makes, *step.reads):
            count = prod(block[loop] for loop in tile.loops)
            if count > MOST_TILE:
                raise TilingError(
                    f"{tile.tensor} has tiles of {count} elements; at most {MOST_TILE}"
                )
        if step.reduced and not is_product(step, block):
            refuse_spread(step.out, prod(block[loop] for loop in step.loops))


def refuse_spread(tensor: str, count: int) -> None:
    """Refuse so many elements of a sum that is no product of matrices."""
    if count > MOST_SPREAD:
        raise TilingError(
            f"{tensor} is computed in tiles of {count} elements that no product of matrices "
            f"makes; at most {MOST_SPREAD}"
        )


def is_product(step: Step, block: Mapping[str, int]) -> bool:
    """Tell whether a contraction is one of matrices: what it reads has rows, or has columns."""
    made = {name for name in step.makes.loops if block[name] > 1}
    sides: list[set[str]] = []
    for read in step.reads:
        own = made & {*read.loops}
        joined = own.union(*(side for side in sides if side & own))
        sides = [side for side in sides if not side & own] + [joined] * bool(own)
    return bool(step.dtype) and len(sides) == 2
