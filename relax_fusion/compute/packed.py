"""The element of a packed tensor, as a formula of what it is stored as."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx

from ..workload import Packed
from ..workload.formats import ALL, E2M1, EXPONENT

EXACT = {"float16": 2**11, "bfloat16": 2**8}
"""Each of these types has every whole number up to this one."""

Stored = Callable[..., tirx.Expr]
"""A function that returns what an operand holds at its indices."""


def unpacked(
    form: Packed, stored: Sequence[Stored], at: Sequence[tirx.Expr], dtype: str
) -> tirx.Expr:
    """Return the element at some indices of a packed tensor, rounded once to `dtype`.

    It is computed in float32 where it has a limit, or `dtype` does not hold its number, its zero or
    its scale.
    """
    words, *groups = stored
    wide = dtype if _holds(form, dtype) and form.limit is None else "float32"
    value = _field(form, words, at, form.word_axis).astype(wide)
    group = _group(form, at)
    if form.zero is None:
        value = value - _field(form, groups[1], group, form.other).astype(wide)
    elif form.zero:
        value = value - tirx.const(form.zero, wide)
    if form.scale_dtype:
        value = value * _scale(form, groups[0](*group)).astype(wide)
    if form.limit is not None:
        low, high = (tirx.const(sign * form.limit, wide) for sign in (-1, 1))
        value = tirx.max(tirx.min(value, high), low)
    return value.astype(dtype)


def _holds(form: Packed, dtype: str) -> bool:
    """Tell whether numbers less their zero, and scales, need no rounding in a type of floats."""
    if form.number == E2M1:
        return form.scale_dtype in ("", dtype)
    low, high = (-128, 127) if form.number == "int8" else (0, 2**form.bits - 1)
    zeros = (low, high) if form.zero is None else (form.zero, form.zero)
    largest = max(high, high - zeros[0], zeros[1] - low, *map(abs, zeros))
    return form.scale_dtype in ("", dtype) and largest <= EXACT.get(dtype, math.inf)


def _group(form: Packed, at: Sequence[tirx.Expr]) -> tuple[tirx.Expr, ...]:
    """Return the indices of the scale of an element."""
    for axis, size in ((form.axis, form.group), (form.other, form.lines)):
        if size != 1:
            zero = tirx.IntImm("int64", 0)
            place = zero if size == ALL else at[axis] // tirx.IntImm("int64", size)
            at = form.along(at, place, axis)
    return tuple(at)


def _field(form: Packed, words: Stored, at: Sequence[tirx.Expr], axis: int) -> tirx.Expr:
    """Return the number at some indices of what is packed along a dimension."""
    if form.fields == 1 and form.bits == 8:
        word = words(*at)
        as_it_is = form.number in ("", form.word)
        return word if as_it_is else tirx.reinterpret(form.number, word)
    fields, bits = (tirx.IntImm("int64", n) for n in (form.fields, form.bits))
    place = at[axis] % fields
    if form.turns > 1:
        turns, each = (tirx.IntImm("int64", n) for n in (form.turns, form.fields // form.turns))
        place = place % turns * each + place // turns
    word = words(*form.along(at, at[axis] // fields, axis))
    field = word >> (place * bits).astype(form.word) & tirx.const(2**form.bits - 1, form.word)
    if form.number == E2M1:
        return _e2m1(field)
    return tirx.reinterpret(form.number, field.astype("uint8")) if form.number else field


def _e2m1(field: tirx.Expr) -> tirx.Expr:
    """Return the number of 4 bits as float32: a whole number of halves, by 3 bits in one word."""
    bits = field.astype("int32")
    halves = tirx.const(0xC8643210 - 2**32, "int32") >> (bits & 7) * 4 & 15
    halves = tirx.Select(bits >= 8, -halves, halves)
    return halves.astype("float32") * tirx.const(0.5, "float32")


def _scale(form: Packed, stored: tirx.Expr) -> tirx.Expr:
    """Return a scale; of an exponent, the float32 that has it.

    A bit of the mantissa is set for 0, which makes it 2 ** -127, and for 255, which makes it NaN.
    """
    if form.scale_dtype != EXPONENT:
        return stored
    byte = stored.astype("uint32")
    one, least, most, place = (tirx.const(n, "uint32") for n in (1, 0, 255, 23))
    ends = tirx.Select(byte + one & most <= one, tirx.const(1 << 22, "uint32"), least)
    return tirx.reinterpret("float32", byte << place | ends)
