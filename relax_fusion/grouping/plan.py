"""Growing groups of operators, each of which becomes one kernel.

A group has one result, and all that reads its other members is in it.  So no path of the dataflow
leaves a group and comes back, and whatever is joined, there is an order of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..hardware import DeviceSpec
from .cells import CELLS, Cell
from .mapping import Edge, Kind, Operator
from .price import Work, seconds

MOST_MEMBERS = 256
"""Operators of a group, as in TVM's FuseOps."""

MOST_CODE = 512
"""Reads of one argument in the code of a group, whose formulas are put into one another: compiling
more takes seconds."""


@dataclass(eq=False)
class Node:
    """A binding that may be joined with others."""

    index: int
    """Its place in the block."""
    name: str
    where: str
    """The operator and the variable, for reports."""
    operator: Operator
    """What it computes."""
    sources: Sequence[tuple[Node, Edge]]
    """What of it other nodes make."""
    reads: Mapping[Hashable, float]
    """Bytes that it reads of each tensor, by the tensor's key."""
    key: Hashable
    """Of its own result."""
    elements: float
    made: float
    """Elements and bytes of that."""
    is_read_elsewhere: bool = False
    """Whether something else than nodes needs it."""
    place: Hashable = None
    """Where it is computed; only nodes of one place are joined."""
    readers: list[tuple[Node, Edge]] = field(default_factory=list)
    # In its group: the way to the result, how often an element is computed, and how often code
    # names it, if all is put into one formula; and whether a sum adds it up.
    path: Kind = Kind.ONE_TO_ONE
    times: float = 1.0
    code: int = 1
    is_summed: bool = False

    @property
    def is_anchor(self) -> bool:
        """Whether it is a sum, of which a kernel has one."""
        return self.operator.kind is Kind.MANY_TO_MANY

    @property
    def is_seed(self) -> bool:
        """Whether groups grow from it: elements of the result are at the place of an operand's."""
        return not self.is_anchor and any(e.kind is Kind.ONE_TO_ONE for e in self.operator.edges)


class Group:
    """Nodes of one kernel; the last makes its result."""

    def __init__(self, node: Node):
        self.members = [node]
        self.sink = node
        self.anchor = node if node.is_anchor else None
        self.kind = node.operator.kind
        self.reads = dict(node.reads)

    def absorb(self, other: Group) -> None:
        """Take the members of a group whose result no other reads."""
        self.members += other.members
        self.anchor = self.anchor or other.anchor
        self.kind = max(self.kind, other.kind)
        self.reads |= {k: max(v, self.reads.get(k, 0.0)) for k, v in other.reads.items()}
        self.reads.pop(other.sink.key, None)


@dataclass(frozen=True)
class Way:
    """How a group reads the result of another one, over all readers."""

    path: Kind
    times: float
    code: int
    is_summed: bool
    is_spread: bool


_Wanted: TypeAlias = Callable[[Group, Group, Way], bool]


