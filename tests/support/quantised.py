"""Weights as quantisers store them: what decodes them in a graph, and in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx, topi

from relax_fusion.workload.reference import numpy_dtype

Size = int | tirx.Expr


def codes(words: np.ndarray, bits: int, shifts: np.ndarray | None = None) -> np.ndarray:
    """Return the integers that words hold along their last axis, from the lowest bits on."""
    shifts = np.arange(32 // bits) * bits if shifts is None else shifts
    each = (words[..., None] >> shifts.astype("uint32")) & (2**bits - 1)
    return each.reshape(*words.shape[:-1], -1)


@dataclass(frozen=True)
class Groups:
    """Words of several integers along k; `group` of them share a scale.

    Written as a PrimFunc of two blocks.  With the layout "kn" everything is transposed.
    """

    bits: int = 4
    group: int = 32
    dtype: str = "float16"
    layout: str = "nk"

    def shapes(self, n: Size, k: int) -> list[tuple[tuple[Size, ...], str]]:
        """Return the shapes and dtypes of what a weight of n x k is decoded from."""
        groups = -(-k // self.group)
        words = groups * (self.group // (32 // self.bits))
        found = [((n, words), "uint32"), ((n, groups), self.dtype)]
        return [(self._turned(shape), dtype) for shape, dtype in found]

    def _turned(self, pair: tuple) -> tuple:
        return pair if self.layout == "nk" else pair[::-1]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        """Emit the calls that decode a weight, in `layout`."""
        return bb.emit(bb.call_te(self._decoded, *given, n, k, primfunc_name_hint="decode"))

    def _decoded(self, words: te.Tensor, scales: te.Tensor, n: Size, k: int) -> te.Tensor:
        per, turned = 32 // self.bits, self._turned
        mask = tirx.const(2**self.bits - 1, "uint32")

        def code(*at: tirx.Expr) -> tirx.Expr:
            j, i = turned(at)
            shift = (i % per * self.bits).astype("uint32")
            return (words[turned((j, i // per))] >> shift & mask).astype(self.dtype)

        def scaled(*at: tirx.Expr) -> tirx.Expr:
            j, i = turned(at)
            zero = tirx.const(2 ** (self.bits - 1) - 1, self.dtype)
            return (raw[at] - zero) * scales[turned((j, i // self.group))]

        raw = te.compute(turned((n, k)), code, "code")
        return te.compute(turned((n, k)), scaled, "scaled")

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        """Return the weight as n x k, rounded at each step."""
        words, scales = arrays if self.layout == "nk" else (a.T for a in arrays)
        dtype = numpy_dtype(self.dtype)
        numbers = codes(words, self.bits)[:, :k].astype(dtype) - dtype.type(
            2 ** (self.bits - 1) - 1
        )
        return numbers * scales.repeat(self.group, axis=-1)[:, :k]


@dataclass(frozen=True)
class AWQ:
    """AutoAWQ's: words along n in an order of their own, a zero and a scale for 128 along k."""

    dtype: str = "float16"
    layout: str = "nk"
    shifts = np.array([0, 16, 4, 20, 8, 24, 12, 28])

    def shapes(self, n: int, k: int) -> list[tuple[tuple[int, ...], str]]:
        groups = -(-k // 128)
        return [((k, n // 8), "uint32"), ((groups, n // 8), "uint32"), ((groups, n), self.dtype)]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: int, k: int):
        return bb.emit(bb.call_te(self._decoded, *given, n, k, primfunc_name_hint="decode"))

    def _decoded(self, words: te.Tensor, zeros: te.Tensor, scales: te.Tensor, n: int, k: int):
        def code(packed: te.Tensor) -> te.Tensor:
            def element(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
                shift = (j % 2 * 16 + j % 8 // 2 * 4).astype("uint32")
                number = packed[i, j // 8] >> shift & tirx.const(15, "uint32")
                return number.astype(self.dtype)

            return topi.transpose(te.compute((packed.shape[0], n), element, "code"))

        w, z, s = code(words), code(zeros), topi.transpose(scales)
        return te.compute((n, k), lambda j, i: (w[j, i] - z[j, i // 128]) * s[j, i // 128])

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        words, zeros, scales = arrays
        dtype = numpy_dtype(self.dtype)
        w, z = (
            codes(a, 4, self.shifts).astype(dtype).repeat(r, 0)[:k]
            for a, r in ((words, 1), (zeros, 128))
        )
        return ((w - z) * scales.repeat(128, axis=0)[:k]).T


@dataclass(frozen=True)
class Operators:
    """The same as `Groups`, written with operators of Relax, transposed last."""

    dtype: str = "float16"
    group: int = 32
    layout: str = "kn"

    def shapes(self, n: Size, k: int) -> list[tuple[tuple[Size, ...], str]]:
        return [((n, k // 8), "uint32"), ((n, k // self.group), self.dtype)]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        words, scales = given
        op, shifts = relax.op, relax.const(np.arange(0, 32, 4, "uint32"))
        each = op.right_shift(op.expand_dims(words, [2]), shifts)
        numbers = op.astype(op.bitwise_and(each, relax.const(15, "uint32")), self.dtype)
        numbers = op.subtract(numbers, relax.const(7, self.dtype))
        numbers = op.reshape(numbers, (n, k // self.group, self.group))
        scaled = op.multiply(numbers, op.expand_dims(scales, [2]))
        return bb.emit(op.permute_dims(op.reshape(scaled, (n, k))))

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        return Groups(group=self.group, dtype=self.dtype).decoded(arrays, k)


@dataclass(frozen=True)
class Codebook:
    """Numbers of bytes in a table of 16, and a scale for each row."""

    dtype: str = "float16"
    layout: str = "nk"

    def shapes(self, n: Size, k: int) -> list[tuple[tuple[Size, ...], str]]:
        return [((n, k), "uint8"), ((16,), self.dtype), ((n, 1), self.dtype)]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        numbers, table, scales = given
        index = relax.op.astype(relax.op.bitwise_and(numbers, relax.const(15, "uint8")), "int32")
        return bb.emit(relax.op.multiply(relax.op.take(table, index, axis=0), scales))

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        numbers, table, scales = arrays
        return table[numbers & 15] * scales


@dataclass(frozen=True)
class Cast:
    """Numbers of a smaller type."""

    stored: str
    dtype: str = "float16"
    layout: str = "nk"

    def shapes(self, n: Size, k: int) -> list[tuple[tuple[Size, ...], str]]:
        return [((n, k), self.stored)]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        return bb.emit(relax.op.astype(given[0], self.dtype))

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        return arrays[0].astype(numpy_dtype(self.dtype))


@dataclass(frozen=True)
class ByChannel:
    """Integers of eight bits with a scale for each row: the operator `R.dequantize`."""

    dtype: str = "float16"
    layout: str = "nk"

    def shapes(self, n: int, k: int) -> list[tuple[tuple[int, ...], str]]:
        return [((n, k), "int8"), ((n,), self.dtype)]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: int, k: int):
        zero = relax.const(np.zeros(n, "int8"))
        return bb.emit(relax.op.dequantize(*given, zero, 0, self.dtype))

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        numbers, scales = arrays
        return numbers.astype(scales.dtype) * scales[:, None]


@dataclass(frozen=True)
class Bytes:
    """Numbers of a byte with a scale for each block, as MLC-LLM decodes them.

    `block` are rows and elements along k that share a scale, 0 for all of them.  With the word
    uint32, four numbers are packed in one.
    """

    number: str = "float8_e4m3fn"
    dtype: str = "float16"
    block: tuple[int, int] = (0, 0)
    scale: str = "float32"
    word: str = ""
    layout: str = "nk"

    @property
    def fields(self) -> int:
        return 4 if self.word else 1

    def scale_shape(self, n: Size, k: int) -> tuple[Size, ...]:
        rows, along = self.block
        if not rows and not along:
            return (1,)
        return (-(-n // rows) if rows else 1, -(-k // along) if along else 1)

    def shapes(self, n: Size, k: int) -> list[tuple[tuple[Size, ...], str]]:
        words = (n, -(-k // self.fields)), self.word or self.number
        return [words, (self.scale_shape(n, k), self.scale)]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        return bb.emit(bb.call_te(self._decoded, *given, n, k, primfunc_name_hint="dequantize"))

    def _decoded(self, words: te.Tensor, scales: te.Tensor, n: Size, k: int) -> te.Tensor:
        def number(j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
            if not self.word:
                return words[j, i].astype(self.dtype)
            shift = (i % 4 * 8).astype(self.word)
            byte = (words[j, i // 4] >> shift).astype("uint8") & tirx.const(255, "uint8")
            return tirx.reinterpret(self.number, byte).astype(self.dtype)

        def scaled(j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
            at = [p // b if b else 0 for p, b in zip((j, i), self.block, strict=True)]
            scale = scales[0] if not any(self.block) else scales[tuple(at)]
            return raw[j, i] * scale.astype(self.dtype)

        raw = te.compute((n, k), number, "number")
        return te.compute((n, k), scaled, "scaled")

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        """Return the weight as n x k, rounded at each step."""
        words, scales = arrays
        dtype = numpy_dtype(self.dtype)
        numbers = words.view("uint8").view(numpy_dtype(self.number))[:, :k].astype(dtype)
        scales = scales.astype(dtype).reshape(scales.shape if any(self.block) else (1, 1))
        for axis, size in enumerate(self.block):
            scales = scales.repeat(size or 1, axis)
        return numbers * scales[: len(words), :k]


@dataclass(frozen=True)
class ScaledCast:
    """The same for rows, with operators of Relax: a cast, and a product."""

    number: str = "int8"
    dtype: str = "float16"
    scale: str = "float16"
    layout: str = "nk"

    def shapes(self, n: Size, k: int) -> list[tuple[tuple[Size, ...], str]]:
        return [((n, k), self.number), ((n, 1), self.scale)]

    def emit(self, bb: relax.BlockBuilder, given: Sequence[relax.Var], n: Size, k: int):
        op, (numbers, scales) = relax.op, given
        wide = bb.emit(op.astype(numbers, self.scale))
        product = bb.emit(op.multiply(wide, scales))
        return product if self.scale == self.dtype else bb.emit(op.astype(product, self.dtype))

    def decoded(self, arrays: Sequence[np.ndarray], k: int) -> np.ndarray:
        numbers, scales = arrays
        return (numbers.astype(scales.dtype) * scales).astype(numpy_dtype(self.dtype))


FORMATS = {
    "q4f16_1": Groups(),
    "q4f16_0": Groups(layout="kn"),
    "q3f16_1": Groups(3, 40),
    "q3f16_0": Groups(3, 40, layout="kn"),
    "q8f16_1": Groups(8),
    "q4bf16_1": Groups(dtype="bfloat16"),
    "q4bf16_0": Groups(dtype="bfloat16", layout="kn"),
    "q4f32_1": Groups(dtype="float32"),
    "q4f16_autoawq": AWQ(),
    "e4m3_f16": Cast("float8_e4m3fn"),
    "e5m2_f16": Cast("float8_e5m2"),
    "f16_f32": Cast("float16", "float32"),
    "operators": Operators(),
    "codebook": Codebook(),
    "by_channel": ByChannel(),
    "e4m3_tensor": Bytes(),
    "e4m3_blocks": Bytes(block=(40, 48)),
    "e4m3_words": Bytes(word="uint32"),
    "e4m3_bf16_blocks": Bytes(dtype="bfloat16", block=(40, 48)),
    "e5m2_tensor": Bytes("float8_e5m2"),
    "e4m3_f32": Bytes(dtype="float32", block=(1, 0)),
    "int8_rows": ScaledCast(),
    "e4m3_rows": ScaledCast("float8_e4m3fn", scale="float32"),
}
"""By the names of MLC-LLM, where it has them."""
