"""Casts to and from bfloat16 and 8-bit floats, where TVM computes in float32 instead.

TVM 0.27 has no such numbers on a CPU, and none of 8 bits on most GPUs.  It drops a cast to one
whose result is read and not stored, reads 8-bit zero as 2^-7 (the other subnormal numbers are wrong
too), writes what is too large for 8 bits as something small, and refuses to vectorise a store of 8
bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx
from tvm.target import Target

from ..compute.stages import as_stored
from ..hardware.nvidia import has_float8
from ..hardware.target import compute_capability, is_cpu, is_cuda
from ..transforms.modules import module_pass, with_functions
from ..tvm_ir import SBlock, TensorLoad, structural_map, structural_walk


@dataclass(frozen=True)
class _Float8:
    """A format of a sign, an exponent, and `mantissa` bits."""

    mantissa: int
    bias: int
    overflow: int
    """Numbers that are too large become this: infinity, or NaN where there is none."""
    nan: int

    def decoded(self, byte: tirx.Expr, *, named: bool) -> tirx.Expr:
        """Return the number of a uint8 as float32; `named` if its bits may be bound to a name."""
        bits = tirx.Var("code", "uint32") if named else byte.astype("uint32")
        size = bits & _bits(0x7F)
        tiny = size.astype("float32") * tirx.const(
            2.0 ** (1 - self.bias - self.mantissa), "float32"
        )
        normal = (size << _bits(23 - self.mantissa)) + _bits((127 - self.bias) << 23)
        is_tiny = size < _bits(2**self.mantissa)
        value = tirx.Select(is_tiny, tirx.reinterpret("uint32", tiny), normal)
        if self.overflow != self.nan:
            value = tirx.Select(size == _bits(self.overflow), _bits(0x7F800000), value)
        value = tirx.Select(size > _bits(self._last), _bits(0x7FC00000), value)
        signed = tirx.reinterpret("float32", value | ((bits & _bits(0x80)) << _bits(24)))
        return tirx.Let(bits, byte.astype("uint32"), signed) if named else signed

    def encoded(self, value: tirx.Expr, *, named: bool) -> tirx.Expr:
        """Return the uint8 of a float32, rounded to the nearest, ties to even."""
        given, shift = tirx.reinterpret("uint32", value), 23 - self.mantissa
        bits = tirx.Var("bits", "uint32") if named else given
        size = bits & _bits(0x7FFFFFFF)
        odd = (size >> _bits(shift)) & _bits(1)
        normal = (size + _bits(2 ** (shift - 1) - 1) + odd) >> _bits(shift)
        normal = tirx.min(normal - _bits((127 - self.bias) << self.mantissa), _bits(self.overflow))
        # The last bit of such a float32 is worth as much as that of a subnormal number.
        exponent = 24 - self.bias - self.mantissa
        unit = tirx.const(2.0**exponent, "float32")
        tiny = tirx.reinterpret("uint32", tirx.reinterpret("float32", size) + unit)
        tiny = tiny - _bits((127 + exponent) << 23)
        code = tirx.Select(size < _bits((128 - self.bias) << 23), tiny, normal)
        code = tirx.Select(size > _bits(0x7F800000), _bits(self.nan), code)
        signed = (code | ((bits >> _bits(24)) & _bits(0x80))).astype("uint8")
        return tirx.Let(bits, given, signed) if named else signed

    @property
    def _last(self) -> int:
        """The code of the largest number, or of infinity."""
        return self.overflow if self.overflow != self.nan else self.nan - 1


_FLOAT8 = {
    "float8_e4m3fn": _Float8(3, 7, overflow=0x7F, nan=0x7F),
    "float8_e5m2": _Float8(2, 15, overflow=0x7C, nan=0x7E),
}
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Min, tirx.Max)
_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


@module_pass
class RoundNarrowFloats:
    """Round to bfloat16 on CPUs, and to 8 bits wherever TVM would, and read 8 bits exactly.

    rewrite::

        y = T.float32(T.bfloat16(x))    ->    y = T.reinterpret("float32", ...)    # of x's bits
        y = T.float32(w)    # 8 bits    ->    y = ...    # of w's bits

    Arithmetic on 8 bits is done in float32 and rounded after each step.  That on bfloat16 is done
    in float32 within a function, and rounded where it is stored, as by TVM.
    """

    target: Target | None = None
    """Of functions that name none; without it, all are taken for functions for a CPU."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite the PrimFuncs of `mod`; one without such numbers stays the same object."""
        updated = {}
        for gvar, func in mod.functions_items():
            target = self.target and (func.attrs or {}).get("target", self.target)
            if isinstance(func, tirx.PrimFunc) and not (target and _has_float8(target)):
                rounding = _Rounding(func, bfloat16=target is None or is_cpu(target))
                body = structural_map(func.body, rounding.rewrites)
                if not body.same_as(func.body):
                    updated[gvar] = func.with_body(body)
        return with_functions(mod, updated)


