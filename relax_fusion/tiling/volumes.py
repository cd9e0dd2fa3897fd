"""How much the loads and stores of a schedule move: tile bytes times the loops around them."""

from __future__ import annotations

from math import prod

from .structure import Compute, Node, Schedule, Structure


def volumes(schedule: Schedule) -> dict[str, int]:
    """Return the bytes that each load and store moves.

    Of a split schedule, what stands in front of the loop is done by each part, and what stands
    behind it once.  The sums that parts hand over are not included: see `.split.handed_over`.
    """
    body, split, trips = schedule.structure.body, schedule.split, dict(schedule.trips)
    if split is None:
        return _volumes(schedule, body, trips)
    place = next(n for n, node in enumerate(body) if str(node).startswith(f"{split.loop}("))
    trips[split.loop] = -(-trips[split.loop] // split.parts) * split.parts
    found = _volumes(schedule, body[:place], trips)
    found = {name: split.parts * moved for name, moved in found.items()}
    for rest in (body[place : place + 1], body[place + 1 :]):
        for name, moved in _volumes(schedule, rest, trips).items():
            found[name] = found.get(name, 0) + moved
    return found


def _volumes(schedule: Schedule, body: tuple[Node, ...], trips: dict[str, int]) -> dict[str, int]:
    """Return the bytes that the loads and stores of a part of the body move."""
    size = dict(schedule.space.element_bytes)
    found: dict[str, int] = {}
    for statement, around in Structure(schedule.structure.grid, body, ()).statements:
        if not isinstance(statement, Compute):
            tile = prod(schedule.tile[n] for n in statement.what.loops) * size[statement.tensor]
            moved = tile * prod(trips[n] for n in around)
            found[str(statement)] = found.get(str(statement), 0) + moved
    return found
