"""Sizes that are numbers, or only known at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that is only known at run time.

    Parameters
    ----------
    name : str
        How the Relax module calls it, for reports (``"batch_size"``, ``"b * s"``).
    upper : int, optional
        The largest value it can take, from the pipeline's ``variable_bounds``.
    """

    name: str
    upper: int | None = None


Dim = int | DynamicDim

PRICED_COLUMNS = 65537
"""Columns of a weight that are only known at run time, where a number is asked for: about a
vocabulary.  It is a prime, so that no tile divides it."""


_BY = "_by_"


def parts_of(dim: Dim, each: int) -> Dim:
    """Return how many times `each` is in `dim`, which is a multiple of it."""
    if isinstance(dim, int):
        return dim // each
    return DynamicDim(f"{dim.name}{_BY}{each}", dim.upper and dim.upper // each)


def part_of(name: str) -> int:
    """Return of how many rows a dimension of `parts_of` has one each; 0 for others, by name."""
    _, by, each = name.partition(_BY)
    return int(each) if by else 0


def extent(dim: Dim, value: int) -> int:
    """Return the size of `dim`, taking `value` for a dynamic one."""
    return dim if isinstance(dim, int) else value


def size_text(dim: Dim) -> str:
    """Return the name of a dimension, or the number that it is."""
    return dim.name if isinstance(dim, DynamicDim) else str(dim)


def renamed(dim: Dim, name: str) -> Dim:
    """Return `dim` under the name that it has in a graph."""
    return dim if isinstance(dim, int) else DynamicDim(name, dim.upper)