class Plan:
    """Groups of the nodes of one block.

    `nodes`: in the order of the block.
    `dev`: what the kernels are for.
    `fits`: tells of the members of a group whether one function can have them.
    `declined`: by the results of two groups that are cheaper apart: seconds so, seconds as one
    kernel, and how often that would compute an element of the first.
    """

    def __init__(
        self, nodes: Sequence[Node], dev: DeviceSpec, fits: Callable[[Sequence[Node]], bool]
    ):
        self.dev, self.fits = dev, fits
        self.group_of = {node: Group(node) for node in nodes}
        self.declined: dict[tuple[Node, Node], tuple[float, float, float]] = {}
        for node in nodes:
            for source, edge in node.sources:
                source.readers.append((node, edge))
        seeds = sorted((n for n in nodes if n.is_seed), key=lambda n: (n.made, n.index))
        others = [n for n in reversed(nodes) if not n.is_seed]
        anchors = [n for n in nodes if n.is_anchor]
        # First what is at one place; then sums take what follows them: a view behind that is no
        # kernel, but it would be, had it been joined before.
        self._grow_all([*seeds, *others], self._is_in_place)
        self._grow_all(anchors, self._follows)
        self._grow_all([*seeds, *others], self._fuses)
        self._grow_all([*seeds, *others], self._pays)

    @property
    def groups(self) -> list[Group]:
        """The groups, each once, in the order of their results."""
        return sorted(set(self.group_of.values()), key=lambda g: g.sink.index)

    def _grow_all(self, nodes: Sequence[Node], wanted: _Wanted) -> None:
        """Grow the group of each node, with what of its neighbours is wanted."""
        grown: set[Group] = set()
        for node in nodes:
            if self.group_of[node] not in grown:
                self._grow(node, wanted)
                grown.add(self.group_of[node])

    def _grow(self, node: Node, wanted: _Wanted) -> None:
        """Join the group of a node with those that read its result, then with those it reads."""
        while (reader := self._reader(self.group_of[node])) is not None:
            if not self._join(self.group_of[node], reader, wanted):
                break
        group = self.group_of[node]
        waiting, left = set(_sources(group.members)), set[Node]()
        while waiting:
            source = max(waiting, key=lambda n: n.index)
            waiting.remove(source)
            first = self.group_of[source]
            if first is group:
                continue
            if self._reader(first) is group and self._join(first, group, wanted):
                waiting |= left.union(_sources(first.members))
                left.clear()
            else:
                left.add(source)

    def _reader(self, group: Group) -> Group | None:
        """Return the one group that reads the result of a group, if there is only one."""
        if group.sink.is_read_elsewhere:
            return None
        readers = {self.group_of[reader] for reader, _ in group.sink.readers}
        return readers.pop() if len(readers) == 1 else None

    def _join(self, first: Group, second: Group, wanted: _Wanted) -> bool:
        """Join two groups where that is possible, and wanted."""
        way = _way(first.sink)
        if not (self._is_possible(first, second, way) and wanted(first, second, way)):
            return False
        if not self.fits([*first.members, *second.members]):
            return False
        for node in first.members:
            node.path = max(node.path, way.path)
            node.times *= 1.0 if first.anchor is not None else way.times
            node.code *= way.code
            node.is_summed |= way.is_summed
        second.absorb(first)
        self.group_of.update(dict.fromkeys(first.members, second))
        return True

    def _is_possible(self, first: Group, second: Group, way: Way) -> bool:
        """Tell whether one kernel could compute two groups."""
        if len(first.members) + len(second.members) > MOST_MEMBERS:
            return False
        if first.sink.place != second.sink.place:
            return False
        if way.code * max(node.code for node in first.members) > MOST_CODE:
            return False
        if first.anchor is not None:
            return second.anchor is None and (way.times <= 1 or _spreads(first, way))
        return not (way.is_summed and second.anchor and second.anchor.operator.multiplies)

    def _is_in_place(self, first: Group, second: Group, way: Way) -> bool:
        return way.path is Kind.ONE_TO_ONE and first.anchor is second.anchor is None

    def _fuses(self, first: Group, second: Group, way: Way) -> bool:
        return CELLS[first.kind, way.path] is Cell.FUSE

    def _follows(self, first: Group, second: Group, way: Way) -> bool:
        """Tell whether a sum takes what follows it: the rows, too, that it is of."""
        return self._fuses(first, second, way) or (
            _spreads(first, way) and self._pays(first, second, way)
        )

    def _pays(self, first: Group, second: Group, way: Way) -> bool:
        """Tell whether a cell allows to join two groups, or the price of it does."""
        cell = CELLS[first.kind, way.path]
        if cell is not Cell.PRICE or self._is_view_of_rows(first, way):
            return cell is Cell.FUSE
        if (first.kind, way.path) == (Kind.SHUFFLE, Kind.MANY_TO_MANY) and not _moves_rows(first):
            return False
        if first.anchor is not None and not _spreads(first, way):
            return False
        apart = seconds(self._work(first), self.dev) + seconds(self._work(second), self.dev)
        times = 1.0 if first.anchor is not None else way.times
        fused = seconds(self._work(second, first, times), self.dev)
        if fused > apart:
            self.declined[first.sink, second.sink] = apart, fused, times
        return fused <= apart

    def _is_view_of_rows(self, first: Group, way: Way) -> bool:
        """Tell whether a sum had better read a view: that is no kernel, and its rows are memory's.

        Rules of CPUs compute what is reorganised row by row in front of the sum.
        """
        if first.kind is not Kind.REORGANISE or way.path is not Kind.MANY_TO_MANY:
            return False
        views = all(n.operator.kind is Kind.REORGANISE for n in first.members)
        return views or self.dev.kind == "gpu"

    def _work(self, group: Group, first: Group | None = None, times: float = 1.0) -> Work:
        """Return the work of a group, or of one that has taken the members of another one."""
        anchor = group.anchor or (first.anchor if first is not None else None)
        reads = dict(group.reads)
        slots = sum(self._slots(n, n.times, anchor) for n in group.members)
        if first is not None:
            reads = first.reads | reads
            del reads[first.sink.key]
            slots += sum(self._slots(n, n.times * times, anchor) for n in first.members)
        parallel = (anchor or group.sink).elements
        return Work(sum(reads.values()) + group.sink.made, slots, parallel)

    def _slots(self, node: Node, times: float, anchor: Node | None) -> float:
        """Return the arithmetic of a node; a CPU keeps what is read again, unless it sums."""
        again = self.dev.kind == "gpu" or anchor is not None
        return node.operator.slots * (times if again else min(times, 1.0))


def _spreads(first: Group, way: Way) -> bool:
    """Tell whether rows read what is made of their sums, in the order in which these are added."""
    anchor = first.anchor
    if anchor is None or not way.is_spread or way.times != anchor.operator.width:
        return False
    return first.sink.elements == anchor.elements


def _moves_rows(group: Group) -> bool:
    """Tell whether a shuffle leaves rows whole, along the last axis, which a sum is over."""
    operators = [n.operator for n in group.members]
    return all(o.moves_rows or o.kind is Kind.ONE_TO_ONE for o in operators)


def _sources(members: Sequence[Node]) -> Iterator[Node]:
    return (source for node in members for source, _ in node.sources)


def _way(sink: Node) -> Way:
    """Return how the group of its readers reads a result."""
    ways = [
        Way(
            max(edge.kind, reader.path),
            reader.times * edge.repeats,
            reader.code * max(edge.loads, 1),
            reader.is_summed or edge.is_summed,
            edge.is_spread and reader.path is Kind.ONE_TO_ONE,
        )
        for reader, edge in sink.readers
    ]
    return Way(
        max(w.path for w in ways),
        max(w.times for w in ways),
        sum(w.code for w in ways),
        any(w.is_summed for w in ways),
        all(w.is_spread for w in ways),
    )
