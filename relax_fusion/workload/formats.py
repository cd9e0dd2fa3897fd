"""How the elements of a tensor are stored, where that is not one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import GraphError
from .dims import Dim, size_text

_T = TypeVar("_T")

NUMBERS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of 8 bits that elements may have, other than unsigned integers."""

E2M1 = "float4_e2m1fn"
"""What 4 bits may be: a sign, two bits of exponent, one of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6."""

EXPONENT = "uint8"
"""As the dtype of scales: each is a power of 2, stored as its exponent plus 127; 255 is NaN."""

ALL = -1
"""As the size of a group: all elements along a dimension share a scale."""

_WORDS = {"uint8": 8, "uint16": 16, "uint32": 32, **dict.fromkeys(NUMBERS, 8)}
"""Bits of what packed elements are kept in."""


@dataclass(frozen=True)
class Operand:
    """What a kernel is handed: an array, or a number (of no shape)."""

    name: str
    shape: tuple[Dim, ...] | None
    dtype: str

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name} {self.dtype}"
        return f"{self.name}[{', '.join(map(size_text, self.shape))}] {self.dtype}"


@dataclass(frozen=True)
class Packed:
    """Elements of a few bits in words, with a scale for each group of them.

    An element is ``(field - zero) * scale``, where field ``i`` of a word is its bits from
    ``i * bits`` on.  The operands are the words, under the name of the tensor, the scales,
    ``NAME_scale``, and where every group has a zero of its own those, ``NAME_zero``, in words like
    the elements.  Groups are stored whole: where words of several fields follow the same dimension,
    and a group is a number of words, the last group has as many as the others.
    """

    bits: int
    """Of one element."""
    group: int
    """Elements along a dimension that share a scale; -1 for all of them."""
    zero: int | None
    """The field that means 0; None where groups have their own."""
    word: str = "uint32"
    """The dtype of the words: an unsigned one, or, where a word is one element, that of
    `number`."""
    scale_dtype: str = "float16"
    """Of the scales; empty where there are none, and an element is what its field means."""
    axis: int = -1
    """The dimension of the groups: the last, or the one in front of it."""
    across: bool = False
    """Whether the elements of a word follow the other one of these two."""
    turns: int = 1
    """Into how many parts the fields of a word are divided that give its elements in turns: with 2
    of 8 fields, those are 0, 4, 1, 5, 2, 6, 3, 7."""
    number: str = ""
    """What the 8 bits of a field are (`NUMBERS`); an unsigned integer by default."""
    lines: int = 1
    """Elements along the other dimension that share a scale, too; -1 for all of them."""
    limit: float | None = None
    """What elements beyond it become, of either sign."""

    def __post_init__(self) -> None:
        """Refuse what no tensor is stored as.

        Raises `GraphError` if a word holds no field, a group no element, or a dtype is not known.
        """
        if self.word not in _WORDS:
            raise GraphError(f"words are {self.word!r}; must be of {', '.join(_WORDS)}")
        if not 1 <= self.bits <= _WORDS[self.word]:
            raise GraphError(f"{self.bits} bits; must be 1 to {_WORDS[self.word]}, as {self.word}")
        for size in (self.group, self.lines):
            if size < 1 and size != ALL:
                raise GraphError(f"a group is of {size}; must be from 1 on, or {ALL}")
        if self.number not in ("", E2M1, *NUMBERS):
            raise GraphError(
                f"elements are {self.number!r}; must be of {E2M1}, {', '.join(NUMBERS)}"
            )
        if self.number and self.bits != (bits := 4 if self.number == E2M1 else 8):
            raise GraphError(f"{self.bits} bits; {self.number} has {bits}")
        if self.word in NUMBERS and self.word != self.number:
            raise GraphError(f"words are {self.word!r}; must be unsigned, or of {self.number!r}")
        if self.zero is None and (not self.scale_dtype or self.lines != 1):
            raise GraphError("zeros of groups need a scale for each, of one line")
        if self.axis not in (-1, -2):
            raise GraphError(f"axis is {self.axis}; must be -1 or -2")
        if self.turns < 1 or self.fields % self.turns:
            raise GraphError(
                f"turns is {self.turns}; must divide the {self.fields} fields of a word"
            )

    @property
    def fields(self) -> int:
        """Elements of a word; bits that are left over are unused."""
        return _WORDS[self.word] // self.bits

    @property
    def other(self) -> int:
        """The other one of the last two dimensions."""
        return -3 - self.axis

    @property
    def word_axis(self) -> int:
        """The dimension that the elements of a word follow."""
        return self.other if self.across else self.axis

    @property
    def is_in_order(self) -> bool:
        """Whether words hold neighbours in order, numbers of a common kind around one zero."""
        plain = self.number != E2M1 and self.scale_dtype != EXPONENT
        return plain and not self.across and self.zero is not None and self.turns == 1

    @property
    def is_plain(self) -> bool:
        """Whether they are unsigned integers in words, besides, each group with its scale."""
        each = self.group != ALL and self.lines == 1 and self.scale_dtype != ""
        several = self.fields > 1 and not self.number and self.limit is None
        return self.is_in_order and each and several

    def words(self, elements: int) -> int:
        """Return how many words so many elements take along the dimension that words follow."""
        several = self.fields > 1 and not self.across and self.group != ALL
        if several and self.group % self.fields == 0:
            return math.ceil(elements / self.group) * (self.group // self.fields)
        return math.ceil(elements / self.fields)

    def operands(self, name: str, shape: tuple[Dim, ...]) -> tuple[Operand, ...]:
        """Return the words of a tensor, the scales and the zeros if there are such.

        Raises `GraphError` if a dimension is dynamic that words or groups divide, or there is none.
        """
        packed, several = shape, self.fields > 1
        if several:
            words = self.words(self._size(name, shape, self.word_axis))
            packed = self.along(shape, words, self.word_axis)
        found = [Operand(name, packed, self.word)]
        grouped = shape
        for axis, size in ((self.axis, self.group), (self.other, self.lines)):
            if size != 1:
                count = 1 if size == ALL else math.ceil(self._size(name, shape, axis) / size)
                grouped = self.along(grouped, count, axis)
        if self.scale_dtype:
            found.append(Operand(f"{name}_scale", grouped, self.scale_dtype))
        if self.zero is None:
            if several:
                zeros = math.ceil(self._size(name, shape, self.other) / self.fields)
                grouped = self.along(grouped, zeros, self.other)
            found.append(Operand(f"{name}_zero", grouped, self.word))
        return tuple(found)

    def _size(self, name: str, shape: tuple[Dim, ...], axis: int) -> int:
        if len(shape) < -axis:
            raise GraphError(f"{name} has rank {len(shape)}; must be at least {-axis}")
        size = shape[axis]
        if not isinstance(size, int):
            raise GraphError(f"{name}: the packed dimension is {size}; must be a number")
        return size

    def along(self, places: Sequence[_T], place: _T, axis: int | None = None) -> tuple[_T, ...]:
        """Return sizes or indices with another one for a dimension, that of groups by default."""
        found = list(places)
        found[self.axis if axis is None else axis] = place
        return tuple(found)
