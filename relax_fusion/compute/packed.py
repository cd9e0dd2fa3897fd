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
    words, scales = stored
    place = at[form.axis]
    fields, bits = (tirx.IntImm("int64", n) for n in (form.fields, form.bits))
    word = words(*form.along(at, place // fields))
    shift = (place % fields * bits).astype(form.word)
    field = (word >> shift & tirx.const(2**form.bits - 1, form.word)).astype(dtype)
    scale = scales(*form.along(at, place // tirx.IntImm("int64", form.group)))
    return (field - tirx.const(form.zero, dtype)) * scale.astype(dtype)
