"""Tensors as formulas of an element, before they are statements of a block graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...workload.values import At, AxisValue, Expr, Op, Read

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dimension, the outermost first; none of a dimension of size 1."""


def flat(dims: Dims) -> tuple[str, ...]:
    """Return the axes of all dimensions, in order."""
    return tuple(name for dim in dims for name in dim)


@dataclass(frozen=True)
class Formula:
    """A tensor.

    Parameters
    ----------
    dims : Dims
        The axes of its dimensions.
    element : Expr
        An element, of these axes.
    dtype : str
        Of the tensor.
    """

    dims: Dims
    element: Expr
    dtype: str

    @property
    def axes(self) -> tuple[str, ...]:
        """All its axes, in order."""
        return flat(self.dims)

    def renamed(self, names: Mapping[str, str]) -> Formula:
        """Return the same tensor with other names of its axes."""
        dims = tuple(tuple(names.get(n, n) for n in dim) for dim in self.dims)
        places = {old: At(((new, 1),)) for old, new in names.items()}
        return replace(self, dims=dims, element=moved(self.element, places))

    def is_stored(self) -> bool:
        """Tell whether each element is one of a tensor that is there, along plain axes."""
        if not isinstance(self.element, Read):
            return False
        plain = [c.terms[0][0] for c in self.element.at if c == At(c.terms) and len(c.terms) == 1]
        return len(plain) == len(self.element.at) and set(plain) == set(self.axes)


def moved(value: Expr, places: Mapping[str, At]) -> Expr:
    """Return a value with coordinates in the place of axes, which are replaced all at once."""
    if isinstance(value, Op):
        return replace(value, args=tuple(moved(a, places) for a in value.args))
    if isinstance(value, Read):
        return replace(value, at=tuple(_moved_at(c, places) for c in value.at))
    if isinstance(value, AxisValue) and value.axis in places:
        return AxisValue(places[value.axis].terms[0][0])
    return value


def _moved_at(place: At, places: Mapping[str, At]) -> At:
    terms: list[tuple[str, int]] = []
    start = place.start
    for name, stride in place.terms:
        new = places.get(name, At(((name, 1),)))
        terms += [(n, s * stride) for n, s in new.terms]
        start += new.start * stride
    return replace(place, terms=tuple(terms), start=start)
