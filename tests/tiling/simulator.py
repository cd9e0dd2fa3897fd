"""A schedule that is run on a chip which remembers only what the schedule says it keeps.

No numbers are computed: a tile knows which part of a tensor it is, and a sum which tiles have been
added to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from relax_fusion.tiling import Access, Compute, Load, Loop, Schedule

Position = tuple[tuple[str, int], ...]
"""The number of a tile along each loop."""


def run(schedule: Schedule) -> None:
    """Run all blocks; raise AssertionError where one reads what is not there."""
    stored: dict[str, set[Position]] = {}
    for place in _positions(schedule, schedule.structure.grid):
        block = _Block(schedule, stored)
        block.run(schedule.structure.body, dict(place))
    for name in schedule.space.results:
        step = schedule.space.step[name]
        assert stored[name] == set(_positions(schedule, step.loops - step.reduced)), name


def _positions(schedule: Schedule, names: Iterable[str]) -> Iterator[Position]:
    ordered = sorted(names)
    for numbers in product(*(range(schedule.trips[n]) for n in ordered)):
        yield tuple(zip(ordered, numbers, strict=True))


class _Block:
    """One block of the grid: its operands, and what it has made."""

    def __init__(self, schedule: Schedule, stored: dict[str, set[Position]]):
        self.schedule, self.space, self.stored = schedule, schedule.space, stored
        self.kept = dict(schedule.structure.kept)
        self.loaded: dict[Access, Position] = {}
        self.made: dict[tuple[str, Position], tuple[Position, list[Position]]] = {}

    def run(self, body: tuple, at: Mapping[str, int]) -> None:
        for node in body:
            if isinstance(node, Loop):
                for number in range(self.schedule.trips[node.name]):
                    self.run(node.body, {**at, node.name: number})
            elif isinstance(node, Load):
                self.loaded[node.what] = _at(at, node.what.loops)
            elif isinstance(node, Compute):
                self._compute(node.tensor, at)
            else:
                self._see(node.tensor, node.what.loops, at, complete=True)
                self.stored.setdefault(node.tensor, set()).add(_at(at, node.what.loops))

    def _compute(self, name: str, at: Mapping[str, int]) -> None:
        step = self.space.step[name]
        for read in step.reads:
            if read.tensor in self.space.step:
                # a maximum that is rescaled by is read while it grows
                self._see(read.tensor, read.loops, at, complete=read.tensor in step.waits)
            else:
                assert self.loaded[read] == _at(at, read.loops), f"{read} for {name}"
        own = _at(at, step.loops - step.reduced)
        added = _at(at, step.reduced)
        before: list[Position] = []
        if any(number for _, number in added):  # that starts the sum
            where, before = self.made[name, _at(at, self.kept.get(name, ()))]
            assert where == own, f"{name} goes on at {own}, and is {where}"
        assert added not in before, f"{name} adds {added} twice"
        self.made[name, _at(at, self.kept.get(name, ()))] = own, [*before, added]

    def _see(self, name: str, loops: Iterable[str], at: Mapping[str, int], complete: bool) -> None:
        """Check that a tile is there, that it is the right one, and (a sum) that it is complete."""
        where, added = self.made[name, _at(at, self.kept.get(name, ()))]
        assert where == _at(at, loops), f"{name} is {where}, not {_at(at, loops)}"
        reduced = self.space.step[name].reduced
        if complete and reduced:
            assert sorted(added) == sorted(_positions(self.schedule, reduced)), name
        elif reduced:
            assert _at(at, reduced) in added, name


def _at(at: Mapping[str, int], names: Iterable[str]) -> Position:
    return tuple((name, at.get(name, 0)) for name in sorted(names))
