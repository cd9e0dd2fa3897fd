"""Groups that meet in a number: one function computes them one after the other, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .plan import Group, Node

Place: TypeAlias = tuple[int, int]
"""Where a kernel stands: behind the binding of this index, the how-manieth of several there."""

Reads: TypeAlias = Mapping[int, Sequence[int]]
"""Which bindings each one reads, or is read by, by their indices."""


class Meeting(NamedTuple):
    """What one function computes."""

    nodes: Sequence[Node]  # in the order of the block
    results: Sequence[Node]  # those that others read
    place: Place  # as early as what it reads allows


class Meetings:
    """Finds groups that reduce tensors to numbers, and those that compute with these.

    Each would be a call, and each number a tensor in memory, as where a tensor is rounded by its
    range.

    `groups`: what each computes, in the order of their results.
    `reads`: what bindings read.
    `fits`: tells of members and results whether one function can have them.
    """

    def __init__(
        self,
        groups: Mapping[Group, Sequence[Node]],
        reads: Reads,
        fits: Callable[[Sequence[Node], Sequence[Node]], bool],
    ):
        self.groups, self.reads, self.fits = groups, reads, fits
        self.readers: dict[int, list[int]] = {}
        for reader, sources in reads.items():
            for source in sources:
                self.readers.setdefault(source, []).append(reader)
        self.place = {n.index: (g.sink.index, 0) for g, nodes in groups.items() for n in nodes}
        self.found: dict[Group, Meeting] = {}
        for group in groups:
            if _reduces(group) and group not in self.found:
                self._grow([group])

    def _grow(self, groups: list[Group]) -> None:
        """Add what meets these groups, one after the other."""
        best, seen = None, {*groups, *self.found}
        while more := next((g for g in self.groups if self._meets(g, groups, seen)), None):
            seen.add(more)
            wider = self._meeting([*groups, more])
            if wider is not None:
                best, groups = wider, [*groups, more]
        if best is not None:
            self.found |= dict.fromkeys(groups, best)
            self.place |= {node.index: best.place for node in best.nodes}

    def _meets(self, group: Group, others: Sequence[Group], seen: set[Group]) -> bool:
        """Tell whether a group makes or reads a number that others read or make."""
        if group in seen or group.sink.place != others[0].sink.place:
            return False
        if group.anchor is not None and not _reduces(group):
            return False
        return any(
            _reads_number(a, b) or _reads_number(b, a) for a, b in ((group, o) for o in others)
        )

    def _meeting(self, groups: Sequence[Group]) -> Meeting | None:
        """Return groups as one function, None if there is no place for it, or it does not fit."""
        nodes = sorted((n for g in groups for n in self.groups[g]), key=lambda n: n.index)
        inside = {node.index for node in nodes}
        before = {i for node in nodes for i in self.reads[node.index]} - inside
        first = max(map(self._place, before), default=(-1, 0))
        place, behind, results = (first[0], len(self.found) + 1), list[Place](), list[Node]()
        for sink in sorted((g.sink for g in groups), key=lambda n: n.index):
            others = [i for i in self.readers.get(sink.index, ()) if i not in inside]
            behind += map(self._place, others)
            results += [sink] if others or sink.is_read_elsewhere else []
        fits = all(place < other for other in behind) and self.fits(nodes, results)
        return Meeting(nodes, results, place) if fits else None

    def _place(self, index: int) -> Place:
        return self.place.get(index, (index, 0))


def _reduces(group: Group) -> bool:
    """Tell whether a group makes a number of a tensor."""
    anchor = group.anchor
    if anchor is None or anchor.operator.multiplies:
        return False
    return anchor.elements == group.sink.elements == 1


def _reads_number(reader: Group, source: Group) -> bool:
    """Tell whether a group reads the result of another one, which is a number."""
    return source.sink.elements == 1 and any(n in reader.members for n, _ in source.sink.readers)
