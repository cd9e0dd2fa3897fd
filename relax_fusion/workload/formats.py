"""How the elements of a tensor are stored, where that is not one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import GraphError
from .dims import Dim, size_text

_T = TypeVar("_T")

_WORDS = {"uint8": 8, "uint16": 16, "uint32": 32}
"""Bits of what packed elements are kept in."""


@dataclass(frozen=True)
class Operand:
    """What a kernel is handed: an array, or a number (of no shape)."""

    name: str
    shape: tuple[Dim, ...] | None
    dtype: str

    def __str__(self) -> str:
        """Return name, shape and dtype."""
        if self.shape is None:
            return f"{self.name} {self.dtype}"
        return f"{self.name}[{', '.join(map(size_text, self.shape))}] {self.dtype}"


@dataclass(frozen=True)
class Packed:
    """Elements of a few bits in words, with a scale for each group of them.

    An element is ``(field - zero) * scale``, where field ``i`` of a word is its bits from
    ``i * bits`` on, and the words follow one dimension.  The operands are the words, under the name
    of the tensor, and the scales, ``NAME_scale``.  Groups are stored whole: where a group is a
    number of words, the last group has as many as the others.

    Parameters
    ----------
    bits : int
        Of one element.
    group : int
        Elements along that dimension that share a scale.
    zero : int
        The field that means 0.
    word : str
        The unsigned dtype of the words.
    scale_dtype : str
        Of the scales.
    axis : {-1, -2}
        The dimension: the last, or the one in front of it.
    """

    bits: int
    group: int
    zero: int
    word: str = "uint32"
    scale_dtype: str = "float16"
    axis: int = -1

    def __post_init__(self) -> None:
        """Refuse what no tensor is stored as.

        Raises
        ------
        GraphError
            If a word holds no field, a group no element, or a dtype is not known.
        """
        if self.word not in _WORDS:
            raise GraphError(f"words are {self.word!r}; must be of {', '.join(_WORDS)}")
        if not 1 <= self.bits <= _WORDS[self.word]:
            raise GraphError(f"{self.bits} bits; must be 1 to {_WORDS[self.word]}, as {self.word}")
        if self.group < 1:
            raise GraphError(f"a group is of {self.group}; must be from 1 on")
        if self.axis not in (-1, -2):
            raise GraphError(f"axis is {self.axis}; must be -1 or -2")

    @property
    def fields(self) -> int:
        """Elements of a word; bits that are left over are unused."""
        return _WORDS[self.word] // self.bits

    def words(self, elements: int) -> int:
        """Return how many words so many elements of the packed dimension take."""
        if self.group % self.fields == 0:
            return math.ceil(elements / self.group) * (self.group // self.fields)
        return math.ceil(elements / self.fields)

    def operands(self, name: str, shape: tuple[Dim, ...]) -> tuple[Operand, ...]:
        """Return the words and the scales of a tensor.

        Raises
        ------
        GraphError
            If its packed dimension is dynamic, or there is none.
        """
        if len(shape) < -self.axis:
            raise GraphError(f"{name} has rank {len(shape)}; must be at least {-self.axis}")
        elements = shape[self.axis]
        if not isinstance(elements, int):
            raise GraphError(f"{name}: the packed dimension is {elements}; must be a number")

        def stored(size: int) -> tuple[Dim, ...]:
            return self.along(shape, size)

        groups = math.ceil(elements / self.group)
        return (
            Operand(name, stored(self.words(elements)), self.word),
            Operand(f"{name}_scale", stored(groups), self.scale_dtype),
        )

    def along(self, places: Sequence[_T], place: _T) -> tuple[_T, ...]:
        """Return sizes or indices with another one for the packed dimension."""
        found = list(places)
        found[self.axis] = place
        return tuple(found)