class _Rounding:
    """Rewrites one function, from the leaves on.

    TVM makes float32 of 8-bit buffers within a function, now and then: here they become bytes.  So
    an 8-bit value is a load from a parameter, or reinterprets a byte.
    """

    def __init__(self, func: tirx.PrimFunc, *, bfloat16: bool) -> None:
        self.params, self.bfloat16 = set(func.params), bfloat16
        self.bytes: dict[tirx.Var, tirx.Var] = {}
        self.named = True
        kinds = (tirx.Cast, TensorLoad, tirx.FloatImm)
        structural_walk(func.body, (kinds, self._find_bfloat16))
        structural_walk(func.body, (SBlock, self._find_buffers))
        self.rewrites = (
            (ir.Var, lambda var: self.bytes.get(var, var)),
            (TensorLoad, self._load),
            (tirx.Cast, self._cast),
            ((*_ARITHMETIC, *_COMPARISONS), self._binary),
            (tirx.Select, self._select),
            (ir.Call, self._call),
            (tirx.BufferStore, self._store),
        )

    def _find_bfloat16(self, value: tirx.Expr) -> None:
        """Bind nothing to names: TVM 0.27 legalises no bfloat16 in what is bound."""
        self.named = self.named and _dtype(value) != "bfloat16"

    def _find_buffers(self, block: SBlock) -> None:
        for old in block.alloc_buffers:
            if str(old.dtype) in _FLOAT8:
                scope = old.scope()
                self.bytes[old] = tirx.decl_buffer(old.shape, "uint8", old.name, scope=scope)

    def _load(self, load: TensorLoad) -> tirx.Expr:
        dtype = _dtype(load)
        if dtype not in _FLOAT8 or load.source in self.params:
            return load
        return tirx.reinterpret(dtype, tirx.BufferLoad(load.source, load.indices))

    def _cast(self, cast: tirx.Cast) -> tirx.Expr:
        value, dtype = self._rounded(cast.value), _dtype(cast)
        if dtype in _FLOAT8:
            return self._encoded(value.astype("float32"), dtype)
        return cast if value.same_as(cast.value) else value.astype(dtype)

    def _binary(self, node: tirx.Expr) -> tirx.Expr:
        a, b = self._rounded(node.a), self._rounded(node.b)
        if a.same_as(node.a) and b.same_as(node.b):
            return node
        return self._as(_dtype(node), type(node)(a, b))

    def _select(self, node: tirx.Select) -> tirx.Expr:
        chosen = self._rounded(node.true_value), self._rounded(node.false_value)
        if chosen[0].same_as(node.true_value) and chosen[1].same_as(node.false_value):
            return node
        return self._as(_dtype(node), tirx.Select(node.condition, *chosen))

    def _call(self, call: ir.Call) -> tirx.Expr:
        """Rewrite a function of numbers; what takes their bits or their address stays."""
        if _is_bits(call) or not all(isinstance(e.ty, ir.PrimType) for e in (call, *call.args)):
            return call
        args = [self._rounded(arg) for arg in call.args]
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=True)):
            return call
        dtype = _dtype(call)
        wide = "float32" if dtype in _FLOAT8 else dtype
        return self._as(dtype, tirx.call_intrin(wide, call.op, *args))

    def _store(self, store: tirx.BufferStore) -> tirx.Stmt:
        dtype, value = _dtype(store.value), store.value
        handed = store.buffer in self.params
        if dtype in _FLOAT8:
            value = value if _is_bits(value) else self._encoded(self._rounded(value), dtype)
            value = value if handed else value.args[0]
        else:
            value = self._rounded(value)
        if value.same_as(store.value):
            return store
        return tirx.BufferStore(store.buffer, value, store.indices, store.span)

    def _encoded(self, value: tirx.Expr, dtype: str) -> tirx.Expr:
        return tirx.reinterpret(dtype, _FLOAT8[dtype].encoded(value, named=self.named))

    def _as(self, dtype: str, value: tirx.Expr) -> tirx.Expr:
        return self._encoded(value, dtype) if dtype in _FLOAT8 else value

    def _rounded(self, value: tirx.Expr) -> tirx.Expr:
        """Return an 8-bit number as float32, and one that was cast to bfloat16 rounded."""
        dtype = _dtype(value)
        if self.bfloat16 and dtype == "bfloat16" and isinstance(value, tirx.Cast):
            return as_stored(value.value.astype("float32"), dtype).astype(dtype)
        if dtype not in _FLOAT8:
            return value
        if isinstance(value, tirx.FloatImm):
            return tirx.const(value.value, "float32")
        if _is_bits(value):
            return _FLOAT8[dtype].decoded(value.args[0], named=self.named)
        return _FLOAT8[dtype].decoded(tirx.reinterpret("uint8", value), named=self.named)


def _has_float8(target: Target) -> bool:
    return is_cuda(target) and has_float8(compute_capability(target))


def _bits(number: int) -> tirx.Expr:
    return tirx.const(number, "uint32")


def _dtype(value: tirx.Expr) -> str:
    return str(value.ty.dtype) if isinstance(value.ty, ir.PrimType) else ""


def _is_bits(value: tirx.Expr) -> bool:
    return isinstance(value, ir.Call) and value.op.same_as(ir.Op.get("tirx.reinterpret"))
