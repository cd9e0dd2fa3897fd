"""Constants and products of a chain, in the spellings of front ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from ..tvm_ir import GenericConst
from ..workload import FLOAT_BYTES
from .pattern import Definitions, is_call
from .places import MOVES
from .shapes import dtype_of, same_shape, shape_of

_LEAST, _LARGEST = (float(np.finfo("float32").tiny), float(np.finfo("float32").max))


def scalar(view: Definitions, expr: relax.Expr) -> float | None:
    """Return the value of a constant with one element, or None."""
    value = view.definition(expr)
    shape = shape_of(value) if isinstance(value, GenericConst) else None
    if shape is None or any(int(d) != 1 for d in shape):
        return None  # a large constant is not even copied
    return float(value.value.numpy().reshape(-1)[0])


def is_filled(expr: relax.Expr, value: float) -> bool:
    """Tell whether a vector is constant, and `value` everywhere."""
    if not isinstance(expr, GenericConst) or len(shape_of(expr) or ()) != 1:
        return False
    return bool((expr.value.numpy() == value).all())


def filled(view: Definitions, expr: relax.Expr) -> Any:
    """Return the number that all elements of a tensor are; None if they may be several."""
    value = view.definition(expr)
    while is_call(value, *MOVES, "relax.full", "relax.full_like"):
        value = view.definition(value.args[is_call(value, "relax.full", "relax.full_like")])
    if is_call(value, "relax.zeros", "relax.zeros_like"):
        return 0
    numbers = value.value.numpy() if isinstance(value, GenericConst) else np.empty(0)
    return numbers.flat[0].item() if numbers.size and (numbers == numbers.flat[0]).all() else None


_CONSTANT_DIGITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""A dtype rounds a constant by so much of it; of irrational ones, front ends write five digits."""


def near(value: float, wanted: float, dtype: str) -> bool:
    """Tell whether a constant is `wanted`, as far as `dtype` and five digits can say."""
    return math.isclose(value, wanted, rel_tol=_CONSTANT_DIGITS.get(dtype, 1e-5))


def binary(
    view: Definitions, expr: relax.Expr, op: str
) -> tuple[tuple[relax.Expr, relax.Expr], ...]:
    """Return both orders of the operands of a commutative binary call, or nothing."""
    call = view.call(expr, op)
    return ((call.args[0], call.args[1]), (call.args[1], call.args[0])) if call is not None else ()


def squared(
    view: Definitions,
    expr: relax.Expr,
    alike: Callable[[relax.Expr, relax.Expr], bool] = lambda a, b: bool(a.same_as(b)),
) -> relax.Expr | None:
    """Return what `expr` is the square of: by `square`, a power, or a product of two alike."""
    call = view.call(expr, "relax.square", "relax.multiply", "relax.power")
    if call is None:
        return None
    base, *other = call.args
    if is_call(call, "relax.power"):
        return base if scalar(view, other[0]) == 2.0 else None
    return base if all(alike(factor, base) for factor in other) else None


def scaled(
    view: Definitions, expr: relax.Expr, read: Callable[[relax.Expr], float | None] | None = None
) -> tuple[relax.Expr, float] | None:
    """Read ``x * c`` or ``x / c`` of floats as ``(x, factor)``, if kernels have that factor.

    `read` tells what number an operand is; `scalar` by default.
    """
    if dtype_of(expr) not in FLOAT_BYTES:
        return None  # integers are divided without a rest
    number = read or partial(scalar, view)
    call = view.call(expr, "relax.divide")
    inverse = ((call.args[0], call.args[1]),) if call is not None else ()
    for data, factor in (*binary(view, expr, "relax.multiply"), *inverse):
        value = number(factor) if same_shape(shape_of(data), shape_of(expr)) else None
        if value is None or (value == 0 and inverse):
            continue
        value = 1.0 / value if inverse else value
        if is_factor(value):
            return data, value
    return None


def is_factor(value: float) -> bool:
    """Tell whether kernels can multiply by a number: a normal one of float32, or zero."""
    return value == 0 or _LEAST <= abs(value) <= _LARGEST
