"""Numbers of a byte, which become two float16 in one register: e4m3, e5m2, int8 and uint8.

All of them are numbers of float16.  An integer becomes one as in `dequantised`: it is put into the
lowest bits of 1024, which is taken from it.  An e5m2 is the upper half of a float16.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from ...tvm_ir import T, structural_equal
from ...workload.formats import NUMBERS
from .dequantise import field_of
from .fragments import ptx, scratch
from .tile import uint32

_REINTERPRET = ir.Op.get("tirx.reinterpret")

BYTES = ("uint8", *NUMBERS)
"""Types of which a register holds four."""


@dataclass(frozen=True)
class Byte:
    """A byte of a word, counted from the lowest on, which is made a wider number."""

    cast: tirx.Cast
    dtype: str
    word: tirx.Expr
    place: int

    @staticmethod
    def of(cast: tirx.Cast) -> Byte | None:
        """Return the byte that is made a floating-point number; None if that is not what it is."""
        inner, dtype = cast.value, str(cast.value.ty.dtype)
        if dtype not in BYTES or "float" not in str(cast.ty.dtype):
            return None
        if isinstance(inner, ir.Call) and inner.op.same_as(_REINTERPRET):
            inner = inner.args[0]
        bits = field_of(inner.value) if isinstance(inner, tirx.Cast) else None
        if bits is None or bits.mask != 255 or not isinstance(bits.shift, tirx.IntImm):
            return None
        place, rest = divmod(int(bits.shift), 8)
        return None if rest else Byte(cast, dtype, bits.word, place)

    @staticmethod
    def at(dtype: str, word: tirx.Expr, place: int) -> tirx.Expr:
        """Return a byte of a word as what it is."""
        bits = (word >> tirx.const(8 * place, "uint32")) & tirx.const(255, "uint32")
        byte = bits.astype("uint8")
        return byte if dtype == "uint8" else tirx.reinterpret(dtype, byte)

    def is_before(self, other: Byte) -> bool:
        """Tell whether both are an even byte of a word and the next one, of one type."""
        same = self.dtype == other.dtype and structural_equal(self.word, other.word)
        return same and self.place % 2 == 0 and other.place == self.place + 1


def halves_of(low: Byte, float8: bool) -> tirx.Expr | None:
    """Return a register with an even byte of a word and the next one as float16, exactly.

    None where they are e4m3, and the device has no instructions for those.
    """
    if low.dtype == "float8_e4m3fn":
        if not float8:
            return None
        pair = (low.word >> uint32(8 * low.place)).astype("uint16")
        return _made("cvt.rn.f16x2.e4m3x2", pair)
    if low.dtype == "float8_e5m2":
        return _made("prmt.b32", low.word, uint32(0), uint32((0x1404, 0x3424)[low.place // 2]))
    sign = 0x80 if low.dtype == "int8" else 0
    word = low.word ^ uint32(sign * 0x01010101) if sign else low.word
    based = _made("prmt.b32", word, uint32(0x64), uint32((0x4140, 0x4342)[low.place // 2]))
    less = 0xE480 if sign else 0xE400  # -1152 or -1024
    return _made("fma.rn.f16x2", based, uint32(0x3C003C00), uint32(less * 0x10001))


def _made(instruction: str, *operands: tirx.Expr) -> tirx.Expr:
    target = scratch("numbers", 1, "uint32", "local")
    T.evaluate(ptx[instruction](target[0], *operands))
    return target[0]
