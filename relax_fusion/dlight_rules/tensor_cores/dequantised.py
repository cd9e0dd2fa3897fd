"""Operands that are computed from others, in registers, between memory and the instructions.

Integers of a few bits become floating-point numbers without a conversion: below 1024, ``q`` in the
lowest bits of the float16 number 1024 makes ``1024 + q``, from which 1024 is taken (Kim et al.,
"Who Says Elephants Can't Run", 2022).  Of two that lie 16 bits apart in a word, one instruction
makes both.  All else is done for two elements at once where it is a sum or a product, and for one
after the other where it is anything else.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...hardware.instructions import PIECE_BYTES
from ...matching.expressions import found_in, ramp, substitute
from ...tvm_ir import T, TensorLoad, structural_equal, structural_map
from .byte_pairs import BYTES, Byte, halves_of
from .dequantise import HALF_TYPES, Neighbours, bits_of
from .fragments import ptx, scratch
from .tile import int32, uint32

Half = tuple[tirx.Expr, int]
"""A register, and which half of it."""

AND_OR = 0xEA
"""What ``lop3`` makes of three words: ``a & b | c`` (PTX ISA, section "lop3")."""

PAIR_OPS = (tirx.Add, tirx.Sub, tirx.Mul)


def unrolled(count: int) -> Any:
    """Open a loop that the compiler of the device unrolls, so that the source stays short."""
    return T.unroll(int32(count), annotations={"pragma_unroll_explicit": 0})


def joined(low: Half, high: Half) -> tirx.Expr:
    """Return two halves as one register: ``prmt`` takes bytes of two (PTX ISA, section "prmt")."""
    if low[0].same_as(high[0]) and (low[1], high[1]) == (0, 1):
        return low[0]
    selector = (0x10, 0x32)[low[1]] | (0x54, 0x76)[high[1]] << 8
    target = scratch("joined", 1, "uint32", "local")
    T.evaluate(ptx["prmt.b32"](target[0], low[0], high[0], uint32(selector)))
    return target[0]


class Dequantiser:
    """Loads and computes neighbours, for a thread that has several of them.

    `neighbours`: what they are.
    `count`: those that are held at once.
    `ahead`: how often that many are loaded ahead.
    `copied`: vectors of 16 bytes, of types of which all vectors are such: what `copy_async` takes,
    through shared memory.
    """

    def __init__(self, neighbours: Neighbours, count: int, ahead: int) -> None:
        """Allocate registers, in the block that is open."""
        self.neighbours = neighbours
        self.kind = HALF_TYPES[neighbours.dtype]
        self.slots: list[tuple[str, int]] = [("", 0)] * len(neighbours.loads)
        sizes: dict[str, int] = {}
        narrow = {self._dtype(run[0]) for run in neighbours.vectors if not self._is_piece(run)}
        for run in neighbours.vectors:
            dtype = self._dtype(run[0])
            first = -(-sizes.get(dtype, 0) // len(run)) * len(run)  # aligned as a vector
            for offset, load in enumerate(run):
                self.slots[load] = (dtype, first + offset)
            sizes[dtype] = first + len(run)
        self.sizes = {dtype: -(-size // 8) * 8 for dtype, size in sizes.items()}
        self.copied = [run for run in neighbours.vectors if self._dtype(run[0]) not in narrow]
        self.narrow = narrow
        self.per_word = {d: 4 if d in BYTES and d not in narrow else 1 for d in self.sizes}
        self.raw = {
            dtype: scratch(
                f"raw_{dtype}",
                size * count * (ahead if dtype in narrow else 1) // self.per_word[dtype],
                dtype if dtype in narrow else "uint32",
                "local",
            )
            for dtype, size in self.sizes.items()
        }

    def _is_piece(self, run: list[int]) -> bool:
        """Tell whether loads bring 16 bytes, of words or of bytes."""
        dtype = self._dtype(run[0])
        return {"uint32": 4, **dict.fromkeys(BYTES, 1)}.get(dtype, 0) * len(run) == PIECE_BYTES

    def _dtype(self, load: int) -> str:
        return str(self.neighbours.loads[load].source.ty.dtype)

    def source(self, run: list[int], line: tirx.Expr, piece: tirx.Expr) -> TensorLoad:
        """Return the load of the first element of a vector."""
        where = {self.neighbours.line: line, self.neighbours.piece: piece}
        load = self.neighbours.loads[run[0]]
        return load.source[tuple(substitute(i, where) for i in load.indices)]

    def registers(self, run: list[int], index: tirx.Expr) -> list[tirx.Expr]:
        """Return where a vector of neighbours number `index` is put."""
        dtype, slot = self.slots[run[0]]
        per = self.per_word[dtype]
        first = index * int32(self.sizes[dtype] // per) + int32(slot // per)
        return [self.raw[dtype][first + int32(n)] for n in range(len(run) // per)]

    def load(self, index: tirx.Expr, line: tirx.Expr, piece: tirx.Expr) -> None:
        """Emit the loads of neighbours but for `copied`, which become those of number `index`."""
        for run in self.neighbours.vectors:
            if run in self.copied:
                continue
            load = self.source(run, line, piece)
            indices, to = list(load.indices), self.registers(run, index)[0].indices[0]
            if len(run) > 1:
                indices[-1], to = ramp(indices[-1], len(run)), ramp(to, len(run))
            T.buffer_store(self.raw[self._dtype(run[0])], load.source[tuple(indices)], [to])

    def pairs(
        self, index: tirx.Expr, line: tirx.Expr, piece: tirx.Expr, received: tirx.Expr | None = None
    ) -> list[tirx.Expr]:
        """Emit what makes the elements of neighbours number `index`; return registers of `pairs`.

        `received` is their number among those whose vectors came through shared memory.
        """
        where = {self.neighbours.line: line, self.neighbours.piece: piece}
        for name, (dtype, slot) in zip(self.neighbours.loaded, self.slots, strict=True):
            own, per = index, self.per_word[dtype]
            if dtype not in self.narrow and received is not None:
                own = received
            place = own * int32(self.sizes[dtype] // per) + int32(slot // per)
            register = self.raw[dtype][place]
            where[name] = register if per == 1 else Byte.at(dtype, register, slot % per)
        values = [substitute(v, where) for v in self.neighbours.values]
        return [self._pair(values[a], values[b]) for a, b in self.neighbours.pairs()]

    # --- two at a time -----------------------------------------------------------------------

    def _pair(self, a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
        """Return a register with the values of two expressions."""
        dtype = self.neighbours.dtype
        if str(a.ty.dtype) != dtype or type(a) is not type(b):
            return self._one_by_one(a, b)
        if isinstance(a, PAIR_OPS):
            return self._combined(a, b)
        integers = self._integers(a, b, 0)
        return self._from_bytes(a, b) if integers is None else integers

    def _combined(self, a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
        """Return sums, differences or products of two pairs."""
        if isinstance(a, tirx.Sub) and isinstance(a.b, tirx.FloatImm):
            taken = float(a.b.value)
            if structural_equal(a.b, b.b) and taken in range(self.kind.base):
                integers = self._integers(a.a, b.a, int(taken))
                if integers is not None:
                    return integers
        left, right = self._pair(a.a, b.a), self._pair(a.b, b.b)
        if isinstance(a, tirx.Mul):
            return self._fused(left, right, uint32(self.kind.minus_zero * 0x10001))
        if isinstance(a, tirx.Sub):
            return self._fused(right, self._constant(-1.0), left)
        return self._fused(left, uint32(self.kind.one * 0x10001), right)

    def _fused(self, a: tirx.Expr, b: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
        """Return ``a * b + c``: with a factor of one or nothing to add, it is rounded as either."""
        target = scratch("pair", 1, "uint32", "local")
        T.evaluate(ptx[f"fma.rn.{self.kind.pair}"](target[0], a, b, c))
        return target[0]

    def _integers(self, a: tirx.Expr, b: tirx.Expr, taken: int) -> tirx.Expr | None:
        """Return two integers of a few bits less a number; None if they are no such integers.

        All of this is exact: integers, and the base with them, have few bits.
        """
        kind = self.kind
        low, high = bits_of(a, kind), bits_of(b, kind)
        if low is None or high is None:
            return None
        if high.is_behind(low):
            # Bits that are not in the lowest place count as so many times the integer
            left = int(low.shift) % 8
            left = left if low.mask << left < kind.base else 0
            both, mask = low.word >> uint32(int(low.shift) - left), low.mask << left
            if left == int(low.shift):
                both = low.word
        else:
            left, mask = 0, low.mask
            above = (high.word >> high.shift) & uint32(high.mask)
            both = (low.word >> low.shift) & uint32(low.mask) | above << uint32(16)
            mask |= high.mask
        target = scratch("integers", 1, "uint32", "local")
        words = both, uint32(mask * 0x10001), uint32(kind.base_bits * 0x10001)
        T.evaluate(ptx["lop3.b32"](target[0], *words, AND_OR))
        unit = self._constant(1 / (1 << left))
        return self._fused(target[0], unit, self._constant(-kind.base / (1 << left) - taken))

    def _from_bytes(self, a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
        """Return two values; of bytes that are neighbours one instruction makes float16."""
        casts = [found_in(value, tirx.Cast) for value in (a, b)]
        low, high = ([byte for c in each if (byte := Byte.of(c)) is not None] for each in casts)
        if not len(low) == len(high) == 1 or not low[0].is_before(high[0]):
            return self._one_by_one(a, b)
        both = halves_of(low[0], self.neighbours.float8)
        if both is None:
            return self._one_by_one(a, b)
        if low[0].cast.same_as(a) and self.neighbours.dtype == "float16":
            return both
        wide = []
        for byte, value, shift in ((low[0], a, 0), (high[0], b, 16)):
            half = T.reinterpret("float16", (both >> uint32(shift)).astype("uint16"))
            number = half.astype(str(byte.cast.ty.dtype))
            wide.append(_replaced(value, byte.cast, number))
        return self._one_by_one(*wide)

    def _constant(self, value: float) -> tirx.Expr:
        """Return a number of few bits, twice."""
        return self._one_by_one(*[tirx.const(value, self.neighbours.dtype)] * 2)

    def _one_by_one(self, a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
        """Return two values, computed as they are written."""
        halves = scratch("halves", 2, self.neighbours.dtype, "local")
        for n, value in enumerate((a, b)):
            T.buffer_store(halves, value, [n])
        return T.reinterpret("uint32", halves[ramp(int32(0), 2)])


def _replaced(value: tirx.Expr, part: tirx.Cast, by: tirx.Expr) -> tirx.Expr:
    """Return a value with another one in the place of a part of it."""

    def own(cast: tirx.Cast) -> tirx.Expr:
        return by if structural_equal(cast, part) else cast

    return structural_map(value, (tirx.Cast, own))
