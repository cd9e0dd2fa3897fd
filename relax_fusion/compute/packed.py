"""The element of a packed tensor, as a formula of what it is stored as."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ..workload import Packed

Stored = Callable[..., tirx.Expr]
"""What an operand holds at its indices."""


def unpacked(
    form: Packed, stored: Sequence[Stored], at: Sequence[tirx.Expr], dtype: str
) -> tirx.Expr:
    """Return the element at some indices of a packed tensor, rounded once to `dtype`.

    Parameters
    ----------
    form : Packed
        How it is stored.
    stored : sequence of callable
        What its operands hold at their indices.
    at : sequence of tirx.Expr
        The indices of the element.
    dtype : str
        Of fields, scales and products.
    """
    words, scales, *zeros = stored
    group = form.along(at, at[form.axis] // tirx.IntImm("int64", form.group))
    field = _field(form, words, at, form.word_axis).astype(dtype)
    if form.zero is None:
        zero = _field(form, zeros[0], group, form.other).astype(dtype)
    else:
        zero = tirx.const(form.zero, dtype)
    return (field - zero) * scales(*group).astype(dtype)


def _field(form: Packed, words: Stored, at: Sequence[tirx.Expr], axis: int) -> tirx.Expr:
    """Return the bits at some indices of what is packed along a dimension."""
    fields, bits = (tirx.IntImm("int64", n) for n in (form.fields, form.bits))
    place = at[axis] % fields
    if form.turns > 1:
        turns, each = (tirx.IntImm("int64", n) for n in (form.turns, form.fields // form.turns))
        place = place % turns * each + place // turns
    word = words(*form.along(at, at[axis] // fields, axis))
    return word >> (place * bits).astype(form.word) & tirx.const(2**form.bits - 1, form.word)
