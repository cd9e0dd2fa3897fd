"""What follows a matmul by experts, as formulas of its elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from tvm import relax, tirx

from ..compute.activations import ACCUMULATE, activate
from ..matching.pattern import BlockView, is_call
from ..matching.shapes import dtype_of, is_one, product, same_shape, shape_of
from ..tvm_ir import GenericConst


def sizes(expr: relax.Expr) -> list[Any]:
    """Return the sizes of a tensor of known rank."""
    return list(shape_of(expr) or ())


class Column(NamedTuple):
    """The last coordinate of an element: ``stride * axis + start`` of a column of the result."""

    axis: tirx.Expr
    stride: int = 1
    start: int = 0

    @property
    def value(self) -> tirx.Expr:
        """The coordinate."""
        return self.axis * self.stride + self.start


Place: TypeAlias = tuple[Any, ...]
Element: TypeAlias = Callable[[relax.Expr, Place], tirx.Expr]
"""Returns an element of a tensor that is not computed here."""

ARITHMETIC: dict[str, Callable[..., tirx.Expr]] = {
    "relax.add": lambda x, y: x + y,
    "relax.subtract": lambda x, y: x - y,
    "relax.multiply": lambda x, y: x * y,
    "relax.divide": lambda x, y: x / y,
    "relax.maximum": tirx.max,
    "relax.minimum": tirx.min,
}
FUNCTIONS = {
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.relu": "relu",
}
MOVES = ("relax.expand_dims", "relax.squeeze", "relax.reshape", "relax.broadcast_to")
_PARTS = ("relax.split", "relax.strided_slice")
TAKEN = (*ARITHMETIC, *FUNCTIONS, *MOVES, *_PARTS, "relax.clip", "relax.astype")
"""The operators that an expert's matmul takes along."""


