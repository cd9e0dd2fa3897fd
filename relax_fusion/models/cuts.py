"""How a weight is cut into the parts of several workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Segment:
    """A run of rows or columns of a weight that is cut by itself."""

    size: int
    """How many there are."""
    parts: int
    """Into how many parts they are cut; where it is less than the workers are, neighbours among
    these have the same one.  A last part that is not full is padded by zeros."""

    @property
    def part(self) -> int:
        """Rows or columns that a worker has."""
        return -(-self.size // self.parts)

    def span(self, rank: int, shards: int) -> tuple[int, int]:
        """Return where the part of a worker begins and ends; both are the size where it has none.

        The part ends there, and the rest of what the worker has is zeros.
        """
        first = rank * self.parts // shards * self.part
        return min(first, self.size), min(first + self.part, self.size)


@dataclass(frozen=True)
class Cut:
    """How a weight is spread over workers."""

    shards: int
    """How many workers there are."""
    axis: int = 0
    """0 for rows, which are output features, and 1 for columns."""
    segments: tuple[Segment, ...] = ()
    """What is cut by itself, such as rows of queries, of keys and of values.  None: worker 0 has
    all of it, and the others have zeros; so is a bias that is added to a sum over workers."""

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the weight of which a worker has a part of a shape."""
        if not self.segments:
            return shape
        size = sum(segment.size for segment in self.segments)
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])

    def part(self, value: np.ndarray, rank: int) -> np.ndarray:
        """Return the part of a worker."""
        if not self.segments:
            return value if rank == 0 else np.zeros_like(value)
        parts, start = [], 0
        for segment in self.segments:
            first, last = segment.span(rank, self.shards)
            at = [slice(None)] * self.axis + [slice(start + first, start + last)]
            missing = [(0, 0)] * value.ndim
            missing[self.axis] = (0, segment.part - (last - first))
            parts.append(np.pad(value[tuple(at)], missing))
            start += segment.size
        return np.ascontiguousarray(np.concatenate(parts, self.axis))
