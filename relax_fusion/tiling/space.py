"""The iteration space of a block graph: its loops over tiles, and the statements inside them.

A loop is an axis that statements share: m, n, k and h of ``C = A B, E = C D``.  It is summed over
by some statements (k by C, n by E), and spatial for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import TilingError
from ..workload.dtypes import STORED_BYTES
from ..workload.graph import Block, Graph
from ..workload.roofline import Sizes, instructions, is_contraction, operations
from ..workload.values import At, reads
from .axes import is_rescaled, loop_names

MOST_LOOPS = 6
"""Loops whose order is searched.  Seven have 5,040 orders and more, each with its placements."""

LEAST_ROWS = 16
"""Of a tile of a contraction's operand: no unit multiplies fewer."""

Loops = frozenset[str]


@dataclass(frozen=True)
class TileLoop:
    """A loop over tiles of an axis."""

    name: str
    """Of the axis."""
    size: int
    """Of the axis, in elements."""
    batch: bool
    """Whether its tile is one element: both operands of a contraction have it, or all
    statements."""


@dataclass(frozen=True)
class Access:
    """Elements of a tensor, as coordinates in loops."""

    tensor: str
    at: tuple[At, ...]

    @cached_property
    def loops(self) -> tuple[str, ...]:
        """The loops that index it, each once, in the order of the coordinates."""
        return tuple(dict.fromkeys(name for place in self.at for name, _ in place.terms))

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(map(str, self.at))}]"


@dataclass(frozen=True)
class Step:
    """A statement of the graph, as far as its place in a nest of loops goes."""

    makes: Access
    """The tensor that it makes."""
    loops: Loops
    reduced: Loops
    """The loops that it has, and those of them that it combines over."""
    reads: tuple[Access, ...]
    """What it reads, each once."""
    waits: frozenset[str]
    """Reductions that have to be complete before it, directly or through what it reads."""
    flops: int
    """Of an element."""
    dtype: str
    """In which it multiplies, where it is a contraction; else empty."""
    slots: tuple[tuple[Loops, int], ...]
    """Instructions of a GPU's thread, and the loops along which they are done."""

    @property
    def out(self) -> str:
        """The name of the tensor that it makes."""
        return self.makes.tensor


