"""Slices that keep the first elements of an axis."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from .pattern import BlockView, PrimExpr
from .shapes import same_shape, shape_of


@dataclass(frozen=True)
class Prefix:
    """The first `length` elements of an axis of `source`."""

    source: relax.Expr
    axis: int
    length: PrimExpr


def prefix_slice(view: BlockView, expr: relax.Expr) -> Prefix | None:
    """Read a slice of the first elements of one axis."""
    call = view.call(expr, "relax.strided_slice")
    shape = shape_of(expr) if call is not None else None
    if call is None or shape is None:
        return None
    axes, begin = (_values(a) for a in call.args[1:3])
    strides = _values(call.args[4]) if len(call.args) > 4 else [1]
    if len(axes) != 1 or not same_shape(begin, (0,)) or not same_shape(strides, (1,)):
        return None
    axis = int(axes[0]) % len(shape)
    # The end may lie beyond the tensor, where the slice stops; its type has the true length.
    return Prefix(call.args[0], axis, shape[axis])


def _values(expr: relax.Expr) -> list[PrimExpr]:
    """Return the elements of a tuple of primitive values."""
    return list(expr.fields if isinstance(expr, relax.Tuple) else expr.values)
