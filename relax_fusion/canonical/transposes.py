"""Canonical movements: transposes behind element-wise operators, towards who reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, relax, tirx

from ..matching.shapes import is_one, permutation, same_shape, shape_of
from ..transforms.modules import module_pass
from .movements import rules_behind
from .rewriter import ITEM, Rewriter, Rule, canonicalise, same_type


@module_pass
class MoveTransposes:
    """Move transposes behind element-wise operators, norms, slices and concatenations.

    rewrite::

        t = R.permute_dims(q, [0, 2, 1, 3])                       # [b, s, n, d] -> [b, n, s, d]
        y = R.add(R.multiply(t, cos), R.multiply(half_turned(t), sin))
            ->
        y = R.permute_dims(R.add(R.multiply(q, cos2), R.multiply(half_turned(q), sin2)), ...)

    So heads are normalised and rotated where their projection put them, and attention reads them
    there.  What is broadcast to a transposed tensor is reshaped where that moves no element of it,
    and else transposed itself.

    declines when:
        the operands of an operator are transposed in different ways; a norm or a sum is over
        another axis than the last, or that is moved; a shape is not known.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, TRANSPOSES)


@dataclass(frozen=True)
class Transposed:
    """What a transpose is of, and which of its axes each axis of the result is."""

    source: relax.Expr
    axes: list[int]

    @property
    def keeps_last(self) -> bool:
        """Whether the last axis stays the last."""
        return self.axes[-1] == len(self.axes) - 1

    def back(self, rewriter: Rewriter, value: relax.Expr) -> relax.Expr:
        """Return a value of the layout of `source` in that of the transpose."""
        return relax.op.permute_dims(rewriter.emit(value), self.axes)

    def beside(self, rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
        """Return what is transposed alike, or broadcast to the transpose, as it was before."""
        other = transposed(rewriter, expr)
        if other is not None and other.axes == self.axes:
            return other.source
        return _laid_back(rewriter, expr, self)


def transposed(rewriter: Rewriter, expr: relax.Expr) -> Transposed | None:
    """Return the transpose that defines `expr`, None if there is none to see."""
    call = rewriter.call(expr, "relax.permute_dims")
    shape = shape_of(expr)
    if call is None or shape is None:
        return None
    return Transposed(call.args[0], permutation(call, len(shape)))


def _permute(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Make one transpose of two, and none of one that moves nothing."""
    rank = len(shape_of(call) or ())
    axes, first = permutation(call, rank), transposed(rewriter, call.args[0])
    if rank and axes == list(range(rank)):
        return call.args[0]
    if first is None:
        return None
    return relax.op.permute_dims(first.source, [first.axes[a] for a in axes])


def _laid_back(rewriter: Rewriter, expr: relax.Expr, found: Transposed) -> relax.Expr | None:
    """Return what is broadcast to a transposed tensor as it is broadcast to the source."""
    shape, rank = shape_of(expr), len(found.axes)
    if shape is None or len(shape) > rank:
        return None
    if all(map(is_one, shape)):
        return expr if not shape or len(shape) == 1 else rewriter.emit(relax.op.reshape(expr, [1]))
    full = [tirx.IntImm("int64", 1)] * (rank - len(shape)) + list(shape)
    target = [full[found.axes.index(a)] for a in range(rank)]
    moved = [found.axes[i] for i, size in enumerate(full) if not is_one(size)]
    if moved == sorted(moved):
        target = _without_ones(target)
        same = same_shape(target, shape)
        return expr if same else rewriter.emit(relax.op.reshape(expr, target))
    source = shape_of(found.source) or []
    if same_shape(full, [source[a] for a in found.axes]):
        return None  # as large as the tensor: nothing would be won
    whole = expr if len(shape) == rank else rewriter.emit(relax.op.reshape(expr, full))
    inverse = [found.axes.index(a) for a in range(rank)]
    return rewriter.emit(relax.op.permute_dims(whole, inverse))


def _without_ones(shape: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    """Leave out leading axes of size 1."""
    first = next((i for i, size in enumerate(shape) if not is_one(size)), len(shape) - 1)
    return list(shape[first:])


def _slice(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    found, rank = transposed(rewriter, call.args[0]), len(shape_of(call) or ())
    if found is None or not rank:
        return None
    axes = [found.axes[int(a) % rank] for a in call.args[1].fields]
    inbound = bool(call.attrs.assume_inbound)
    made = relax.op.strided_slice(found.source, axes, *call.args[2:], assume_inbound=inbound)
    return found.back(rewriter, made)


def _concat(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    if not isinstance(call.args[0], relax.Tuple) or call.attrs.axis is None:
        return None
    fields = list(call.args[0].fields)
    known = [transposed(rewriter, field) for field in fields]
    first = next((t for t in known if t is not None), None)
    if first is None or any(t is not None and t.axes != first.axes for t in known):
        return None
    sources = [
        _spread(rewriter, field, first) if t is None else t.source
        for t, field in zip(known, fields, strict=True)
    ]
    if any(source is None for source in sources):
        return None
    axis = first.axes[int(call.attrs.axis) % len(first.axes)]
    return first.back(rewriter, relax.op.concat(sources, axis))


def _spread(rewriter: Rewriter, expr: relax.Expr, found: Transposed) -> relax.Expr | None:
    """Return what is broadcast to a shape, broadcast to that in front of a transpose."""
    call, shape = rewriter.call(expr, "relax.broadcast_to"), shape_of(expr)
    laid = _laid_back(rewriter, call.args[0], found) if call is not None else None
    if laid is None or not shape:
        return None
    order = [found.axes.index(a) for a in range(len(found.axes))]
    return rewriter.emit(relax.op.broadcast_to(laid, [shape[i] for i in order]))


def _expand(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Add an axis behind the last one in front."""
    found, rank = transposed(rewriter, call.args[0]), len(shape_of(call) or ())
    if found is None or [int(a) % rank for a in call.attrs.axis] != [rank - 1]:
        return None
    made = rewriter.emit(relax.op.expand_dims(found.source, [rank - 1]))
    return relax.op.permute_dims(made, [*found.axes, rank - 1])


def _reshape(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Regroup neighbouring axes, which a transpose leaves neighbours, in front of it."""
    if same_type(call.args[0], call):
        return call.args[0]
    found, old, new = transposed(rewriter, call.args[0]), shape_of(call.args[0]), shape_of(call)
    if found is None or old is None or new is None:
        return None
    lead, last = _common(old, new)
    axes, count = found.axes, len(new) - lead - last
    regrouped = axes[lead : len(axes) - last]
    if not regrouped or regrouped != list(range(regrouped[0], regrouped[0] + len(regrouped))):
        return None
    first, more = regrouped[0], count - len(regrouped)
    shape, inner = shape_of(found.source) or [], new[lead : lead + count]
    made = relax.op.reshape(
        found.source, [*shape[:first], *inner, *shape[first + len(regrouped) :]]
    )
    after = [
        *(a if a < first else a + more for a in axes[:lead]),
        *range(first, first + count),
        *(a if a < first else a + more for a in axes[len(axes) - last :]),
    ]
    return relax.op.permute_dims(rewriter.emit(made), after)


def _common(a: Sequence[tirx.Expr], b: Sequence[tirx.Expr]) -> tuple[int, int]:
    """Return how many axes two shapes begin and end with alike, at least one left of each."""
    most = min(len(a), len(b)) - 1
    lead = next((i for i in range(most) if not same_shape(a[i : i + 1], b[i : i + 1])), most)
    ends = ((a[-i - 1], b[-i - 1]) for i in range(max(most - lead, 0)))
    last = next((i for i, (x, y) in enumerate(ends) if not same_shape([x], [y])), most - lead)
    return lead, max(last, 0)


def _item(rewriter: Rewriter, item: relax.TupleGetItem) -> relax.Expr | None:
    """Take a part of a split in front."""
    split = rewriter.call(item.tuple_value, "relax.split")
    found = transposed(rewriter, split.args[0]) if split is not None else None
    if split is None or found is None:
        return None
    axis = found.axes[int(split.attrs.axis) % len(found.axes)]
    parts = relax.op.split(found.source, split.attrs.indices_or_sections, axis)
    return found.back(rewriter, relax.TupleGetItem(rewriter.emit(parts), item.index))


TRANSPOSES: dict[str, Rule] = {
    **rules_behind(transposed),
    "relax.expand_dims": _expand,
    "relax.permute_dims": _permute,
    "relax.reshape": _reshape,
    "relax.strided_slice": _slice,
    "relax.concat": _concat,
    ITEM: _item,
}