@dataclass(frozen=True)
class IterationSpace:
    """The loops of a graph, in the order in which statements have them, and its statements."""

    loops: tuple[TileLoop, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    element_bytes: tuple[tuple[str, int], ...]

    @cached_property
    def ordered(self) -> tuple[str, ...]:
        """The loops whose order is searched: no batch, and more than one element."""
        return tuple(a.name for a in self.loops if not a.batch and a.size > 1)

    @cached_property
    def step(self) -> Mapping[str, Step]:
        """The statements by what they make."""
        return {s.out: s for s in self.steps}

    @cached_property
    def spatial(self) -> Loops:
        """Loops that no statement combines over: they may be axes of the grid."""
        reduced = frozenset().union(*(s.reduced for s in self.steps))
        return frozenset(a.name for a in self.loops) - reduced

    @cached_property
    def common(self) -> Loops:
        """Spatial loops that every statement has: as axes of the grid they repeat nothing."""
        return self.spatial.intersection(*(s.loops for s in self.steps))

    @cached_property
    def final(self) -> frozenset[str]:
        """Tensors of which only maps are made, if anything: results, and the sums behind them."""
        inner: set[str] = set()
        for step in reversed(self.steps):
            if step.reduced or step.out in inner:
                inner |= {read.tensor for read in step.reads}
        return frozenset(self.step) - inner

    def __str__(self) -> str:
        sizes = ", ".join(f"{a.name} {a.size}{' (batch)' * a.batch}" for a in self.loops)
        rows = [f"loops: {sizes}"]
        for step in self.steps:
            summed = ", ".join(a.name for a in self.loops if a.name in step.reduced)
            rows.append(f"{step.makes} over {summed}" if summed else f"{step.makes}")
        return "\n".join(rows)


def iteration_space(graph: Graph, sizes: Sizes | None = None) -> IterationSpace:
    """Return the loops and statements of a graph.

    `graph`: contractions, element-wise maps and reductions.
    `sizes`: sizes of the dynamic dimensions.
    Raises `TilingError` if a tensor is packed, float64, changed in place or made in parts, if an
    intermediate is not read along plain axes, if an operand is read in windows, or if there are
    more than `MOST_LOOPS` loops.  Raises `GraphError` if a size is missing.
    """
    _refuse(graph)
    names, extents = loop_names(graph, sizes or {})
    loop_of = {(graph.blocks[of].out, axis): name for (of, axis), name in names.items()}
    steps: dict[str, Step] = {}
    for block in graph.blocks:
        steps[block.out] = _step(graph, block, loop_of, steps)
    ordered = tuple(steps.values())
    batch = _batch(ordered, extents)
    loops = tuple(TileLoop(name, size, name in batch) for name, size in extents.items())
    results = tuple(s.name for s in graph.slots if s.role == "out")
    element_bytes = tuple((t.name, STORED_BYTES[t.dtype]) for t in graph.tensors)
    space = IterationSpace(loops, ordered, results, element_bytes)
    _refuse_windows(space)
    if len(space.ordered) > MOST_LOOPS:
        found = ", ".join(space.ordered)
        raise TilingError(f"there are {len(space.ordered)} loops ({found}); at most {MOST_LOOPS}")
    empty = [a.name for a in loops if a.size < 1]
    if empty:
        raise TilingError(f"the loop {empty[0]} has no element; must have at least one")
    return space


def _refuse(graph: Graph) -> None:
    """Refuse tensors that a tile cannot be taken of."""
    made = [b.out for b in graph.blocks]
    for tensor in graph.tensors:
        if tensor.format is not None:
            raise TilingError(f"{tensor.name} is packed; tensors must be stored element by element")
        if tensor.dtype == "float64":
            raise TilingError(f"{tensor.name} is float64, which tiles cannot be of")
        if made.count(tensor.name) > 1:
            raise TilingError(
                f"{tensor.name} is made in {made.count(tensor.name)} parts, not in one"
            )
    for slot in graph.slots:
        if slot.role == "inout":
            raise TilingError(f"{slot.name} is changed in place; must be read or made")
    if not graph.blocks:
        raise TilingError("the graph has no statement")


def _step(
    graph: Graph, block: Block, loop_of: Mapping[tuple[str, str], str], known: Mapping[str, Step]
) -> Step:
    """Return a statement with its loops."""
    loop = {axis: name for (out, axis), name in loop_of.items() if out == block.out}
    found = [access(r.tensor, r.at, loop) for value in block.values() for r in reads(value)]
    waits: set[str] = set()
    for name in {read.tensor for read in found} & set(known):
        maker = known[name]
        waits |= maker.waits
        if maker.reduced and not is_rescaled(graph, loop_of, block, name):
            waits.add(name)
    dtypes = {graph[r.tensor].dtype for r in reads(block.value)}
    slots = instructions(block.value).items()
    operands = sorted(dtypes, key=lambda dtype: (dtype != "float32", STORED_BYTES[dtype], dtype))
    return Step(
        access(block.out, block.at, loop),
        frozenset(loop.values()),
        frozenset(loop[a.name] for a in block.reduced),
        tuple(dict.fromkeys(found)),
        frozenset(waits),
        operations(block.value) + bool(block.combine),
        operands[0] if is_contraction(block) else "",
        tuple((frozenset(loop[axis] for axis in axes), count) for axes, count in slots),
    )


def access(tensor: str, places: tuple[At, ...], loop: Mapping[str, str]) -> Access:
    """Return elements whose coordinates are in axes as elements whose coordinates are in loops."""
    return Access(
        tensor,
        tuple(replace(c, terms=tuple((loop[axis], n) for axis, n in c.terms)) for c in places),
    )


def _refuse_windows(space: IterationSpace) -> None:
    """Refuse coordinates that different places of the loops share, as those of a convolution."""
    size = {a.name: a.size for a in space.loops}
    for step in space.steps:
        for read in step.reads:
            for place in read.at:
                terms = sorted((abs(n), size[name]) for name, n in place.terms if size[name] > 1)
                inner = [stride * count for stride, count in terms]
                if any(
                    stride < reach for (stride, _), reach in zip(terms[1:], inner, strict=False)
                ):
                    raise TilingError(
                        f"{step.out} reads {read} in windows along {place}; each element must "
                        "belong to one place of the loops"
                    )


def _batch(steps: tuple[Step, ...], sizes: Mapping[str, int]) -> Loops:
    """Return the loops of which a block takes one element, as nothing sums over them.

    They are those that both operands of a contraction have; and those that every statement has,
    where each contraction has other rows to fill a tile with.
    """
    summed = frozenset().union(*(s.reduced for s in steps))
    operands = [[frozenset(read.loops) for read in s.reads] for s in steps if s.dtype]
    found = frozenset().union(*(frozenset.intersection(*each) for each in operands)) - summed
    sides = [side - summed for each in operands for side in each]
    common = frozenset.intersection(*(s.loops for s in steps)) - summed
    for loop in sorted(common - found, key=lambda name: (sizes[name], name)):
        others = [side - found - {loop} for side in sides if loop in side]
        if others and all(any(sizes[n] >= LEAST_ROWS for n in side) for side in others):
            found |= {loop}
    return found
