"""Graphs that are cut: into one that sums parts and one that merges them, or behind each product.

With few rows, axes of the result alone do not keep all multiprocessors of a device busy.  A loop
that is summed over is then an axis of the grid as well: each block has partial sums of its part of
the loop, which a second launch merges.  Both launches are graphs, which are tiled as any other.

A running maximum, and what is rescaled by it, are merged as two tiles of the loop are::

    E[m, h] = sum n: C[m, n] * D[n, h]
    s[i] = max t: x[i, t]
    l[i] = sum t: exp(x[i, t] - s[i])

become, in the second launch, ::

    E[m, h] = sum part: E_parts[part, m, h]
    s[i] = max part: s_parts[part, i]
    l[i] = sum part: l_parts[part, i] * exp(s_parts[part, i] - s[i])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ..errors import TilingError
from ..workload.dims import DynamicDim, size_text
from ..workload.graph import Block, Graph, Slot, Tensor
from ..workload.roofline import Sizes, is_contraction
from ..workload.values import At, Axis, AxisValue, Expr, Op, Read, apply, reads
from .axes import is_rescaled, loop_names
from .space import IterationSpace
from .structure import Structure

PART = "part"
"""The axis over the parts of a loop."""


@dataclass(frozen=True)
class SplitGraph:
    """The two launches."""

    partial: Graph
    merging: Graph
    """The first makes tensors of partial sums, called as the sums with ``_parts`` behind, which the
    second reads."""


def recomputed(space: IterationSpace, structure: Structure) -> dict[str, tuple[str, ...]]:
    """Return the tensors that several blocks compute, with the axes of the grid that repeat."""
    found = {
        step.out: tuple(name for name in structure.grid if name not in step.loops)
        for step in space.steps
    }
    return {tensor: axes for tensor, axes in found.items() if axes}


def split_loops(graph: Graph, sizes: Sizes | None = None) -> tuple[str, ...]:
    """Return the loops that blocks can share: behind their sums no statement needs the loop."""
    names, _ = loop_names(graph, sizes or {})
    found = []
    for loop in dict.fromkeys(names.values()):
        cut = _Cut(graph, names, loop)
        if cut.sums and cut.hinders() is None:
            found.append(loop)
    return tuple(found)


def split_sum(graph: Graph, loop: str, count: int, sizes: Sizes | None = None) -> SplitGraph:
    """Return a graph as two, of which the first sums each part of a loop by itself.

    `graph`: what is computed.
    `loop`: a loop of its iteration space that statements combine over.
    `count`: parts, of equal size.
    `sizes`: sizes of the dynamic dimensions.
    Raises `TilingError` if the loop cannot be shared, or has no parts of equal size that is known.
    """
    names, extents = loop_names(graph, sizes or {})
    cut = _Cut(graph, names, loop)
    reason = cut.hinders() if cut.sums else "no statement combines over it"
    if reason is not None:
        raise TilingError(f"the loop {loop} cannot be split: {reason}")
    size = extents[loop]
    if not 2 <= count <= size or size % count:
        raise TilingError(f"{loop} in {count} parts: must be 2 or more that divide {size}")
    return SplitGraph(_Partial(cut, count, size // count).graph(), _merging(cut, count))


@dataclass
class _Cut:
    """Which statements go where when a loop is split.

    `along` has the statement's name of the loop; `sums` what is combined over it; `behind` the
    statements that need the merged sums.
    """

    graph: Graph
    names: Mapping[tuple[int, str], str]
    loop: str
    along: dict[str, str] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    behind: list[Block] = field(default_factory=list)
    wrong: str | None = None

    def __post_init__(self) -> None:
        """Go through the statements in order."""
        late: set[str] = set()
        for number, block in enumerate(self.graph.blocks):
            sizes = {a.name: a.size for a in (*block.axes, *block.reduced)}
            axis = next((a for a in sizes if self.names[number, a] == self.loop), None)
            seen = {r.tensor for value in block.values() for r in reads(value)}
            if axis is None:
                if seen & {*late, *self.sums}:
                    self.behind.append(block)
                    late.add(block.out)
                continue
            needed = [
                name
                for name in seen
                if name in late or (name in self.sums and not self._grows(block, name))
            ]
            if isinstance(sizes[axis], DynamicDim):
                self.wrong = self.wrong or f"{size_text(sizes[axis])} is known at the call alone"
            if needed and self.wrong is None:
                self.wrong = f"{block.out} needs all of {sorted(needed)[0]}"
            if block.band is not None and axis in (block.band.column, block.band.row):
                self.wrong = self.wrong or f"{block.out} is masked along it"
            self.along[block.out] = axis
            if axis in {a.name for a in block.reduced}:
                self.sums.append(block.out)

    def _grows(self, block: Block, tensor: str) -> bool:
        loops = {(self.graph.blocks[n].out, axis): loop for (n, axis), loop in self.names.items()}
        return is_rescaled(self.graph, loops, block, tensor)

    def hinders(self) -> str | None:
        """Return why the loop cannot be split."""
        whole = [b.out for b in self.graph.blocks if b.out in self.along and b.out not in self.sums]
        stored = {slot.name for slot in self.graph.slots if slot.role == "out"}
        lost = [name for name in whole if name in stored]
        return self.wrong or (f"{lost[0]} is stored, which only the parts have" if lost else None)

    def tops(self, name: str) -> list[str]:
        """Return the maxima that what a sum adds is rescaled by, one for each factor."""
        made = {block.out: block for block in self.graph.blocks}
        inner = [r.tensor for r in reads(made[name].value) if r.tensor in self.along]
        tops = [r.tensor for each in inner for r in reads(made[each].value)]
        return [t for t in tops if t in self.sums and t != name]

    def loops_of(self, block: Block) -> dict[str, Axis]:
        """Return the axes of a statement by their loops."""
        number = self.graph.blocks.index(block)
        return {self.names[number, a.name]: a for a in (*block.axes, *block.reduced)}


class _Partial:
    """Writes the graph that sums the parts."""

    def __init__(self, cut: _Cut, count: int, size: int):
        self.cut, self.size = cut, size
        self.part = Axis(PART, count)

    def graph(self) -> Graph:
        """Return it, without the statements behind the sums and what only they need."""
        cut = self.cut
        blocks = [b for b in _needed(cut.graph, cut.sums) if b not in cut.behind]
        made = {b.out for b in blocks}
        used = {r.tensor for b in blocks for value in b.values() for r in reads(value)} | made
        tensors = [self._tensor(cut.graph[t.name]) for t in cut.graph.tensors if t.name in used]
        slots = [s for s in cut.graph.slots if s.role != "out" and s.name in used]
        slots += [Slot(parts_of(name), "out") for name in cut.sums]
        return Graph(tuple(tensors), tuple(map(self._block, blocks)), tuple(slots))

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor with a place for each part."""
        if tensor.name not in self.cut.along:
            return tensor
        if tensor.name in self.cut.sums:
            return _partial_sums(tensor, self.part)
        block = next(b for b in self.cut.graph.blocks if b.out == tensor.name)
        along = [place == At(((self.cut.along[tensor.name], 1),)) for place in block.at]
        shape = [self.size if cut else n for n, cut in zip(tensor.shape, along, strict=True)]
        return replace(tensor, shape=(self.part.size, *shape))

    def _block(self, block: Block) -> Block:
        axis = self.cut.along.get(block.out)
        if axis is None:
            return block

        def short(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple(Axis(a.name, self.size) if a.name == axis else a for a in axes)

        is_sum = block.out in self.cut.sums
        return replace(
            block,
            out=parts_of(block.out) if is_sum else block.out,
            at=(At(((PART, 1),)), *block.at),
            axes=(self.part, *short(block.axes)),
            reduced=short(block.reduced),
            value=self._value(block.value, axis),
            start=None if is_sum or block.start is None else self._value(block.start, axis),
            where=None if block.where is None else self._value(block.where, axis),
        )

    def _value(self, value: Expr, axis: str) -> Expr:
        """Return a value of a statement in its part of the loop."""
        if isinstance(value, AxisValue) and value.axis == axis:
            return apply("add", apply("multiply", AxisValue(PART), float(self.size)), value)
        if isinstance(value, Op):
            return Op(value.name, tuple(self._value(arg, axis) for arg in value.args))
        if not isinstance(value, Read):
            return value
        if value.tensor in self.cut.along:
            is_sum = value.tensor in self.cut.sums
            name = parts_of(value.tensor) if is_sum else value.tensor
            return Read(name, (At(((PART, 1),)), *value.at))
        return Read(value.tensor, tuple(self._place(place, axis) for place in value.at))

    def _place(self, place: At, axis: str) -> At:
        """Return a coordinate of an operand in a part of the loop."""
        more = tuple((PART, stride * self.size) for name, stride in place.terms if name == axis)
        return replace(place, terms=(*more, *place.terms))


def _merging(cut: _Cut, count: int) -> Graph:
    """Return the graph that merges the sums, and does what stands behind them."""
    part = Axis(PART, count)
    made = {block.out: block for block in cut.graph.blocks}
    blocks: list[Block] = []
    results = [s.name for s in cut.graph.slots if s.role == "out"]
    tops = [top for name in cut.sums for top in cut.tops(name)]
    for block in _needed(cut.graph, [*results, *tops], {*cut.sums}):
        blocks.append(_merged(cut, block, made, part) if block.out in cut.sums else block)
    there = {b.out for b in blocks}
    read = {r.tensor for b in blocks for value in b.values() for r in reads(value)}
    partial = [_partial_sums(cut.graph[name], part) for name in cut.sums if parts_of(name) in read]
    tensors = [t for t in cut.graph.tensors if t.name in there | read]
    slots = [s for s in cut.graph.slots if s.role != "out" and s.name in read]
    slots += [Slot(t.name, "in") for t in partial]
    slots += [s for s in cut.graph.slots if s.role == "out"]
    return Graph((*tensors, *partial), tuple(blocks), tuple(slots))


def _merged(cut: _Cut, block: Block, made: Mapping[str, Block], part: Axis) -> Block:
    """Return the statement that merges the parts of a sum or a maximum."""
    here = cut.loops_of(block)
    value: Expr = Read(parts_of(block.out), (At(((PART, 1),)), *block.at))
    for name in cut.tops(block.out) if block.combine == "sum" else ():
        top = made[name]
        theirs = {axis.name: loop for loop, axis in cut.loops_of(top).items()}
        place = tuple(
            replace(c, terms=tuple((here[theirs[a]].name, n) for a, n in c.terms)) for c in top.at
        )
        theirs_here = Read(parts_of(name), (At(((PART, 1),)), *place))
        change = theirs_here - apply("finite", Read(name, place))
        value = value * apply("exp", change)
    return replace(block, reduced=(part,), value=value, where=None, band=None)


def _partial_sums(tensor: Tensor, part: Axis) -> Tensor:
    """Return the tensor of the parts of a sum, which are not rounded."""
    dtype = "int32" if tensor.dtype.startswith(("int", "uint")) else "float32"
    return Tensor(parts_of(tensor.name), (part.size, *tensor.shape), dtype)


def parts_of(name: str) -> str:
    """Return the name of the parts of a sum."""
    return f"{name}_parts"


def _needed(graph: Graph, results: list[str], known: Collection[str] = ()) -> list[Block]:
    """Return the statements that results are computed by, up to tensors that are known."""
    wanted, found = {*results}, []
    for block in reversed(graph.blocks):
        if block.out in wanted:
            found.append(block)
            if block.out not in known:
                wanted |= {r.tensor for value in block.values() for r in reads(value)}
            elif block.start is not None:
                wanted |= {r.tensor for r in reads(block.start)}
    return found[::-1]


def product_parts(graph: Graph) -> tuple[Graph, ...]:
    """Return graphs of one product each, with the statements up to the next product behind it.

    A part reads what those before it store, by the names that the graph has.
    """
    groups: list[list[Block]] = [[]]
    for block in graph.blocks:
        if is_contraction(block) and any(map(is_contraction, groups[-1])):
            groups.append([])
        groups[-1].append(block)
    wanted = {slot.name for slot in graph.slots if slot.role == "out"}
    found: list[Graph] = []
    for blocks in reversed(groups):
        made = {block.out for block in blocks}
        read = {r.tensor for b in blocks for value in b.values() for r in reads(value)} - made
        slots = [s for s in graph.slots if s.role != "out" and s.name in read]
        given = {slot.name for slot in slots}
        slots += [Slot(t.name, "in") for t in graph.tensors if t.name in read - given]
        slots += [Slot(block.out, "out") for block in blocks if block.out in wanted]
        tensors = tuple(t for t in graph.tensors if t.name in made | read)
        found.append(Graph(tensors, tuple(blocks), tuple(slots)))
        wanted |= read
    return tuple(reversed(found))
