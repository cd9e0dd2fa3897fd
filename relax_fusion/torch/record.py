"""What is known of a compiled graph beside its code, as data that can be kept in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..validation import Natural


@dataclass(frozen=True)
class PieceRecord:
    """How a compiled piece is called.

    An order is a permutation of a tensor's dimensions from the slowest to the fastest: permuted so,
    it is row-major, as compiled code takes and makes it.
    """

    inputs: tuple[Natural, ...]
    """The arguments that are passed as tensors, in the order of the function's parameters."""
    weights: Natural
    """How many of them, at the end, are the same tensors in every call."""
    sizes: tuple[Natural, ...]
    """The arguments that are passed, as one shape, in front of the weights: no tensor has them."""
    taken: tuple[tuple[Natural, ...], ...]
    returned: tuple[tuple[Natural, ...], ...]
    """The orders of the inputs, and of the results."""
    written: tuple[Natural, ...]
    """Which inputs, by their place among them, are caches that are written in place."""
    constant: tuple[Natural, ...]
    """The results that depend on no input: compiled code returns the same memory in every call."""


@dataclass(frozen=True)
class GraphRecord:
    """How a graph was cut."""

    operators: tuple[tuple[Natural, ...], ...]
    """The nodes of each piece, by their numbers in the graph."""
    pieces: tuple[PieceRecord, ...]
    verdicts: tuple[str, ...]
    """What the report has of each piece."""
    left: tuple[str, ...]
    """For each operator that stays in PyTorch, why."""


@dataclass(frozen=True)
class Uses:
    """What becomes of a piece's results, by their numbers."""

    copies: tuple[tuple[int, int], ...]
    """An argument of the piece, and the result that is copied to it behind each call."""
    returned: frozenset[int]
    """The results that the caller looks at."""


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from the slowest to the fastest.

    They are returned in their own order where the elements are not dense.
    """
    rank = tensor.dim()
    identity = tuple(range(rank))
    if tensor.is_contiguous():
        return identity
    hints = [(_hint(s), _hint(n)) for s, n in zip(tensor.stride(), tensor.shape, strict=True)]
    # dimensions of one element have any stride: they stay where they are
    order = sorted(range(rank), key=lambda d: (-hints[d][0], d) if hints[d][1] != 1 else (0, d))
    return tuple(order) if tensor.permute(order).is_contiguous() else identity


def _hint(size: Any) -> int:
    """Return a size, or for a symbolic one the size that was met first."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return int(found) if found is not None else 2


def is_row_major(order: tuple[int, ...]) -> bool:
    """Tell whether nothing is to be permuted."""
    return order == tuple(range(len(order)))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation that undoes `order`."""
    return tuple(order.index(axis) for axis in range(len(order)))
