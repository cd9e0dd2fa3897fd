"""Tiles as blocks of Triton: powers of two, and how many elements they may have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..errors import TilingError
from .space import Step
from .structure import Schedule

LEAST_SUMMED = 16
"""Elements that a product of matrices sums at least (Triton, `tl.dot` of half precision)."""

MOST_TILE = 1 << 16
"""Elements of a tile: registers of a multiprocessor."""

MOST_SPREAD = 1 << 15
"""Elements of a tile that is multiplied element by element, where there is no product of matrices
to make of it."""


def block_sizes(schedule: Schedule) -> dict[str, int]:
    """Return the elements of a block along each loop: the next power of two.

    Raises
    ------
    TilingError
        If a loop of several tiles has one that is no such power.
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

    Raises
    ------
    TilingError
        If tiles of a tensor are kept for several iterations of a loop, or if a tile of several is
        no power of two, or is too large.
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