class Formula:
    """The elements of what is computed of a tensor.

    Parameters
    ----------
    view : BlockView
        The block.
    inside : collection of relax.Var
        What is computed here.
    leaf : callable
        Returns an element of anything else.
    """

    def __init__(self, view: BlockView, inside: Sequence[relax.Var], leaf: Element):
        self.view, self.inside, self.leaf = view, {hash(v) for v in inside}, leaf

    def at(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        """Return an element."""
        if isinstance(expr, GenericConst) and not expr.ty.shape:
            return tirx.const(expr.value.numpy().item(), dtype_of(expr))
        if hash(expr) not in self.inside:
            return self.leaf(expr, place)
        value = self.view.defs[expr]
        if isinstance(value, relax.TupleGetItem):
            return self._item(value, place)
        name, args = value.op.name, value.args
        if name in ARITHMETIC:
            return ARITHMETIC[name](*(self._broadcast(a, place) for a in args))
        if name in MOVES:
            moved = moved_place(value, place)
            assert moved is not None, "refused by `follows`"
            return self.at(args[0], moved)
        if name == "relax.where":
            chosen, this, other = (self._broadcast(a, place) for a in args)
            return tirx.Select(chosen, this, other)
        if name == "relax.full_like":
            return self.at(args[1], ())
        if name == "relax.strided_slice":
            begin, stride = _slice(value)
            return self.at(args[0], _column(place, stride, begin))
        return _function(value, self.at(args[0], place))

    def _broadcast(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        shape = sizes(expr)
        zero = tirx.IntImm("int64", 0)
        behind = place[len(place) - len(shape) :]
        at = tuple(zero if is_one(d) else p for d, p in zip(shape, behind, strict=True))
        return self.at(expr, at)

    def _item(self, item: relax.TupleGetItem, place: Place) -> tirx.Expr:
        split = self.view.defs[item.tuple_value]
        return self.at(split.args[0], _column(place, 1, split_starts(split)[item.index]))


def _function(call: relax.Call, x: tirx.Expr) -> tirx.Expr:
    """Return a function of one element, in float32 if it is an activation."""
    name, dtype = call.op.name, dtype_of(call)
    if name in ("relax.bitwise_not", "relax.logical_not"):
        return tirx.Not(x)
    if name == "relax.astype":
        return x != tirx.const(0, str(x.ty.dtype)) if dtype == "bool" else x.astype(dtype)
    if name == "relax.clip":
        low, high = (tirx.const(float(bound.value), dtype) for bound in call.args[1:])
        return tirx.Select(x < low, low, tirx.Select(x > high, high, x))
    return activate(FUNCTIONS[name], x.astype(ACCUMULATE)).astype(dtype)


def _column(place: Place, stride: int, start: int) -> Place:
    *front, last = place
    assert isinstance(last, Column), "refused by `follows`"
    return (*front, Column(last.axis, last.stride * stride, last.start * stride + start))


def _slice(call: relax.Call) -> tuple[int, int]:
    """Return where a slice of one axis begins, and its stride; -1 where they are not known."""
    found = [each for numbers in (call.args[2], *call.args[4:5]) for each in numbers]
    if not all(isinstance(each, tirx.IntImm) for each in found):
        return -1, -1
    begin, stride = (*map(int, found), 1)[:2]
    return begin, stride


def split_starts(call: relax.Call) -> list[int]:
    """Return where the parts of a split begin."""
    given = call.attrs.indices_or_sections
    if isinstance(given, tirx.IntImm | int):
        width = int(sizes(call.args[0])[-1]) // int(given)
        return [width * part for part in range(int(given))]
    return [0, *(int(n) for n in given)]


def moved_place(call: relax.Call, place: Place) -> Place | None:
    """Return the place in front of a movement of an element behind it; None for any other."""
    before, after = sizes(call.args[0]), sizes(call)
    zero = tirx.IntImm("int64", 0)
    if call.op.name == "relax.broadcast_to":
        behind = place[len(place) - len(before) :]
        return tuple(zero if is_one(d) else p for d, p in zip(before, behind, strict=True))
    left = [(d, p) for d, p in zip(after, place, strict=True) if not is_one(d)]
    inner = [n for n, d in enumerate(before) if not is_one(d)]
    found: dict[int, tirx.Expr | Column] = {}
    while left and inner:
        some, inside = [left.pop()], [inner.pop()]
        while not same_shape(
            [product([d for d, _ in some])], [product([before[n] for n in inside])]
        ):
            short = _is_short([d for d, _ in some], [before[n] for n in inside])
            if not (left if short else inner):
                return None
            _extend(some, left) if short else _extend(inside, inner)
        if len(some) == len(inside) == 1:
            found[inside[0]] = some[0][1]
        elif any(isinstance(p, Column) for _, p in some):
            return None
        else:
            found |= _unravelled(some, [(n, before[n]) for n in inside])
    return None if left or inner else tuple(found.get(n, zero) for n in range(len(before)))


def _extend(some: list[Any], more: list[Any]) -> None:
    some.insert(0, more.pop())


def _is_short(first: list[Any], second: list[Any]) -> bool:
    """Tell whether the first sizes are to be made more: those of fewer elements, or known ones."""
    counts = [product(sizes) for sizes in (first, second)]
    known = [isinstance(count, int | tirx.IntImm) for count in counts]
    return int(counts[0]) < int(counts[1]) if all(known) else known[0]


def _unravelled(
    behind: list[tuple[Any, Any]], inside: list[tuple[int, Any]]
) -> dict[int, tirx.Expr]:
    """Return the coordinates within some sizes of an element of others."""
    flat = behind[0][1]
    for size, place in behind[1:]:
        flat = flat * size + place
    found = {}
    for n, size in reversed(inside[1:]):
        found[n], flat = flat % size, flat // size
    return {**found, inside[0][0]: flat}


def source(view: BlockView, expr: relax.Expr, place: Place) -> tuple[relax.Expr, Place]:
    """Return what movements made an element of, and which element of it."""
    while (call := view.call(expr, *MOVES)) is not None:
        moved = moved_place(call, place)
        if moved is None:
            break
        expr, place = call.args[0], moved
    return expr, place


def follows(view: BlockView, var: relax.Var, inside: set[int]) -> bool:
    """Tell whether `var` is one of the steps that a matmul by experts takes along."""
    value = view.defs[var]
    if isinstance(value, relax.TupleGetItem):
        return hash(value.tuple_value) in inside
    if not is_call(value, *TAKEN) or shape_of(value.args[0]) is None:
        return False
    if not dtype_of(value.args[0]).startswith(("float", "bfloat")):
        return False
    rank = len(shape_of(value.args[0]) or ())
    if is_call(value, "relax.split"):
        return bool(rank) and int(value.attrs.axis) % rank == rank - 1
    if is_call(value, "relax.strided_slice"):
        if len(value.args[1]) != 1 or int(value.args[1][0]) % rank != rank - 1:
            return False
        begin, stride = _slice(value)
        return begin >= 0 and stride > 0
    shape = shape_of(value)
    if not shape or is_one(shape[-1]):
        return False
    if is_call(value, *MOVES):
        rows = tuple(tirx.Var("i", "int64") for _ in shape[:-1])
        return moved_place(value, (*rows, Column(tirx.Var("j", "int64")))) is not None
    return all(
        shape_of(arg) is not None for arg in value.args if isinstance(arg.ty, relax.TensorType)
    )
