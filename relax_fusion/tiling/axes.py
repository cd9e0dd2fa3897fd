"""Which axes of the statements of a block graph are one loop, and which may see a sum unfinished.

Two axes are one loop where a statement reads along one of them what another made along the other,
and where two statements call axes of the same size the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import TilingError
from ..workload.graph import Block, Graph
from ..workload.roofline import Sizes, size_at
from ..workload.values import At, Expr, Op, Read, reads

Key = tuple[int, str]
"""A statement's number and the name of its axis."""


def loop_names(graph: Graph, sizes: Sizes) -> tuple[dict[Key, str], dict[str, int]]:
    """Return the loop of each axis of each statement, and the size of each loop.

    Raises `TilingError` if a statement reads an intermediate otherwise than along plain axes, or
    along two axes that would have to be one loop.
    """
    extents = {
        (number, axis.name): size_at(axis.size, sizes)
        for number, block in enumerate(graph.blocks)
        for axis in (*block.axes, *block.reduced)
    }
    root = {key: key for key in extents}
    for one, other in _same_axes(graph):
        if extents[one] != extents[other]:
            tensor = graph.blocks[one[0]].out
            reader = graph.blocks[other[0]].out
            raise TilingError(
                f"{reader} reads {extents[other]} of the {extents[one]} elements of {tensor} along "
                f"{other[1]!r}; must read all"
            )
        _join(root, one, other)
    _refuse_diagonals(graph, root)
    _join_by_name(root, extents)
    names = _named(root)
    loops = {key: names[found] for key, found in root.items()}
    return loops, {names[found]: extents[found] for found in dict.fromkeys(root.values())}


def _same_axes(graph: Graph) -> Iterator[tuple[Key, Key]]:
    """Yield pairs of axes: one of the statement that makes a tensor, one of a reader of it."""
    makers: dict[str, tuple[int, Block]] = {}
    for number, block in enumerate(graph.blocks):
        for read in (r for value in block.values() for r in reads(value)):
            if read.tensor not in makers:
                continue
            source, maker = makers[read.tensor]
            for made, seen in zip(maker.at, read.at, strict=True):
                if made == seen and not made.terms:
                    continue
                along = plain_axis(made, maker.out), plain_axis(seen, f"{block.out}: {read}")
                yield (source, along[0]), (number, along[1])
        makers[block.out] = number, block


def plain_axis(place: At, where: str) -> str:
    """Return the axis that a coordinate of an intermediate is."""
    if [stride for _, stride in place.terms] != [1] or place != At(place.terms):
        raise TilingError(f"{where} has the coordinate {place}; intermediates must have plain axes")
    return place.terms[0][0]


def _join(root: dict[Key, Key], one: Key, other: Key) -> None:
    """Make two axes one loop, which is known by the earlier."""
    first, second = sorted((root[one], root[other]))
    for key, found in root.items():
        if found == second:
            root[key] = first


def _refuse_diagonals(graph: Graph, root: Mapping[Key, Key]) -> None:
    """Refuse a statement of which two axes are one loop."""
    seen: dict[tuple[int, Key], str] = {}
    for (number, axis), found in root.items():
        other = seen.setdefault((number, found), axis)
        if other != axis:
            raise TilingError(
                f"{graph.blocks[number].out}: the axes {other!r} and {axis!r} run over the same "
                "axis of an intermediate; a loop must be one axis of a statement"
            )


def _join_by_name(root: dict[Key, Key], extents: Mapping[Key, int]) -> None:
    """Join loops that have an axis of the same name and size, where no statement has both."""
    keys = list(root)
    for later, key in enumerate(keys):
        for other in keys[:later]:
            if other[1] != key[1] or extents[other] != extents[key] or root[other] == root[key]:
                continue
            if not _statements(root, other) & _statements(root, key):
                _join(root, other, key)


def _statements(root: Mapping[Key, Key], key: Key) -> set[int]:
    """Return the statements that have the loop of an axis."""
    return {number for (number, _), found in root.items() if found == root[key]}


def _named(root: Mapping[Key, Key]) -> dict[Key, str]:
    """Return a name for each loop: that of its first axis, with a number where it is taken."""
    names: dict[Key, str] = {}
    taken: set[str] = set()
    for found in dict.fromkeys(root.values()):
        name, count = found[1], 1
        while name in taken:
            count += 1
            name = f"{found[1]}_{count}"
        taken.add(name)
        names[found] = name
    return names


def is_rescaled(
    graph: Graph, loops: Mapping[tuple[str, str], str], block: Block, maximum: str
) -> bool:
    """Tell whether a statement may see a maximum before it is complete.

    ``exp(value - maximum)`` may, where only sums over the loops of the maximum read it: what they
    have added so far is multiplied by the exponential of the change, as in online softmax.  No sum
    may start with an element of its own, or leave elements out by the exponential.

    `loops` are by what a statement makes and the name of its axis.
    """
    source = next(b for b in graph.blocks if b.out == maximum)
    if source.combine != "max" or block.combine or not _subtracts(block.value, maximum):
        return False
    over = {loops[source.out, a.name] for a in source.reduced}
    readers = [b for b in graph.blocks if block.out in _reads(b)]
    kept = {s.name for s in graph.slots if s.role == "out"}
    return block.out not in kept and all(
        b.combine == "sum"
        and {loops[b.out, a.name] for a in b.reduced} == over
        and _is_linear(b.value, block.out)
        and b.start is None
        and (b.where is None or block.out not in _tensors(b.where))
        for b in readers
    )


def _subtracts(value: Expr, maximum: str) -> bool:
    """Tell whether a value is the exponential of a difference to a maximum."""
    if not isinstance(value, Op) or value.name != "exp":
        return False
    inner = value.args[0]
    if not isinstance(inner, Op) or inner.name != "subtract":
        return False
    least, most = inner.args
    if isinstance(most, Op) and most.name == "finite":
        most = most.args[0]
    return isinstance(most, Read) and most.tensor == maximum and maximum not in _tensors(least)


def _is_linear(value: Expr, tensor: str) -> bool:
    """Tell whether a value is an element of a tensor, or its product with others."""
    if isinstance(value, Read):
        return value.tensor == tensor
    if not isinstance(value, Op) or value.name != "multiply":
        return False
    first, second = value.args
    return (_is_linear(first, tensor) and tensor not in _tensors(second)) or (
        _is_linear(second, tensor) and tensor not in _tensors(first)
    )


def _tensors(value: Expr) -> set[str]:
    return {r.tensor for r in reads(value)}


def _reads(block: Block) -> set[str]:
    return {r.tensor for value in block.values() for r in reads(value)}
