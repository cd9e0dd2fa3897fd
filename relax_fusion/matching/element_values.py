"""Values that the elements of a tensor can have, and what their dtypes make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import ml_dtypes
import numpy as np
from tvm import tirx

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

    Raises
    ------
    Unknown
        If it is not a number, or has too many digits.
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

    Raises
    ------
    Unknown
        If it would be rounded or wrap around.
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
