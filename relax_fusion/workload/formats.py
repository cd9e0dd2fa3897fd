"""How the elements of a tensor are stored, where that is not one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import GraphError
from .dims import Dim, size_text

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
    ``i * bits`` on, and the words follow the last dimension.  The operands are the words, under the
    name of the tensor, and the scales, ``NAME_scale``.

    Parameters
    ----------
    bits : int
        Of one element.
    group : int
        Elements along the last dimension that share a scale.
    zero : int
        The field that means 0.
    word : str
        The unsigned dtype of the words.
    scale_dtype : str
        Of the scales.
    """

    bits: int
    group: int
    zero: int
    word: str = "uint32"
    scale_dtype: str = "float16"

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

    @property
    def fields(self) -> int:
        """Elements of a word; bits that are left over are unused."""
        return _WORDS[self.word] // self.bits

    def operands(self, name: str, shape: tuple[Dim, ...]) -> tuple[Operand, ...]:
        """Return the words and the scales of a tensor.

        Raises
        ------
        GraphError
            If its last dimension is dynamic.
        """
        *lead, last = shape
        if not isinstance(last, int):
            raise GraphError(f"{name}: the packed dimension is {last}; must be a number")
        words, groups = math.ceil(last / self.fields), math.ceil(last / self.group)
        return (
            Operand(name, (*lead, words), self.word),
            Operand(f"{name}_scale", (*lead, groups), self.scale_dtype),
        )
