"""Canonical movements: reshapes behind what does not mind them, and none that moves nothing.

Front ends write ``[batch, seq, n]`` as ``[batch * seq, n]`` in front of a matmul, and back behind
it, before or behind its bias, activation and residual.  Seen from one operator to the next, each of
these reshapes can move behind it, until two meet and cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from tvm import ir, relax, tirx

from ..matching.operators import named
from ..matching.pattern import is_call
from ..matching.shapes import is_one, permutation, product, same_shape, shape_of
from ..transforms.modules import module_pass
from ..tvm_ir import structural_equal
from .imports import one_place
from .rewriter import ITEM, Rewriter, Rule, canonicalise, is_empty, same_type


@module_pass
class MoveReshapes:
    """Move reshapes of rows behind matmuls, norms and element-wise operators.

    rewrite::

        h = R.reshape(x, [b * s, k])          # the last axis stays
        a = R.matmul(h, w)                    # w of two dimensions
        c = R.nn.gelu(R.add(a, bias))
        y = R.add(R.reshape(c, [b, s, n]), r)
            ->
        y = R.add(R.nn.gelu(R.add(R.matmul(x, w), bias)), r)

    The other operators: unary and binary element-wise ones, norms and sums over the last axis,
    splits of it, and `take` of rows by reshaped indices.  Of a binary operator, the other operand
    is a number, a vector along the last axis, or reshaped alike.

    A weight that is broadcast to a batch is read as it is.  Slices of everything, concatenations
    with what has no elements, broadcasts and reshapes to the same shape go.  Bounds of sizes, which
    a function has as ``tir_var_lower_bound`` and ``tir_var_upper_bound``, simplify the shapes of
    reshapes, broadcasts and slices: a sum of ``min(n, 128)`` rows and of n has no known shape.

    declines when:
        a shape is not known; something writes to a tensor in between.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, RESHAPES)


