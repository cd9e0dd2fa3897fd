"""What prices of many plans, at many sizes, are computed with at once.

A model is written once: its numbers are those of one plan at one size, or arrays of the shape
``(sizes, plans)``.  Either way each price has the same bits, so that equal prices stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
"""Of shape ``(sizes, plans)``."""

Wanted = NDArray[np.bool_]
"""Which of them are asked for."""

T = TypeVar("T", bound=tuple[Any, ...])


def stacked(each: Sequence[T]) -> T:
    """Return a tuple of arrays, one for each field, with an element for each of some tuples."""
    return type(each[0])(*map(np.array, zip(*each, strict=True)))


def summed(each: Sequence[T]) -> T:
    """Return a tuple of sums, one for each field of some tuples."""
    fields: list[Any] = [sum(values) for values in zip(*each, strict=True)]
    return type(each[0])(*fields)


def column(sizes: Sequence[int]) -> Any:
    """Return an array of sizes, of shape ``(sizes, 1)``."""
    return np.array(sizes)[:, None]


def one_by_one(wanted: Wanted, price: Callable[[int, int], float]) -> Seconds:
    """Return what `price` says of the numbers of size and plan, where that is wanted."""
    found = np.full(wanted.shape, inf)
    for size, plan in zip(*map(np.ndarray.tolist, np.nonzero(wanted)), strict=True):
        found[size, plan] = price(size, plan)
    return found


def overlapping(power: int, *times: Any) -> Any:
    """Return what times that overlap add up to: the root of the sum of their powers.

    The higher the power, the more the longest hides.  By squares and square roots, which are the
    same for a number and for an element of an array.

    Parameters
    ----------
    power : int
        A power of two.
    *times : float or array
        In seconds.
    """
    doublings = range(power.bit_length() - 1)
    raised = list(times)
    for _ in doublings:
        raised = [time * time for time in raised]
    total = sum(raised)
    for _ in doublings:
        total = np.sqrt(total)
    return total
