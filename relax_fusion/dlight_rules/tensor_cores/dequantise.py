"""Operands that are computed from others: what a few neighbours are made of.

What neighbours along k read is loaded once for all of them, in vectors where it lies side by side;
then they are computed two at a time, as the halves of a register (`dequantised`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, tirx

from ...estimator.limits import VECTOR_LOAD_BYTES
from ...matching.expressions import chooses, different, found_in, loads_of
from ...tvm_ir import Analyzer, TensorLoad, structural_equal, structural_map

Element = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
"""A function from a line and a position along k to the element there."""

PAIR_DISTANCES = (4, 2)
"""Two elements whose bits lie 16 apart in a word are this far apart along k: the first where
elements have four bits, the second where they have eight."""

MOST_LOADS = 16
"""Neighbours may need at most this many loads; with more of them, it pays to have them computed
before."""


@dataclass(frozen=True)
class HalfType:
    """A type of two bytes."""

    pair: str
    """What PTX calls two of it."""
    base: int
    base_bits: int
    """A power of two, and the bits of it as a number of this type.  Integers below it, put into its
    lowest bits, are added to it."""
    one: int
    minus_zero: int = 0x8000
    """The bits of these."""


HALF_TYPES = {
    "float16": HalfType("f16x2", 1024, 0x6400, 0x3C00),
    "bfloat16": HalfType("bf16x2", 128, 0x4300, 0x3F80),
}


@dataclass(frozen=True)
class Bits:
    """An integer of a few bits: ``(word >> shift) & mask``."""

    word: tirx.Expr
    shift: tirx.Expr
    mask: int

    def is_behind(self, other: Bits) -> bool:
        """Tell whether these bits lie 16 above others of the same word."""
        constant = isinstance(self.shift, tirx.IntImm) and isinstance(other.shift, tirx.IntImm)
        same = structural_equal(self.word, other.word) and self.mask == other.mask
        return same and constant and int(self.shift) - int(other.shift) == 16


def bits_of(value: tirx.Expr, kind: HalfType) -> Bits | None:
    """Return the integer that is made a floating-point number; None if that is not what it is."""
    is_float = isinstance(value, tirx.Cast) and "float" in str(value.ty.dtype)
    bits = field_of(value.value) if is_float else None
    return bits if bits is not None and bits.mask < kind.base else None


def field_of(value: tirx.Expr) -> Bits | None:
    """Return which bits of a word an integer is; None if it is anything else."""
    if not isinstance(value, tirx.BitwiseAnd) or not isinstance(value.b, tirx.IntImm):
        return None
    if str(value.ty.dtype) != "uint32":
        return None
    if isinstance(value.a, tirx.RShift):
        return Bits(value.a.a, value.a.b, int(value.b))
    return Bits(value.a, tirx.const(0, "uint32"), int(value.b))


class Neighbours:
    """What `width` neighbours along k are.

    `element`: what an element is.
    `extents`: lines, and elements along k, which are a multiple of `width`.
    `width`: a multiple of 8.
    `float8`: whether the device has instructions for 8-bit floats.
    `line`, `piece`: which ones: the line, and their number along k.
    `loads`: what they read, each once.
    `loaded`: stand for what these bring.
    `values`: the neighbours, by all these variables.
    `vectors`: the loads that one instruction does, by their numbers.
    """

    def __init__(
        self,
        element: Element,
        extents: tuple[tirx.Expr | int, int],
        width: int,
        float8: bool = False,
    ) -> None:
        self.width, self.float8 = width, float8
        self.line, self.piece = tirx.Var("line", "int64"), tirx.Var("piece", "int64")
        self.analyzer = Analyzer()
        for var, size in ((self.line, extents[0]), (self.piece, extents[1] // width)):
            self.analyzer.bind(var, ir.Range.from_min_extent(_int64(0), _int64(size)))
        values = [
            self.analyzer.simplify(element(self.line, self.piece * _int64(width) + _int64(e)))
            for e in range(width)
        ]
        self.dtype = str(values[0].ty.dtype)
        self.loads = different(load for value in values for load in loads_of(value))
        self.loaded = [tirx.Var("loaded", load.ty) for load in self.loads]
        self.values = [structural_map(v, (TensorLoad, self._name_of)) for v in values]
        self.vectors = self._vectors()

    @property
    def is_supported(self) -> bool:
        """Whether they can be computed like this."""
        sizes = [_bytes_of(load.source) for load in self.loads]
        return (
            self.dtype in HALF_TYPES
            and 0 < len(self.vectors) <= MOST_LOADS
            and all(sizes)
            and not any(chooses(value) for value in self.values)
            and not any(load.source.ty.strides for load in self.loads)
            and not any(loads_of(index) for load in self.loads for index in load.indices)
        )

    def _name_of(self, load: TensorLoad) -> tirx.Expr:
        """Return what stands for a load; itself if a load in its index has its name already."""
        known = zip(self.loads, self.loaded, strict=True)
        return next((name for other, name in known if structural_equal(other, load)), load)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the elements that share a register: neighbours, unless others cost less."""
        distance = next((d for d in PAIR_DISTANCES if self._is_behind_first(d)), 1)
        starts = (n for n in range(self.width) if n // distance % 2 == 0)
        return [(n, n + distance) for n in starts]

    def _is_behind_first(self, second: int) -> bool:
        """Tell whether the integers of an element and of the first are at hand together."""
        found = []
        for value in (self.values[0], self.values[second]):
            casts = found_in(value, tirx.Cast)
            found.append([b for c in casts if (b := bits_of(c, HALF_TYPES[self.dtype]))])
        low, high = found
        return len(low) == len(high) > 0 and all(
            b.is_behind(a) for a, b in zip(low, high, strict=True)
        )

    def _vectors(self) -> list[list[int]]:
        found: list[list[int]] = []
        left = list(range(len(self.loads)))
        while left:
            run = left[:1]
            while (following := self._following(run[0], len(run), left)) is not None:
                run.append(following)
            run = run[: self._lanes(self.loads[run[0]], len(run))]
            found.append(run)
            left = [n for n in left if n not in run]
        return found

    def _following(self, first: int, distance: int, among: Sequence[int]) -> int | None:
        """Return the load of the element that lies `distance` behind that of load `first`."""
        a = self.loads[first]
        for n in among:
            b = self.loads[n]
            if not b.source.same_as(a.source):
                continue
            apart = [self._constant(j - i) for i, j in zip(a.indices, b.indices, strict=True)]
            if apart == [0] * (len(apart) - 1) + [distance]:
                return n
        return None

    def _lanes(self, load: TensorLoad, most: int) -> int:
        """Return how many neighbours an aligned load brings, of `most`."""
        size, lanes = _bytes_of(load.source), 1
        while size and 2 * lanes <= most and 2 * lanes * size <= VECTOR_LOAD_BYTES:
            # All but the first dimension are distances, too
            places = [load.indices[-1], *load.source.ty.shape[-1:]][: len(load.indices)]
            if any(self._constant(place % _int64(2 * lanes)) != 0 for place in places):
                break
            lanes *= 2
        return lanes

    def _constant(self, value: tirx.Expr) -> int | None:
        value = self.analyzer.simplify(value)
        return int(value) if isinstance(value, tirx.IntImm) else None


def _int64(value: tirx.Expr | int) -> tirx.Expr:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value.astype("int64")


def _bytes_of(buffer: tirx.Var) -> int:
    """Return the size of an element; 0 if it is none of whole bytes."""
    bits = tvm.DataType(str(buffer.ty.dtype)).bits
    return bits // 8 if bits % 8 == 0 else 0
