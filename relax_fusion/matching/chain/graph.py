"""Tensors as formulas of an element, and one block graph of the statements of a region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tvm import relax

from ...errors import Reason
from ...workload import Dim, DynamicDim
from ...workload.chain import BATCH, ROWS
from ...workload.graph import Block, Combine, Graph, Slot, Tensor
from ...workload.values import At, Axis, AxisValue, Expr, Op, Read, Size, reads
from ..pattern import PrimExpr, guard
from ..shapes import as_dims, product

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dimension, the outermost first; none of a dimension of size 1."""


def flat(dims: Dims) -> tuple[str, ...]:
    """Return the axes of all dimensions, in order."""
    return tuple(name for dim in dims for name in dim)


@dataclass(frozen=True)
class Formula:
    """A tensor, as an element at the axes of its dimensions."""

    dims: Dims
    element: Expr
    dtype: str

    @property
    def axes(self) -> tuple[str, ...]:
        """All its axes, in order."""
        return flat(self.dims)

    def renamed(self, names: Mapping[str, str]) -> Formula:
        """Return the same tensor with other names of its axes."""
        dims = tuple(tuple(names.get(n, n) for n in dim) for dim in self.dims)
        places = {old: At(((new, 1),)) for old, new in names.items()}
        return replace(self, dims=dims, element=moved(self.element, places))

    def is_stored(self) -> bool:
        """Tell whether each element is one of a tensor that is there, along plain axes."""
        if not isinstance(self.element, Read):
            return False
        plain = [c.terms[0][0] for c in self.element.at if c == At(c.terms) and len(c.terms) == 1]
        return len(plain) == len(self.element.at) and set(plain) == set(self.axes)


def moved(value: Expr, places: Mapping[str, At]) -> Expr:
    """Return a value with coordinates in the place of axes, which are replaced all at once."""
    if isinstance(value, Op):
        return replace(value, args=tuple(moved(a, places) for a in value.args))
    if isinstance(value, Read):
        return replace(value, at=tuple(_moved_at(c, places) for c in value.at))
    if isinstance(value, AxisValue) and value.axis in places:
        return AxisValue(places[value.axis].terms[0][0])
    return value


def _moved_at(place: At, places: Mapping[str, At]) -> At:
    terms: list[tuple[str, int]] = []
    start = place.start
    for name, stride in place.terms:
        new = places.get(name, At(((name, 1),)))
        terms += [(n, s * stride) for n, s in new.terms]
        start += new.start * stride
    return replace(place, terms=tuple(terms), start=start)


_LETTERS = "mnkhpqrstuvw"
"""Names of axes, those of the result first."""


@dataclass(frozen=True)
class Operand:
    """A tensor that is read: what it is, its axes, its dtype."""

    expr: relax.Expr
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Statement:
    """``out[axes] = combine over reduced of value``, where axes are names.

    `rounds` says whether every kernel rounds it to its dtype.
    """

    out: str
    axes: tuple[str, ...]
    reduced: tuple[str, ...]
    combine: Combine
    value: Expr
    dtype: str
    rounds: bool = False


@dataclass(frozen=True)
class Sized:
    """A block graph, and the shapes of its operands in the caller's sizes."""

    graph: Graph
    shapes: Mapping[str, tuple[PrimExpr | int, ...]]


