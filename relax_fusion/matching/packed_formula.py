"""The formula of a decoded element: ``(field - zero) * scale``, in whatever types."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import ir, tirx

from ..tvm_ir import TensorLoad, structural_equal, structural_map
from ..workload import FLOAT_BYTES
from ..workload.formats import E2M1, EXPONENT, NUMBERS
from ..workload.reference import numpy_dtype
from .expressions import different, found_in, is_number, loads_of, numbers_of

_REINTERPRET = ir.Op.get("tirx.reinterpret")
_OF_FOUR_BITS = np.arange(16, dtype="uint8").view(numpy_dtype(E2M1)).astype("float32")
_FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Field:
    """Some bits of a word."""

    load: TensorLoad  # of the word
    shift: tuple[tirx.Expr, ...]  # by what it is shifted to the right
    bits: int  # how many are left, from the lowest on
    number: str  # what they are; an unsigned integer where it is empty (see `Packed`)


@dataclass(frozen=True)
class Formula:
    """What an element is: the smaller of a limit and ``(field - zero) * scale``.

    Casts between types that hold the numbers, or round them, are left out: kernels that read a
    format round once.
    """

    field: Field
    zero: Field | int
    scale: TensorLoad | None
    limit: float | None

    def loads(self) -> list[TensorLoad]:
        """Return the loads of words, scales and zeros, of those that there are."""
        found = [self.field.load]
        found += [] if self.scale is None else [self.scale]
        return [*found, self.zero.load] if isinstance(self.zero, Field) else found

    def same_as(self, other: Formula | None) -> bool:
        """Tell whether both are equal."""
        if other is None or self._numbers() != other._numbers():
            return False
        pairs = zip(self._parts(), other._parts(), strict=True)
        return all(structural_equal(a, b) for a, b in pairs)

    def _fields(self) -> list[Field]:
        return [self.field, self.zero] if isinstance(self.zero, Field) else [self.field]

    def _numbers(self) -> list[object]:
        zero = None if isinstance(self.zero, Field) else self.zero
        each = [(f.bits, f.number, len(f.shift)) for f in self._fields()]
        return [zero, self.limit, self.scale is None, *each]

    def _parts(self) -> list[tirx.Expr]:
        return [*self.loads(), *(shift for f in self._fields() for shift in f.shift)]


def formula_of(value: tirx.Expr) -> Formula | None:
    """Return the formula of an element; None if it is no such one."""
    value, limit = _unlimited(_uncast(value))
    scale: tirx.Expr | None = None
    if isinstance(value, tirx.Mul):
        sides = _uncast(value.a), _uncast(value.b)
        scales = [_scale(s) for s in sides]
        which = next((n for n, s in enumerate(scales) if s is not None), None)
        if which is not None:
            scale, value = scales[which], sides[1 - which]
    zero: Field | int | None = 0
    if isinstance(value, tirx.Sub):
        if str(value.ty.dtype) not in (*_FLOATS, "int32"):
            return None  # narrow or unsigned integers wrap around
        value, zero = _uncast(value.a), _zero(_uncast(value.b))
    field = _field(value)
    if field is None or zero is None:
        return None
    return Formula(field, zero, scale, limit)


def _scale(value: tirx.Expr) -> tirx.Expr | None:
    """Return the load of a scale: a float, or the exponent of a power of 2.

    The least byte may give 0 in the place of 2 ** -127, and the largest an infinity in that of NaN,
    as where a byte is shifted to the exponent of a float32.
    """
    if isinstance(value, TensorLoad) and str(value.ty.dtype) in _FLOATS:
        return value
    if not isinstance(value, ir.Call) or not value.op.same_as(_REINTERPRET):
        return None
    loads = different(loads_of(value))
    if str(value.ty.dtype) != "float32" or [str(v.ty.dtype) for v in loads] != [EXPONENT]:
        return None
    byte, numbers = tirx.Var("byte", EXPONENT), np.arange(256, dtype=EXPONENT)
    bits = structural_map(value.args[0], (TensorLoad, lambda _: byte))
    got = numbers_of(bits, byte, numbers)
    if got is None or got.dtype not in ("uint32", "int32"):
        return None
    powers, wanted = got.view("float32"), np.ldexp(np.float32(1), np.arange(-127, 128))
    ends = powers[0] in (0, wanted[0]) and not np.isfinite(powers[-1])
    return loads[0] if ends and np.array_equal(powers[1:-1], wanted[1:]) else None


def _unlimited(value: tirx.Expr) -> tuple[tirx.Expr, float | None]:
    """Return what is kept between a number and minus that, and the number."""
    if not isinstance(value, tirx.Max) or not isinstance(value.a, tirx.Min):
        return value, None
    high, low = value.a.b, value.b
    if not all(isinstance(v, tirx.FloatImm) for v in (high, low)):
        return value, None
    if not 0 < high.value == -low.value:
        return value, None
    return _uncast(value.a.a), float(high.value)


def _zero(value: tirx.Expr) -> Field | int | None:
    if isinstance(value, tirx.FloatImm | tirx.IntImm):
        return int(value.value) if float(value.value).is_integer() else None
    return _field(value)


def _uncast(value: tirx.Expr) -> tirx.Expr:
    """Return what is cast to a type of floats, or of integers that hold all that it may be.

    What narrows floats, and is cast back, stays: a kernel would keep what that drops.
    """
    widest = 0.0
    while isinstance(value, tirx.Cast):
        given, to = (str(v.ty.dtype) for v in (value.value, value))
        widest = max(widest, FLOAT_BYTES.get(to, 0))
        if FLOAT_BYTES.get(to, widest) < min(widest, FLOAT_BYTES.get(given, 0)):
            return value
        narrow = given in (*NUMBERS, *_FLOATS, "uint8", "uint16", "uint32", "int32")
        wider = given in ("int8", "uint8") and to == "int32"
        if not wider and not (to in _FLOATS and narrow):
            return value
        value = value.value
    return value


def _field(value: tirx.Expr) -> Field | None:
    """Return which bits of a word a number is."""
    dtype = str(value.ty.dtype)
    if isinstance(value, tirx.Mul | tirx.Select):
        return _e2m1(value)
    if isinstance(value, TensorLoad):
        number = dtype if dtype in NUMBERS else ""
        if not number and not dtype.startswith("uint"):
            return None
        return Field(value, (), tvm.DataType(dtype).bits, number)
    if isinstance(value, tirx.BitwiseAnd) and isinstance(value.b, tirx.IntImm):
        return _lowest(_field(value.a), int(value.b).bit_length(), int(value.b))
    if isinstance(value, tirx.RShift):
        found = _field(value.a)
        if found is None or found.number:
            return None
        shift = () if is_number(value.b, 0) else (_unwrapped(value.b),)
        left = found.bits - int(value.b) if isinstance(value.b, tirx.IntImm) else found.bits
        return replace(found, shift=(*found.shift, *shift), bits=left)
    if isinstance(value, tirx.Cast) and dtype in ("uint8", "int8"):
        found = _lowest(_field(value.value), 8, 255)
        return replace(found, number="int8") if found and dtype == "int8" else found
    if isinstance(value, ir.Call) and value.op.same_as(_REINTERPRET) and dtype in NUMBERS:
        found = _field(value.args[0])
        of_byte = found is not None and not found.number and found.bits == 8
        return replace(found, number=dtype) if found and of_byte else None
    return None


def _e2m1(value: tirx.Expr) -> Field | None:
    """Return the 4 bits that a formula makes their number of: it does so of each of the 16."""
    found: list[Field] = []
    bits = tirx.Var("bits", "int32")

    def replaced(node: tirx.Expr) -> tirx.Expr:
        field = _field(node)
        if field is None or field.number or field.bits != 4:
            return node
        found.append(field)
        return tirx.Cast(node.ty.dtype, bits)

    formula = structural_map(value, (tirx.BitwiseAnd, replaced))
    alike = all(structural_equal(found[0].load, f.load) for f in found)
    alike = alike and len({tuple(map(str, f.shift)) for f in found}) == 1
    if not alike or found_in(formula, TensorLoad):
        return None
    with np.errstate(all="ignore"):
        got = numbers_of(formula, bits, np.arange(16, dtype="int32"))
    is_e2m1 = got is not None and np.array_equal(got, _OF_FOUR_BITS)
    return replace(found[0], number=E2M1) if is_e2m1 else None


def _lowest(field: Field | None, bits: int, mask: int) -> Field | None:
    if field is None or field.number or mask != 2**bits - 1:
        return None
    return replace(field, bits=min(bits, field.bits))


def _unwrapped(value: tirx.Expr) -> tirx.Expr:
    """Return a constant as an integer of one type, others as they are."""
    return tirx.const(int(value), "int64") if isinstance(value, tirx.IntImm) else value
