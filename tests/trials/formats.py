"""Formats of weights that the library was never told of: each is what decodes it in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax, te, tirx

from ..support.quantised import Size, codes

Shapes = list[tuple[tuple[Size, ...], str]]


def bits(word: tirx.Expr, dtype: str, start: tirx.Expr, count: int) -> tirx.Expr:
    """Return the integer of `count` bits of a word of `dtype`, from `start` on."""
    return word >> start.astype(dtype) & tirx.const(2**count - 1, dtype)


class Format:
    """A weight of float16, decoded by a PrimFunc of one block whose element is `element`."""

    dtype, layout = "float16", "nk"

    def shapes(self, n: Size, k: int) -> Shapes:
        raise NotImplementedError

    def element(self, given: Sequence[te.Tensor], j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        raise NotImplementedError

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        raise NotImplementedError

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        def function(*tensors: te.Tensor) -> te.Tensor:
            return te.compute((n, k), lambda j, i: self.element(tensors, j, i), "made")

        return bb.emit(bb.call_te(function, *given, primfunc_name_hint="made"))


class SixBits(Format):
    """Five integers to a word of 32 bits, groups of 48 along k, the zero point 31."""

    def shapes(self, n: Size, k: int) -> Shapes:
        return [((n, -(-k // 5)), "uint32"), ((n, -(-k // 48)), "float16")]

    def element(self, given: Sequence[te.Tensor], j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        words, scales = given
        number = bits(words[j, i // 5], "uint32", i % 5 * 6, 6).astype("float16")
        return (number - tirx.const(31, "float16")) * scales[j, i // 48]

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        words, scales = arrays
        numbers = codes(words, 6, np.arange(5) * 6)[:, :k].astype("float16")
        return (numbers - np.float16(31)) * scales.repeat(48, -1)[:, :k]


WRITTEN = """@T.prim_func(s_tir=True, private=True)
def made(
    words: T.Buffer(({n}, {words}), "uint32"),
    scales: T.Buffer(({n}, {groups}), "float16"),
    out: T.Buffer(({n}, {k}), "float16"),
):
    for j, i in T.grid({n}, {k}):
        with T.sblock("made"):
            v, u = T.axis.remap("SS", [j, i])
            out[v, u] = (
                T.Cast("float16", words[v, u // 5] >> T.Cast("uint32", u % 5 * 6) & T.uint32(63))
                - T.float16(31)
            ) * scales[v, u // 48]
"""


class WrittenByHand(SixBits):
    """The same, as a person writes it, who counts in int32."""

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        text = WRITTEN.format(n=n, k=k, words=-(-k // 5), groups=-(-k // 48))
        made = bb.add_func(tvm.script.from_source(text), "made")
        return bb.emit(relax.op.call_tir(made, given, relax.TensorType((n, k), "float16")))


class GroupsAlongColumns(Format):
    """Four bits along k, whose scales are of 16 neighbouring outputs."""

    def shapes(self, n: Size, k: int) -> Shapes:
        return [((n, k // 8), "uint32"), ((-(-n // 16), k), "float16")]

    def element(self, given: Sequence[te.Tensor], j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        words, scales = given
        number = bits(words[j, i // 8], "uint32", i % 8 * 4, 4).astype("float16")
        return (number - tirx.const(8, "float16")) * scales[j // 16, i]

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        words, scales = arrays
        numbers = codes(words, 4).astype("float16") - np.float16(8)
        return numbers * scales.repeat(16, 0)[: len(words)]


class ZerosOfGroups(Format):
    """Bytes, with a zero point of a byte for 32 of them; differences are of whole numbers."""

    def shapes(self, n: Size, k: int) -> Shapes:
        return [((n, k), "uint8"), ((n, k // 32), "uint8"), ((n, k // 32), "float16")]

    def element(self, given: Sequence[te.Tensor], j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        numbers, zeros, scales = given
        number, zero = (value.astype("int32") for value in (numbers[j, i], zeros[j, i // 32]))
        return (number - zero).astype("float16") * scales[j, i // 32]

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        numbers, zeros, scales = arrays
        found = numbers.astype("int32") - zeros.repeat(32, -1)
        return found.astype("float16") * scales.repeat(32, -1)


class Table(Format):
    """Four bits that are places in a table of 16 numbers."""

    def shapes(self, n: Size, k: int) -> Shapes:
        return [((n, k // 8), "uint32"), ((16,), "float16"), ((n, k // 32), "float16")]

    def element(self, given: Sequence[te.Tensor], j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        words, table, scales = given
        place = bits(words[j, i // 8], "uint32", i % 8 * 4, 4).astype("int32")
        return table[place] * scales[j, i // 32]

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        words, table, scales = arrays
        return table[codes(words, 4)] * scales.repeat(32, -1)


class AcrossWords(Format):
    """Three bits, some of them of two neighbouring bytes."""

    def shapes(self, n: Size, k: int) -> Shapes:
        return [((n, k * 3 // 8 + 1), "uint8"), ((n, 1), "float16")]

    def element(self, given: Sequence[te.Tensor], j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        words, scales = given
        low, high = (words[j, i * 3 // 8 + n].astype("uint16") for n in (0, 1))
        both = high << tirx.const(8, "uint16") | low
        return bits(both, "uint16", i * 3 % 8, 3).astype("float16") * scales[j, 0]

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        words, scales = arrays
        each = np.unpackbits(words, axis=1, bitorder="little")[:, : 3 * k].reshape(-1, k, 3)
        return (each @ np.array([1, 2, 4])).astype("float16") * scales


class ScaledScales(Format):
    """Four bits, with a scale and a least number of four bits each for 16, and these for 64."""

    def shapes(self, n: Size, k: int) -> Shapes:
        whole = ((n, k // 64), "float16")
        return [((n, k // 2), "uint8"), ((n, k // 16), "uint8"), whole, whole]

    def element(self, given: Sequence[te.Tensor], j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        numbers, small, scales, least = given
        number = bits(numbers[j, i // 2], "uint8", i % 2 * 4, 4).astype("float16")
        of_scale, of_least = (
            bits(small[j, i // 16], "uint8", tirx.const(start, "int64"), 4).astype("float16")
            for start in (0, 4)
        )
        return number * (scales[j, i // 64] * of_scale) - least[j, i // 64] * of_least

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        numbers, small, scales, least = arrays
        each = np.stack([numbers & 15, numbers >> 4], -1).reshape(-1, k).astype("float16")
        of_scale, of_least = (v.astype("float16").repeat(16, -1) for v in (small & 15, small >> 4))
        return each * (scales.repeat(64, -1) * of_scale) - least.repeat(64, -1) * of_least


UNNAMED = {
    format.__name__: format()
    for format in (
        *(SixBits, WrittenByHand, GroupsAlongColumns),
        *(ZerosOfGroups, Table, AcrossWords, ScaledScales),
    )
}
