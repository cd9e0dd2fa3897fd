"""How much the loads and stores of a schedule move: tile bytes times the loops around them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from .structure import Compute, Schedule


def volumes(schedule: Schedule, trips: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the bytes that each load and store moves.

    Parameters
    ----------
    schedule : Schedule
        Tiles and their order.
    trips : mapping of str to int, optional
        Tiles of each loop, where its size is another than the schedule's.
    """
    size, trips = dict(schedule.space.element_bytes), trips or schedule.trips
    found: dict[str, int] = {}
    for statement, around in schedule.structure.statements:
        if not isinstance(statement, Compute):
            tile = prod(schedule.tile[n] for n in statement.what.loops) * size[statement.tensor]
            moved = tile * prod(trips[n] for n in around)
            found[str(statement)] = found.get(str(statement), 0) + moved
    return found
