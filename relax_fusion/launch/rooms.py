"""Which workspaces of a PrimFunc are the same memory: those of launches that never run together."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import tvm
from tvm import ir, tirx

from .arguments import Part, TensorMap, Workspace
from .branches import Branch


def rooms_of(branches: Sequence[Branch]) -> list[tuple[Workspace, list[Workspace]]]:
    """Return memory for the workspaces of some branches, and which workspaces are in it.

    A call runs one branch, so workspaces of the same elements that are in no branch together are
    the same memory, as much as the largest needs.
    """
    used = [_workspaces(branch) for branch in branches]
    rooms: list[list[Workspace]] = []
    for space in _distinct([w for found in used for w in found]):
        together = [w for found in used if _has(found, space) for w in found]
        fitting = (
            room
            for room in rooms
            if room[0].dtype == space.dtype and not any(_has(together, w) for w in room)
        )
        room = next(fitting, None)
        if room is None:
            rooms.append([space])
        else:
            room.append(space)
    return [(_largest(room), room) for room in rooms]


def _workspaces(branch: Branch) -> list[Workspace]:
    found = (_memory(value) for launch in branch.launches for value in launch.args)
    return _distinct([value for value in found if isinstance(value, Workspace)])


def _memory(value: Any) -> Any:
    """Return what an argument is a part or a map of."""
    return _memory(value.of) if isinstance(value, TensorMap | Part) else value


def _has(found: Sequence[Workspace], space: Workspace) -> bool:
    """Tell whether a workspace is among some; equal ones are not the same."""
    return any(w is space for w in found)


def _distinct(found: Sequence[Workspace]) -> list[Workspace]:
    return list({id(w): w for w in found}.values())


def _largest(room: Sequence[Workspace]) -> Workspace:
    """Return a workspace that holds each of some, of the same shape if they have one."""
    if len(room) == 1:
        return room[0]
    analyzer = tvm.sym.Analyzer()
    most, *rest = (_elements(w) for w in room)
    for count in rest:
        most = tirx.max(most, count)
    return Workspace((analyzer.simplify(most),), room[0].dtype)


def _elements(space: Workspace) -> ir.Expr:
    count: ir.Expr = prod(space.shape, start=tirx.IntImm("int64", 1))
    return count
