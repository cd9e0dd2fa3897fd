"""How much the loads and stores of a schedule move: tile bytes times the loops around them."""

from __future__ import annotations

from math import prod

from .structure import Compute, Schedule


def volumes(schedule: Schedule) -> dict[str, int]:
    """Return the bytes that each load and store moves."""
    size = dict(schedule.space.element_bytes)
    found: dict[str, int] = {}
    for statement, around in schedule.structure.statements:
        if not isinstance(statement, Compute):
            tile = prod(schedule.tile[n] for n in statement.what.loops) * size[statement.tensor]
            moved = tile * prod(schedule.trips[n] for n in around)
            found[str(statement)] = found.get(str(statement), 0) + moved
    return found
