"""Heads that lie among others, as those of a merged projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .values import At, Axis, at


@dataclass(frozen=True)
class Heads:
    """Which heads of a tensor are read: head h is ``start + step * h`` of `total`.

    Parameters
    ----------
    total : int
        Heads of the tensor.
    start, step : int
        The first head that is read, and the distance to the next one.
    """

    total: int
    start: int = 0
    step: int = 1

    def at(self, head: Axis | At) -> At:
        """Return the coordinate of a head in the tensor."""
        place = at(head)
        terms = tuple((axis, stride * self.step) for axis, stride in place.terms)
        return At(terms, self.start + place.start * self.step)

    def wrong(self, count: int) -> Iterator[str]:
        """Yield why these cannot be `count` heads."""
        for name, least in (("total", 1), ("start", 0), ("step", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                yield f"{name} is {value!r}, must be an integer from {least} on"
                return
        last = self.start + self.step * (count - 1)
        if last >= self.total:
            yield f"head {last} is read, there are {self.total}"
