"""What is known of a compiled graph beside its code, as data that can be kept in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import InstanceOf

from ..validation import Natural, read


@dataclass(frozen=True)
class PieceRecord:
    """How a compiled piece is called.

    An order is a permutation of a tensor's dimensions from the slowest to the fastest: permuted so,
    it is row-major, as compiled code takes and makes it.

    Parameters
    ----------
    inputs : tuple of int
        The arguments that are passed as tensors, in the order of the function's parameters.
    weights : int
        How many of them, at the end, are the same tensors in every call.
    sizes : tuple of int
        The arguments that are passed, as one shape, in front of the weights: no tensor has them.
    taken, returned : tuple of tuple of int
        The orders of the inputs, and of the results.
    written : tuple of int
        Which inputs, by their place among them, are caches that are written in place.
    constant : tuple of int
        The results that depend on no input: compiled code returns the same memory in every call.
    """

    inputs: tuple[Natural, ...]
    weights: Natural
    sizes: tuple[Natural, ...]
    taken: tuple[tuple[Natural, ...], ...]
    returned: tuple[tuple[Natural, ...], ...]
    written: tuple[Natural, ...]
    constant: tuple[Natural, ...]


@dataclass(frozen=True)
class GraphRecord:
    """How a graph was cut.

    Parameters
    ----------
    refusals : dict
        Why an operator stays in PyTorch, by the name of its node.
    pieces : tuple of PieceRecord
        The pieces in the order of their calls; None where one could not be compiled.
    verdicts : tuple of str
        What the report has of each piece.
    """

    refusals: dict[str, str]
    pieces: tuple[InstanceOf[PieceRecord] | None, ...]
    verdicts: tuple[str, ...]


@dataclass(frozen=True)
class Uses:
    """What becomes of a piece's results, by their numbers.

    Parameters
    ----------
    copies : tuple of tuple
        An argument of the piece, and the result that is copied to it behind each call.
    returned : frozenset of int
        The results that the caller looks at.
    """

    copies: tuple[tuple[int, int], ...]
    returned: frozenset[int]


def piece_record(data: Any, error: type[Exception], where: str) -> PieceRecord:
    """Make a record of what a file has of it."""
    return read(PieceRecord, tuples(data), error, where)


def tuples(data: Any) -> Any:
    """Return what JSON holds with tuples in the place of lists."""
    if isinstance(data, dict):
        return {name: tuples(value) for name, value in data.items()}
    return tuple(map(tuples, data)) if isinstance(data, list) else data


def is_row_major(order: tuple[int, ...]) -> bool:
    """Tell whether nothing is to be permuted."""
    return order == tuple(range(len(order)))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation that undoes `order`."""
    return tuple(order.index(axis) for axis in range(len(order)))
