"""How the elements of an operator's result follow from those of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import relax, tirx

from .element_values import (
    Choice,
    Element,
    Index,
    Unknown,
    float_of,
    integer,
    is_boolean,
    number,
    truth,
)
from .pattern import PrimExpr
from .shapes import dtype_of, is_one, permutation, same_shape, shape_of

if TYPE_CHECKING:
    from .elements import Elements


def _fields(expr: relax.Expr) -> list[PrimExpr]:
    """Return the elements of a tuple of primitive values."""
    if not isinstance(expr, relax.Tuple | relax.ShapeExpr):
        raise Unknown
    return [_size(v) for v in (expr.fields if isinstance(expr, relax.Tuple) else expr.values)]


def _size(value: PrimExpr) -> PrimExpr:
    """Return a whole number as indices have them."""
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return _whole(value.value)
    if str(value.ty) != "int64":
        raise Unknown  # its arithmetic wraps around elsewhere
    return value


def _whole(value: float) -> PrimExpr:
    """Return a number that is a whole one as indices have it."""
    found = number(value)
    if isinstance(found, float):
        raise Unknown
    return found


def _arange(_: Elements, call: relax.Call, index: Index) -> Element:
    start, _end, step = (_size(a) for a in call.args)
    if not isinstance(step, tirx.IntImm) or int(step) < 1:
        raise Unknown  # TVM 0.27 makes falling ones shorter than their type says
    return start + step * index[0]


def _full(elements: Elements, call: relax.Call, index: Index) -> Element:
    value = elements.read(call.args[1], ())
    if dtype_of(call) == "bool" and not is_boolean(value) and float_of(value) not in (0, 1):
        raise Unknown  # a literal is cut to a whole number first: a half is False
    return elements.cast(value, dtype_of(call.args[1]), dtype_of(call))


def _ones(_: Elements, call: relax.Call, index: Index) -> Element:
    return truth(True) if dtype_of(call) == "bool" else integer(1)


def _zeros(_: Elements, call: relax.Call, index: Index) -> Element:
    return truth(False) if dtype_of(call) == "bool" else integer(0)


def _view(elements: Elements, call: relax.Call, index: Index) -> Element:
    """Read through a change of shape that only adds or drops axes of size 1."""
    source, result = elements.shape(call.args[0]), elements.shape(call)
    kept = [i for i, d in zip(index, result, strict=True) if not is_one(d)]
    sizes = [d for d in source if not is_one(d)]
    if not same_shape(sizes, [d for d in result if not is_one(d)]):
        raise Unknown
    rest = iter(kept)
    one = (is_one(d) for d in source)
    return elements.read(call.args[0], tuple(integer(0) if o else next(rest) for o in one))


def _permute_dims(elements: Elements, call: relax.Call, index: Index) -> Element:
    axes = permutation(call, len(index))
    return elements.read(call.args[0], tuple(index[axes.index(a)] for a in range(len(index))))


def _strided_slice(elements: Elements, call: relax.Call, index: Index) -> Element:
    shape = elements.shape(call.args[0])
    axes, begin = (_fields(a) for a in call.args[1:3])
    steps = _fields(call.args[4]) if len(call.args) > 4 else [integer(1)] * len(axes)
    moved = list(index)
    for axis, first, step in zip(axes, begin, steps, strict=True):
        at = int(axis) % len(shape)
        extent = shape[at]
        if not is_one(step):
            raise Unknown
        if isinstance(first, tirx.IntImm) and int(first) < 0:
            first = extent + first
        if not elements.analyzer.can_prove(tirx.And(first >= 0, first <= extent)):
            raise Unknown  # the slice would begin elsewhere
        moved[at] = moved[at] + first
    return elements.read(call.args[0], tuple(moved))


def _concat(elements: Elements, call: relax.Call, index: Index) -> Element:
    if not isinstance(call.args[0], relax.Tuple):
        raise Unknown
    axis = int(call.attrs.axis or 0) % len(index)
    *fields, last = call.args[0].fields
    ends, total = [], integer(0)
    for field in fields:
        ends.append((field, total, total + elements.shape(field)[axis]))
        total = ends[-1][2]

    def part(field: relax.Expr, start: PrimExpr) -> Element:
        moved = (*index[:axis], index[axis] - start, *index[axis + 1 :])
        return elements.read(field, moved)

    value = part(last, total)
    for field, start, end in reversed(ends):
        value = elements.choice(index[axis] < end, part(field, start), value)
    return value


def _index_tensor(elements: Elements, call: relax.Call, index: Index) -> Element:
    """Read the elements at whole-number tensors of indices, one for each axis."""
    if not isinstance(call.args[1], relax.Tuple):
        raise Unknown
    tensors = call.args[1].fields
    if len(tensors) != len(elements.shape(call.args[0])):
        raise Unknown
    places = tuple(elements.broadcast(t, index) for t in tensors)
    for place, size in zip(places, elements.shape(call.args[0]), strict=True):
        if isinstance(place, float | Choice) or is_boolean(place):
            raise Unknown
        inside = tirx.And(tirx.GE(place, integer(0)), tirx.LT(place, size))
        if not elements.analyzer.can_prove(inside):
            raise Unknown  # a negative index counts from the end
    return elements.read(call.args[0], places)


def _take(elements: Elements, call: relax.Call, index: Index) -> Element:
    """Read one place of an axis."""
    place = elements.uniform(call.args[1]) if not shape_of(call.args[1]) else None
    if place is None or call.attrs.axis is None or place < 0:
        raise Unknown
    axis, at = int(call.attrs.axis) % (len(index) + 1), _whole(place)
    if not elements.analyzer.can_prove(at < elements.shape(call.args[0])[axis]):
        raise Unknown  # beyond the end, where anything is read
    return elements.read(call.args[0], (*index[:axis], at, *index[axis:]))


def _cumsum(elements: Elements, call: relax.Call, index: Index) -> Element:
    """Sum a tensor that has one value everywhere."""
    value = elements.uniform(call.args[0])
    axis = call.attrs.axis
    if value is None or axis is None or bool(call.attrs.exclusive):
        raise Unknown
    if value == 0:
        return truth(False) if dtype_of(call) == "bool" else integer(0)
    terms = index[int(axis) % len(index)] + integer(1)
    return elements.binary("multiply", _whole(value), terms)


def _where(elements: Elements, call: relax.Call, index: Index) -> Element:
    condition = elements.condition(elements.broadcast(call.args[0], index))
    then, other = (elements.broadcast(a, index) for a in call.args[1:])
    return elements.choice(condition, then, other)


def _astype(elements: Elements, call: relax.Call, index: Index) -> Element:
    source = call.args[0]
    return elements.cast(elements.read(source, index), dtype_of(source), dtype_of(call))


def _triangle(elements: Elements, call: relax.Call, index: Index) -> Element:
    """Keep the elements on one side of a diagonal, and write zeros elsewhere."""
    diagonal = _size(call.args[1])
    value = elements.read(call.args[0], index)
    nothing = truth(False) if dtype_of(call) == "bool" else integer(0)
    side = "less_equal" if call.op.name == "relax.tril" else "greater_equal"
    keeps = elements.binary(side, index[-1] - index[-2], diagonal)
    return elements.choice(elements.condition(keeps), value, nothing)


def _abs(elements: Elements, call: relax.Call, index: Index) -> Element:
    value = elements.read(call.args[0], index)
    if isinstance(value, Choice) or is_boolean(value):
        raise Unknown
    constant = float_of(value)
    if constant is not None:
        return elements.simple(abs(constant))
    minus = elements.binary("subtract", integer(0), value)
    return elements.choice(tirx.GE(value, integer(0)), value, minus)


READERS: dict[str, Callable[[Elements, relax.Call, Index], Element]] = {
    "abs": _abs,
    "arange": _arange,
    "astype": _astype,
    "broadcast_to": lambda elements, call, index: elements.broadcast(call.args[0], index),
    "concat": _concat,
    "cumsum": _cumsum,
    "expand_dims": _view,
    "full": _full,
    "full_like": _full,
    "index_tensor": _index_tensor,
    "negative": lambda e, call, at: e.binary("subtract", integer(0), e.read(call.args[0], at)),
    "ones": _ones,
    "ones_like": _ones,
    "permute_dims": _permute_dims,
    "reshape": _view,
    "squeeze": _view,
    "strided_slice": _strided_slice,
    "take": _take,
    "tril": _triangle,
    "triu": _triangle,
    "where": _where,
    "zeros": _zeros,
    "zeros_like": _zeros,
}
"""Operators that are not applied element by element, by name."""
