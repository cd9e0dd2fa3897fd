"""How the elements of a tensor are stored, where that is not one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import GraphError
from .dims import Dim, size_text


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

    @property
    def fields(self) -> int:
        """Elements of a word; bits that are left over are unused."""
        return int(self.word.removeprefix("uint")) // self.bits

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