class Moved(Protocol):
    """What a movement is of, and how values of one layout are told in the other."""

    @property
    def source(self) -> relax.Expr:
        """The tensor that is moved."""

    def back(self, rewriter: Rewriter, value: relax.Expr) -> relax.Expr:
        """Return a value of the layout of `source` in that of the moved tensor."""

    def beside(self, rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
        """Return what meets the moved tensor, element by element, as it meets `source`."""

    @property
    def keeps_last(self) -> bool:
        """Whether the last axis stays the last."""


Reader: TypeAlias = Callable[[Rewriter, relax.Expr], Moved | None]
"""Returns the movement that defines a tensor, None if there is none to see."""


def rules_behind(read: Reader) -> dict[str, Rule]:
    """Return the rules that put a movement behind operators of elements, rows, and parts."""
    return {
        **dict.fromkeys(named("function", "cast"), partial(_unary, read)),
        **dict.fromkeys(named("arithmetic"), partial(_binary, read)),
        **dict.fromkeys(named("reduction"), partial(_of_rows, read)),
        **dict.fromkeys(("relax.nn.rms_norm", "relax.nn.layer_norm"), partial(_of_rows, read)),
    }


def _unary(read: Reader, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    found = read(rewriter, call.args[0])
    if found is None:
        return None
    return found.back(rewriter, relax.Call(call.op, [found.source], call.attrs))


def _binary(read: Reader, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    for index, arg in enumerate(call.args):
        found = read(rewriter, arg)
        if found is None or not same_shape(shape_of(arg), shape_of(call)):  # it is broadcast
            continue
        other = found.beside(rewriter, call.args[1 - index])
        if other is not None:
            args = [found.source, other] if index == 0 else [other, found.source]
            return found.back(rewriter, relax.Call(call.op, args, call.attrs))
    return None


def _of_rows(read: Reader, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Compute a norm, or a sum that is kept as an axis of size 1, of the last axis in front."""
    found, rank = read(rewriter, call.args[0]), len(shape_of(call.args[0]) or ())
    is_norm = is_call(call, "relax.nn.rms_norm", "relax.nn.layer_norm")
    axes = call.attrs.axes if is_norm else call.attrs.axis
    if found is None or not found.keeps_last or axes is None:
        return None
    if [int(a) % rank for a in axes] != [rank - 1] or not (is_norm or call.attrs.keepdims):
        return None
    name, operands = call.op.name.removeprefix("relax."), [found.source, *call.args[1:]]
    if not is_norm:
        made = getattr(relax.op, name)(*operands, axis=[-1], keepdims=True)
    elif len(shape_of(found.source) or ()) < 2:  # TVM has no kernel that normalises one row
        return None
    elif name == "nn.rms_norm":
        made = relax.op.nn.rms_norm(*operands, axes=[-1], epsilon=call.attrs.epsilon)
    else:
        more = {"center": bool(call.attrs.center), "scale": bool(call.attrs.scale)}
        made = relax.op.nn.layer_norm(*operands, axes=[-1], epsilon=call.attrs.epsilon, **more)
    return found.back(rewriter, made)


@dataclass(frozen=True)
class _Regrouped:
    """A reshape that keeps the last axis, and no row apart."""

    source: relax.Expr
    rows: list[tirx.Expr]
    keeps_last = True

    def back(self, rewriter: Rewriter, value: relax.Expr) -> relax.Expr:
        """Return a value with these rows and its own last axis."""
        made = rewriter.emit(value)
        return relax.op.reshape(made, [*self.rows, *(shape_of(made) or [])[-1:]])

    def beside(self, rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
        """Return a tensor that is the same for all rows, or what was regrouped alike."""
        shape, lead = shape_of(expr), (shape_of(self.source) or [])[:-1]
        if shape is not None and len(shape) <= len(lead) + 1 and all(map(is_one, shape[:-1])):
            return expr
        other = _regrouped(rewriter, expr)
        if other is None or not same_shape(other.rows, self.rows):
            return None
        return other.source if same_shape((shape_of(other.source) or [])[:-1], lead) else None


def _regrouped(rewriter: Rewriter, expr: relax.Expr) -> _Regrouped | None:
    call = rewriter.call(expr, "relax.reshape")
    if call is None:
        return None
    before, after = shape_of(call.args[0]), shape_of(expr)
    if not before or not after or not same_shape(before[-1:], after[-1:]):
        return None
    return _Regrouped(call.args[0], after[:-1])


def _reshape(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Make one reshape of two, and none of one to the same shape."""
    source, shape = call.args[0], _simplified(rewriter, call)
    if shape is not None:
        return relax.op.reshape(source, shape)
    if same_type(source, call):
        return source
    first, shape = rewriter.call(source, "relax.reshape"), shape_of(call)
    return relax.op.reshape(first.args[0], shape) if first is not None and shape else None


def _simplified(rewriter: Rewriter, call: relax.Call) -> list[tirx.Expr] | None:
    """Return the shape of a result in fewer words, by the bounds of its sizes; None if in none."""
    shape = shape_of(call)
    if shape is None:
        return None
    simple = [rewriter.sizes.simplify(size) for size in shape]
    return None if all(map(structural_equal, simple, shape)) else simple


def _matmul(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    x, weight = call.args
    plain = _without_batch(rewriter, weight)
    if plain is not None:
        made = rewriter.builder.normalize(relax.op.matmul(x, plain, call.attrs.out_dtype))
        if same_type(made, call):
            return made
    if len(shape_of(weight) or ()) != 2:
        return None
    found = _regrouped(rewriter, x) or _merged(rewriter, x)
    if found is None or len(shape_of(found.source) or ()) < 2:
        return None
    return found.back(rewriter, relax.op.matmul(found.source, weight, call.attrs.out_dtype))


def _merged(rewriter: Rewriter, expr: relax.Expr) -> _Regrouped | None:
    """Read a reshape that makes one axis of heads and lanes, and regroups the rows, as two."""
    call, after = rewriter.call(expr, "relax.reshape"), shape_of(expr)
    before = shape_of(call.args[0]) if call is not None else None
    if call is None or not before or not after:
        return None
    ends = (n for n in range(2, len(before)) if same_shape([product(before[n:])], after[-1:]))
    count = next(ends, None)
    if count is None or same_shape(before[:count], after[:-1]):
        return None
    flat = relax.op.reshape(call.args[0], [*before[:count], after[-1]])
    return _Regrouped(rewriter.emit(flat), after[:-1])


def _without_batch(rewriter: Rewriter, weight: relax.Expr) -> relax.Expr | None:
    """Return a matrix that was expanded to a batch of itself."""
    shape = shape_of(weight)
    if shape is None or len(shape) < 3:
        return None
    transposed = rewriter.call(weight, "relax.permute_dims")
    if transposed is not None:
        *lead, k, n = range(len(shape))
        if permutation(transposed, len(shape)) != [*lead, n, k]:
            return None
        inner = _without_batch(rewriter, transposed.args[0])
        return rewriter.emit(relax.op.permute_dims(inner)) if inner is not None else None
    call = rewriter.call(weight, "relax.broadcast_to", "relax.expand_dims", "relax.reshape")
    if call is None:
        return None
    before = shape_of(call.args[0])
    if before is None or not same_shape(before[-2:], shape[-2:]):
        return None
    if not all(map(is_one, before[:-2])):
        return None
    return call.args[0] if len(before) == 2 else _without_batch(rewriter, call.args[0])


def _take(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Take rows of a table by indices in their own shape; one place as a slice."""
    part = one_place(rewriter, call)
    if part is not None:
        return part
    table, indices = call.args[:2]
    reshape = rewriter.call(indices, "relax.reshape")
    lead, row = shape_of(indices), shape_of(table)
    if reshape is None or lead is None or row is None or len(row) != 2:
        return None
    if call.attrs.axis is None or int(call.attrs.axis) != 0 or not shape_of(reshape.args[0]):
        return None
    made = rewriter.emit(relax.Call(call.op, [table, reshape.args[0]], call.attrs))
    return relax.op.reshape(made, [*lead, row[1]])


def _item(rewriter: Rewriter, item: relax.TupleGetItem) -> relax.Expr | None:
    """Take a part of a split of the last axis."""
    split = rewriter.call(item.tuple_value, "relax.split")
    if split is None:
        return None
    found, rank = _regrouped(rewriter, split.args[0]), len(shape_of(split.args[0]) or ())
    if found is None or int(split.attrs.axis) % rank != rank - 1:
        return None
    sections, last = split.attrs.indices_or_sections, len(shape_of(found.source) or ()) - 1
    parts = rewriter.emit(relax.op.split(found.source, sections, last))
    return found.back(rewriter, relax.TupleGetItem(parts, item.index))


def _slice(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Drop a slice that is the whole; say of one within its bounds that it is."""
    x, axes, begin, end, *strides = call.args
    if any(not is_one(s) for given in strides for s in given.fields):
        return None
    if same_type(x, call):
        return x
    shape, rank = shape_of(x), len(shape_of(x) or ())
    if call.attrs.assume_inbound or shape is None:
        return None
    places = [int(axis) % rank for axis in axes.fields]
    ends = [
        _from_the_front(rewriter, shape[axis], *pair)
        for axis, *pair in zip(places, begin.fields, end.fields, strict=True)
    ]
    if any(pair is None for pair in ends):
        return None
    begin, end = zip(*ends, strict=True)
    made = relax.op.strided_slice(x, places, begin, end, *strides, assume_inbound=True)
    made = rewriter.builder.normalize(made)
    return None if structural_equal(made.ty, call.ty) else made


def _from_the_front(
    rewriter: Rewriter, size: tirx.Expr, begin: tirx.Expr, end: tirx.Expr
) -> tuple[tirx.Expr, tirx.Expr] | None:
    """Return where a slice begins and ends, None if that may be outside of the axis."""
    first, last = (
        size + v if isinstance(v, tirx.IntImm) and int(v) < 0 else v for v in (begin, end)
    )
    last = size if rewriter.sizes.can_prove(last >= size) else last
    inside = (first >= 0, first <= last, last <= size)
    return (first, last) if all(map(rewriter.sizes.can_prove, inside)) else None


def _broadcast(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Drop a broadcast to the shape that a tensor has."""
    shape = _simplified(rewriter, call)
    if shape is not None:
        return relax.op.broadcast_to(call.args[0], shape)
    return call.args[0] if same_type(call.args[0], call) else None


def _concat(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Leave out what has no elements."""
    if not isinstance(call.args[0], relax.Tuple):
        return None
    fields = list(call.args[0].fields)
    kept = [f for f in fields if not is_empty(f)]
    if len(kept) == 1 and same_type(kept[0], call):
        return kept[0]
    if not kept or len(kept) == len(fields):
        return None
    return relax.op.concat(kept, call.attrs.axis)


RESHAPES: dict[str, Rule] = {
    **rules_behind(_regrouped),
    "relax.reshape": _reshape,
    "relax.broadcast_to": _broadcast,
    "relax.strided_slice": _slice,
    "relax.matmul": _matmul,
    "relax.take": _take,
    "relax.concat": _concat,
    ITEM: _item,
}
