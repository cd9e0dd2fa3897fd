"""Constants and products of a chain, in the spellings of front ends."""

from __future__ import annotations

import math

from tvm import ir, relax

from ..pattern import BlockView
from ..shapes import same_shape, shape_of


def scalar(view: BlockView, expr: relax.Expr) -> float | None:
    """Return the value of a constant with one element, or None."""
    value = view.definition(expr)
    shape = shape_of(value) if isinstance(value, ir.GenericConst) else None
    if shape is None or any(int(d) != 1 for d in shape):
        return None  # a large constant is not even copied
    return float(value.value.numpy().reshape(-1)[0])


_CONSTANT_DIGITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative rounding of a constant; front ends write five digits of the irrational ones."""


def near(value: float, wanted: float, dtype: str) -> bool:
    """Tell whether a constant is `wanted`, as far as `dtype` and five digits can say."""
    return math.isclose(value, wanted, rel_tol=_CONSTANT_DIGITS.get(dtype, 1e-5))


def binary(view: BlockView, expr: relax.Expr, op: str) -> tuple[tuple[relax.Expr, relax.Expr], ...]:
    """Return both orders of the operands of a commutative binary call, or nothing."""
    call = view.call(expr, op)
    return ((call.args[0], call.args[1]), (call.args[1], call.args[0])) if call is not None else ()


def scaled(view: BlockView, expr: relax.Expr) -> tuple[relax.Expr, float] | None:
    """Read ``x * c`` or ``x / c`` for a constant c as ``(x, factor)``."""
    for data, factor in binary(view, expr, "relax.multiply"):
        value = scalar(view, factor)
        if value is not None and same_shape(shape_of(data), shape_of(expr)):
            return data, value
    call = view.call(expr, "relax.divide")
    value = scalar(view, call.args[1]) if call is not None else None
    if call is None or not value or not same_shape(shape_of(call.args[0]), shape_of(expr)):
        return None
    return call.args[0], 1.0 / value
