"""Beyond MCFuser: blocks that share a sum, so that few rows keep all multiprocessors busy.

An axis of the result is split by being an axis of the grid: each of these blocks computes the
intermediate again (`recomputed`).  A sum is split where blocks take turns of its loop: each has
partial sums, which a second launch or a cluster merges.  A running maximum and what is rescaled by
it are merged as two tiles of the loop are.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

from ..errors import TilingError
from .space import IterationSpace
from .structure import Compute, Load, Loop, Node, Schedule, Split, Store, Structure

MOST_CLUSTER_BLOCKS = 8
"""Blocks of a cluster that every GPU with clusters takes (CUDA C++ Programming Guide)."""


def recomputed(space: IterationSpace, structure: Structure) -> dict[str, tuple[str, ...]]:
    """Return the tensors that several blocks compute, with the axes of the grid that repeat."""
    found = {
        step.out: tuple(name for name in structure.grid if name not in step.loops)
        for step in space.steps
    }
    return {tensor: axes for tensor, axes in found.items() if axes}


def split_loops(space: IterationSpace, structure: Structure) -> tuple[str, ...]:
    """Return the loops that blocks can share: those behind which only maps of its sums stand."""
    names = [node.name for node in structure.body if isinstance(node, Loop)]
    return tuple(name for name in names if _hinders(space, structure, name) is None)


def split_over(
    schedule: Schedule, loop: str, parts: int, merge: Literal["launch", "cluster"]
) -> Schedule:
    """Return the schedule with a loop that several blocks share.

    Raises
    ------
    TilingError
        If the loop cannot be shared, or not by so many blocks.
    """
    reason = _hinders(schedule.space, schedule.structure, loop)
    if reason is not None:
        raise TilingError(f"the loop {loop} cannot be split: {reason}")
    most = schedule.trips[loop]
    if merge == "cluster":
        most = min(most, MOST_CLUSTER_BLOCKS)
    if not 2 <= parts <= most:
        where = " of a cluster" if merge == "cluster" else ""
        raise TilingError(f"{loop} in {parts} parts{where}: must be 2 to {most}")
    trips = schedule.trips[loop]
    share = -(-trips // parts)
    if -(-trips // share) != parts:
        raise TilingError(
            f"{loop} in {parts} parts: {trips} tiles, {share} a part, leave one empty"
        )
    return replace(schedule, split=Split(loop, parts, merge))


def handed_over(schedule: Schedule) -> dict[str, int]:
    """Return the bytes of the partial sums of all parts, by tensor.

    Each is written once and read once: in memory for a second launch, in the shared memory of the
    blocks of a cluster.
    """
    split, structure = schedule.split, schedule.structure
    if split is None:
        return {}
    size, kept = dict(schedule.space.element_bytes), dict(structure.kept)
    found = {}
    for name in _partial(schedule.space, _loop(structure, split.loop), split.loop):
        tile = prod(schedule.tile[n] for n in schedule.space.step[name].makes.loops)
        places = (*structure.grid, *kept.get(name, ()))
        found[name] = size[name] * tile * prod(schedule.trips[n] for n in places) * split.parts
    return found


def _hinders(space: IterationSpace, structure: Structure, name: str) -> str | None:
    """Return why blocks cannot share a loop."""
    body = structure.body
    loops = [n for n, node in enumerate(body) if isinstance(node, Loop) and node.name == name]
    if not loops:
        return f"it is not at the top of {structure}"
    if len(loops) > 1 or any(name in around for around in _outside(structure, loops[0])):
        return f"it is run more than once in {structure}"
    sums = _partial(space, body[loops[0]], name)
    return _lacks(space, {*sums}, _flat(body[loops[0] + 1 :]))


def _lacks(space: IterationSpace, there: set[str], behind: list[Node]) -> str | None:
    """Return what the statements behind a loop do that needs more than its sums."""
    for node in behind:
        if isinstance(node, Load):
            there.add(str(node.what))
        elif isinstance(node, Compute):
            step = space.step[node.tensor]
            if step.reduced:
                return f"{step.out} is a sum that needs all of it"
            for read in step.reads:
                known = read.tensor if read.tensor in space.step else str(read)
                if known not in there:
                    return f"{step.out} reads {read}, which only the parts have"
            there.add(step.out)
        elif isinstance(node, Store) and node.tensor not in there:
            return f"{node.tensor} is stored behind it, and only the parts have it"
    return None


def _loop(structure: Structure, name: str) -> Node:
    return next(n for n in structure.body if isinstance(n, Loop) and n.name == name)


def _partial(space: IterationSpace, node: Node, name: str) -> tuple[str, ...]:
    """Return what is summed over a loop inside it."""
    made = (n.tensor for n in _flat((node,)) if isinstance(n, Compute))
    return tuple(tensor for tensor in made if name in space.step[tensor].reduced)


def _flat(body: tuple[Node, ...]) -> list[Node]:
    """Return the statements of a body, those of its loops included."""
    return [node for node, _ in Structure((), body, ()).statements]


def _outside(structure: Structure, place: int) -> list[tuple[str, ...]]:
    """Return the loops around each statement outside one loop of the body."""
    rest = structure.body[:place] + structure.body[place + 1 :]
    return [around for _, around in Structure((), rest, ()).statements]
