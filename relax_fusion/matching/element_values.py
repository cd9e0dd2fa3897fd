"""Values that the elements of a tensor can have: in its dtype, and by place in a constant one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import ml_dtypes
import numpy as np
from tvm import tirx

from ..tvm_ir import GenericConst
from .pattern import PrimExpr


@dataclass(frozen=True)
class Choice:
    """`then` where `condition` holds, else `other`."""

    condition: PrimExpr
    then: Element
    other: Element


Element: TypeAlias = "PrimExpr | float | Choice"
"""A whole number or a boolean as tirx has them, whatever the tensor's dtype; or another number."""

Index: TypeAlias = tuple[PrimExpr, ...]

_FLOATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    **{d: (int(np.iinfo(d).min), int(np.iinfo(d).max)) for d in _INTEGERS},
    **{d: (-(2 << ml_dtypes.finfo(d).nmant), 2 << ml_dtypes.finfo(d).nmant) for d in _FLOATS},
}
"""The least and the largest whole number of a dtype between which it has all of them.

Operators on numbers in between are exact; elsewhere integers wrap around and floats are rounded.
"""


class Unknown(Exception):
    """An element is no expression of its indices: it depends on data, or on too much."""


def integer(value: int) -> PrimExpr:
    """Return a whole number of the type that indices have."""
    return tirx.IntImm("int64", value)


def number(value: float | Fraction) -> PrimExpr | float:
    """Return a number as an element.

    Raises `Unknown` if it is not a number, or has too many digits.
    """
    if math.isinf(value):
        return float(value)
    if math.isnan(value) or not -(1 << 1000) < value < 1 << 1000:
        raise Unknown
    if value == int(value) and -(1 << 63) <= value < 1 << 63:
        return integer(int(value))
    if float(value) != value:
        raise Unknown
    return float(value)


def truth(value: bool) -> PrimExpr:
    """Return a boolean as an element."""
    return tirx.IntImm("bool", value)


def is_boolean(value: Element) -> bool:
    """Tell whether an element is a condition."""
    return not isinstance(value, float | Choice) and str(value.ty) == "bool"


def float_of(value: Element) -> float | None:
    """Return the number that an element is, an exact int or float, if it is always the same."""
    if isinstance(value, tirx.IntImm):
        return int(value)
    return value if isinstance(value, float) else None


def rounded(value: float, dtype: str) -> float:
    """Return the number that a float `dtype` has next to `value`."""
    with np.errstate(over="ignore"):
        return float(_FLOATS[dtype](value))


def held_number(value: float, dtype: str) -> float:
    """Return a number as `dtype` holds it: as it is, or infinite beyond the largest float.

    Raises `Unknown` if it would be rounded or wrap around.
    """
    least, largest = WHOLE_NUMBERS.get(dtype, (0, -1))
    if least <= value <= largest and value == int(value):
        return value
    result = rounded(value, dtype) if dtype in _FLOATS else math.nan
    if result != value and not math.isinf(result):
        raise Unknown
    return result


def is_float(dtype: str) -> bool:
    """Tell whether numbers of `dtype` are rounded."""
    return dtype in _FLOATS


LARGEST_TABLE = 1 << 24
"""A constant of more elements is not looked into: a mask of 4096 by 4096 has as many."""


@dataclass(frozen=True)
class _Table:
    """What is known of a constant: all one value, a line, or a band of its last two axes.

    A line is ``value + step * index`` along the only axis that is not 1.  A band is `value` where
    ``above < column - row <= upto``, and `outside` elsewhere.
    """

    value: float
    step: int | None = None
    outside: float | None = None
    above: int | None = None
    upto: int | None = None


def table_element(const: GenericConst, index: Index) -> Element:
    """Return the element of a constant at `index`.

    Raises `Unknown` if the constant is neither uniform, nor a line, nor a band.
    """
    table = _described(const)
    boolean = str(const.ty.dtype) == "bool"
    if table.outside is not None:
        inside, outside = (
            truth(bool(v)) if boolean else number(v) for v in (table.value, table.outside)
        )
        offset = index[-1] - index[-2]
        bounds = []
        if table.upto is not None:
            bounds.append(offset <= integer(table.upto))
        if table.above is not None:
            bounds.append(offset > integer(table.above))
        return Choice(tirx.And(*bounds) if len(bounds) == 2 else bounds[0], inside, outside)
    if table.step is not None:
        axis = next(a for a, d in enumerate(const.ty.shape.values) if int(d) != 1)
        return integer(int(table.value)) + integer(table.step) * index[axis]
    return truth(bool(table.value)) if boolean else number(table.value)


@lru_cache(maxsize=8)
def _described(const: GenericConst) -> _Table:
    if math.prod(int(d) for d in const.ty.shape.values) > LARGEST_TABLE:
        raise Unknown
    values = const.value.numpy()
    if not values.size or np.any(values != values):
        raise Unknown  # without elements, or with some that are not a number
    if bool(np.all(values == values.flat[0])):
        return _Table(_number(values.flat[0]))
    line = _line(values)
    return line if line is not None else _band(values)


def _number(value: np.generic) -> float:
    """Return a number of a tensor, exactly: an int if its dtype has only those."""
    return int(value) if isinstance(value, np.integer) else float(value)


def _line(values: np.ndarray) -> _Table | None:
    """Read ``start + step * index`` of whole numbers."""
    if values.size != max(values.shape) or values.dtype == bool:
        return None
    flat = values.reshape(-1).astype("float64")
    if not np.all(np.abs(flat) < 1 << 53) or np.any(flat != np.trunc(flat)):
        return None  # infinite, fractions, or integers that float64 does not tell apart
    steps = np.diff(flat)
    return _Table(float(flat[0]), step=int(steps[0])) if np.all(steps == steps[0]) else None


def _band(values: np.ndarray) -> _Table:
    """Read one value between two diagonals of the last two axes and another outside of them."""
    if values.ndim < 2 or any(d != 1 for d in values.shape[:-2]):
        raise Unknown
    rows, columns = values.shape[-2], values.shape[-1]
    matrix = values.reshape(rows, columns)
    offset = np.arange(columns)[None] - np.arange(rows)[:, None]
    for value in (matrix[-1, 0], matrix[rows // 2, columns // 2]):
        inside = matrix == value
        others = matrix[~inside]
        above, upto = offset[inside].min() - 1, offset[inside].max()
        if np.all(others == others[0]) and np.array_equal(
            inside, (offset > above) & (offset <= upto)
        ):
            return _Table(
                _number(value),
                outside=_number(others[0]),
                above=int(above) if above >= offset.min() else None,
                upto=int(upto) if upto < offset.max() else None,
            )
    raise Unknown
