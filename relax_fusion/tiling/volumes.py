"""How much the loads and stores of a schedule move: tile bytes times the loops around them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from .structure import Compute, Schedule


def volumes(schedule: Schedule) -> dict[str, int]:
    """Return the bytes that each load and store moves."""
    found: dict[str, int] = {}
    for name, around, tile_bytes in moves(schedule):
        found[name] = found.get(name, 0) + tile_bytes * prod(schedule.trips[n] for n in around)
    return found


def moves(schedule: Schedule) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield each load and store by its name, the loops around it, and the bytes of its tile."""
    size = dict(schedule.space.element_bytes)
    for statement, around in schedule.structure.statements:
        if not isinstance(statement, Compute):
            tile = prod(schedule.tile[n] for n in statement.what.loops)
            yield str(statement), around, tile * size[statement.tensor]
