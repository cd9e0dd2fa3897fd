"""The elements of packed tensors, by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .dims import Dim
from .formats import EXPONENT, NUMBERS, Packed

Array = np.ndarray[Any, Any]


def decoded(form: Packed, stored: Sequence[Array], shape: Sequence[Dim]) -> Array:
    """Return the elements of a packed tensor of a shape, in float64, from its operands."""
    words, *groups = stored

    def of_groups(values: Array) -> Array:
        for axis, size in ((form.axis, form.group), (form.other, form.lines)):
            if size > 1:  # one for all is broadcast
                values = _first(np.repeat(values, size, axis=axis), axis, shape)
        return values

    zero = of_groups(_fields(form, groups[1], form.other, shape)) if groups[1:] else form.zero
    numbers = _fields(form, words, form.word_axis, shape) - zero
    if form.scale_dtype:
        scales = groups[0].astype("float64")
        if form.scale_dtype == EXPONENT:
            scales = np.where(scales == 255, np.nan, 2.0 ** (scales - 127))
        numbers = numbers * of_groups(scales)
    return numbers if form.limit is None else np.clip(numbers, -form.limit, form.limit)


def _fields(form: Packed, words: Array, axis: int, shape: Sequence[Dim]) -> Array:
    """Return what words hold along a dimension, in float64."""
    places = np.arange(form.fields, dtype="uint64")
    order = places % form.turns * (form.fields // form.turns) + places // form.turns
    if form.word in NUMBERS:
        return words.astype("float64")
    moved = np.moveaxis(words, axis, -1)[..., None].astype("uint64")
    each = moved >> order * np.uint64(form.bits) & np.uint64(2**form.bits - 1)
    if form.number:
        each = each.astype("uint8").view(getattr(ml_dtypes, form.number, form.number))
    flat = np.moveaxis(each.reshape(*each.shape[:-2], -1), -1, axis)
    return (flat if form.fields == 1 else _first(flat, axis, shape)).astype("float64")


def _first(values: Array, axis: int, shape: Sequence[Dim]) -> Array:
    """Return as many elements along a dimension as a tensor of a shape has."""
    size = shape[axis]
    assert isinstance(size, int), "packed dimensions are static"
    return np.take(values, range(size), axis)