def as_graph(
    operands: Mapping[str, Operand],
    statements: Sequence[Statement],
    sizes: Mapping[str, PrimExpr | int],
    bounds: Mapping[str, int],
) -> Sized:
    """Return the graph of some statements, of which the last makes the result.

    Axes that lie side by side wherever there is one of them are one axis: rows of several sequences
    are rows.

    `operands`: what they read, by name.
    `sizes`: of the axes.
    `bounds`: largest values of symbolic variables.
    Raises `Refused` if the result is a single number, over which nothing is in parallel.
    """
    guard(bool(statements[-1].axes), Reason.SHAPE, "the result is one number; it must have axes")
    follows = _side_by_side(operands, statements)
    inner = set(follows.values())

    def along(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(n for n in axes if n not in inner)

    given = {name: along(o.axes) for name, o in operands.items()}
    made = {s.out: along(s.axes) for s in statements}
    every = [*made[statements[-1].out]]
    every += [n for s in statements for n in (*made[s.out], *s.reduced)]
    every = list(dict.fromkeys([*every, *(n for axes in given.values() for n in axes)]))
    size = {name: product([sizes[n] for n in _group(name, follows)]) for name in every}
    axis = _axes(size, bounds, _matrices(statements))
    blocks = [
        Block(
            s.out,
            tuple(At(((axis[n].name, 1),)) for n in made[s.out]),
            tuple(axis[n] for n in made[s.out]),
            _in_axes(s.value, inner, axis),
            tuple(axis[n] for n in s.reduced),
            s.combine,
        )
        for s in statements
    ]
    dtypes = {name: o.dtype for name, o in operands.items()} | {s.out: s.dtype for s in statements}
    shapes, rounds = given | made, {s.out for s in statements if s.rounds}
    tensors = tuple(
        Tensor(name, tuple(axis[n].size for n in axes), dtypes[name], rounds=name in rounds)
        for name, axes in shapes.items()
    )
    slots = [Slot(name, "in") for name in operands] + [Slot(statements[-1].out, "out")]
    graph = Graph(tensors, tuple(blocks), tuple(slots))
    return Sized(graph, {name: tuple(size[n] for n in axes) for name, axes in shapes.items()})


def _side_by_side(
    operands: Mapping[str, Operand], statements: Sequence[Statement]
) -> dict[str, str]:
    """Return axes with those that follow them wherever there is one of both."""
    places = {name: [o.axes] for name, o in operands.items()}
    for s in statements:
        for read in reads(s.value):
            places[read.tensor].append(tuple(_plain(c) for c in read.at))
        places[s.out] = [s.axes]
    scopes = [place for of in places.values() for place in of]
    scopes += [(*s.axes, *s.reduced) for s in statements]
    kept = {"", *(n for s in statements for n in s.reduced), *_mixed(statements)}
    pairs = {pair for scope in scopes for pair in pairwise(scope) if kept.isdisjoint(pair)}
    pairs = {p for p in pairs if all(p in pairwise(s) or not {*p} & {*s} for s in scopes)}
    while True:  # what is one axis of a tensor is one wherever the tensor is read
        apart = {
            pair
            for of in places.values()
            for same in zip(*map(pairwise, of), strict=True)
            if not pairs.issuperset(same)
            for pair in same
        }
        if pairs.isdisjoint(apart):
            return dict(pairs)
        pairs -= apart


def _mixed(statements: Sequence[Statement]) -> set[str]:
    """Return the axes of coordinates that are none by themselves, as of rows of several axes."""
    places = [c for s in statements for r in reads(s.value) for c in r.at if not _plain(c)]
    return {n for c in places for n, _ in c.terms}


def _plain(place: At) -> str:
    """Return the axis that a coordinate is; empty where it is another."""
    return place.terms[0][0] if len(place.terms) == 1 and place == At(place.terms) else ""


def _group(name: str, follows: Mapping[str, str]) -> list[str]:
    """Return an axis, and those that are one with it."""
    found = [name]
    while found[-1] in follows:
        found.append(follows[found[-1]])
    return found


def _matrices(statements: Sequence[Statement]) -> set[str]:
    """Return the axes that both operands of a product and its result have."""
    found: set[str] = set()
    for s in statements:
        both = [{n for c in r.at for n, _ in c.terms} for r in reads(s.value)]
        if s.combine == "sum" and len(both) == 2:
            found |= set.intersection(*both) & set(s.axes)
    return found


def _axes(
    sizes: Mapping[str, PrimExpr | int], bounds: Mapping[str, int], matrices: set[str]
) -> dict[str, Axis]:
    """Return axes of these sizes, the dynamic ones under the names that a chain has for them."""
    found = dict(zip(sizes, as_dims(list(sizes.values()), bounds), strict=True))
    known: dict[Dim, DynamicDim] = {}
    for name, dim in found.items():
        if isinstance(dim, DynamicDim) and dim not in known:
            kind = BATCH if name in matrices else ROWS
            used = sum(d.name.startswith(kind) for d in known.values())
            known[dim] = DynamicDim(f"{kind}{used or ''}", dim.upper)
    names = [_LETTERS[n] if n < len(_LETTERS) else f"a{n}" for n in range(len(found))]
    dims = (known.get(dim, dim) for dim in found.values())
    return {old: Axis(*new) for old, new in zip(found, zip(names, dims, strict=True), strict=True)}


def _in_axes(value: Expr, inner: set[str], axis: Mapping[str, Axis]) -> Expr:
    """Return a value in these axes, without those that are one with others."""
    if isinstance(value, Op):
        return replace(value, args=tuple(_in_axes(a, inner, axis) for a in value.args))
    if isinstance(value, Read):
        places = (c for c in value.at if _plain(c) not in inner)
        terms = ((c, tuple((axis[n].name, stride) for n, stride in c.terms)) for c in places)
        return replace(value, at=tuple(replace(c, terms=named) for c, named in terms))
    if isinstance(value, AxisValue):
        return AxisValue(axis[value.axis].name)
    if isinstance(value, Size) and isinstance(value.dim, DynamicDim):
        return Size(axis[value.dim.name].size)
    return value
