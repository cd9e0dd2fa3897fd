"""NaN and infinities in comparisons, maxima and minima, where TVM's own legalisation loses them.

TVM's maximum of NaN and a number is the number, and so are those of a whole axis, which begin at
the least finite number; `x != x` is false.  As PyTorch has it, NaN is more than all numbers where a
maximum is asked for, and less where a minimum is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import ir, relax, te, tirx, topi
from tvm.relax.transform.legalize_ops.common import _try_convert_to_scalar_const

from ..compute.activations import clipped
from ..matching.shapes import shape_of

REDUCTION = 3
"""TVM's kind of an operator that is computed together with what it reads."""

LONG, FEW, MOST_PARTS = 8192, 64, 512
"""An axis of so many elements is searched in parts, of so few rows, in as many parts of all rows at
most: each is a block of threads of a GPU."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def by_tvm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalise an operator as TVM does."""
    return ir.Op.get(call.op.name).get_attr("FLegalize")(bb, call)


def _dtype(value: relax.Expr) -> str:
    return str(value.ty.dtype)


def _wide(x: tirx.Expr) -> tirx.Expr:
    """Return a number as one of those whose bits TVM looks at."""
    return x if str(x.ty.dtype) == "float64" else x.astype("float32")


def _is_nan(x: tirx.Expr) -> tirx.Expr:
    return tirx.isnan(_wide(x))


# --- element by element -----------------------------------------------------------------------


def _extreme(beyond: Callable[[Any, Any], Any], bb: relax.BlockBuilder, call: relax.Call) -> Any:
    """Legalise the larger, or the smaller, of two numbers."""
    if _dtype(call) not in _FLOATS or not isinstance(call.ty.shape, relax.ShapeExpr):
        return by_tvm(bb, call)
    name = call.op.name.rsplit(".", 1)[-1]

    def choose(a: Any, b: Any, shape: list[tirx.Expr]) -> te.Tensor:
        def element(*at: Any) -> Any:
            x, y = _element(a, at), _element(b, at)
            return tirx.Select(tirx.any(_is_nan(x), beyond(x, y)), x, y)

        return te.compute(shape, element, name)

    operands = map(_try_convert_to_scalar_const, call.args)
    return bb.call_te(choose, *operands, call.ty.shape, primfunc_name_hint=name)


def _element(x: Any, at: Sequence[Any]) -> Any:
    """Return the element that a tensor, or a number, has at a place of what it is broadcast to."""
    if not isinstance(x, te.Tensor):
        return x
    inner = at[len(at) - len(x.shape) :]
    alone = [isinstance(n, tirx.IntImm) and int(n) == 1 for n in x.shape]
    return x(*(0 if one else i for one, i in zip(alone, inner, strict=True)))


def _relu(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if _dtype(call) not in _FLOATS:
        return by_tvm(bb, call)
    return bb.call_te(_clipped, call.args[0], 0.0, math.inf, primfunc_name_hint="relu")


def _clip(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, *ends = call.args
    low, high = (getattr(end, "value", None) for end in ends)
    if low is None or high is None:
        return by_tvm(bb, call)
    return bb.call_te(_clipped, x, low, high, primfunc_name_hint="clip")


def _clipped(x: te.Tensor, low: float, high: float) -> te.Tensor:
    """Return a tensor between two ends, which may be infinite."""
    dtype = str(x.dtype)
    if dtype not in _FLOATS:  # the importer asks for integers between infinities
        low = max(low, tirx.min_value(dtype).value)
        high = min(high, tirx.max_value(dtype).value)

    return te.compute(x.shape, lambda *at: clipped(x(*at), low, high), "clip")


def _of_itself(
    formula: Callable[[te.Tensor], te.Tensor], bb: relax.BlockBuilder, call: relax.Call
) -> relax.Expr:
    """Legalise what is computed of a number and itself, where TVM thinks of finite ones."""
    a, b = call.args
    if not a.same_as(b) or _dtype(a) not in _FLOATS:
        return by_tvm(bb, call)
    return bb.call_te(formula, a, primfunc_name_hint=call.op.name.rsplit(".", 1)[-1])


def _is_number(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *at: tirx.Not(_is_nan(x(*at))), "is_number")


def _is_none(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *at: _is_nan(x(*at)), "is_nan")


def _product(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalise a product; TVM's of anything and the constant zero is zero."""
    factors = [_try_convert_to_scalar_const(arg) for arg in call.args]
    zeros = [isinstance(f, tirx.FloatImm) and f.value == 0 for f in factors]
    if zeros not in ([True, False], [False, True]):
        return by_tvm(bb, call)
    return bb.call_te(_zeros, call.args[zeros.index(False)], primfunc_name_hint="zeros")


def _zeros(x: te.Tensor) -> te.Tensor:
    """Return zero for a finite number, and NaN for another."""
    zero, nan = (tirx.const(value, str(x.dtype)) for value in (0.0, math.nan))

    def element(*at: Any) -> Any:
        return tirx.Select(tirx.isfinite(_wide(x(*at))), zero, nan)

    return te.compute(x.shape, element, "zeros")


# --- of an axis, or a window ------------------------------------------------------------------


def _key(x: tirx.Expr, largest: bool) -> tirx.Expr:
    """Return an integer that is larger, where a number is larger; that of NaN is beyond all others.

    Bits of floats, taken for integers, are in order but for the sign.  Every schedule knows what
    the maximum of integers is, on every device.
    """
    dtype = str(x.ty.dtype)
    if dtype not in _FLOATS:
        return x.astype("int64")
    size, infinity = _bits_of(dtype)
    nan = infinity | infinity >> 1
    unusual = tirx.const(nan if largest else -nan, f"int{size}")
    # as integers: loops that ask floats for NaN take twice the time
    named = tirx.Var("number", f"float{size}")  # so that what is fused here is computed once
    given = _wide(x) if dtype == "bfloat16" else named
    bits, code = (tirx.reinterpret(f"{kind}{size}", given) for kind in ("int", "uint"))
    magnitude = code & tirx.const((1 << (size - 1)) - 1, f"uint{size}")
    is_nan = magnitude > tirx.const(infinity, f"uint{size}")
    key = tirx.Select(is_nan, unusual, _mirrored(bits))
    return key if dtype == "bfloat16" else tirx.Let(named, _wide(x), key)


def _mirrored(bits: tirx.Expr) -> tirx.Expr:
    """Return a sign and a magnitude as an integer, or an integer as these."""
    whole = str(bits.ty.dtype)
    sign = bits >> tirx.const(int(whole.removeprefix("int")) - 1, whole)
    return (bits ^ (sign & tirx.max_value(whole))) - sign


def _bits_of(dtype: str) -> tuple[int, int]:
    """Return how many bits a float has as a key, and those of infinity."""
    return (64, 0x7FF << 52) if dtype == "float64" else (32, 0xFF << 23)


def _number(key: tirx.Expr, dtype: str, largest: bool) -> tirx.Expr:
    """Undo `_key`; of no numbers at all the largest is minus infinity."""
    size, infinity = _bits_of(dtype)
    last = tirx.const(-infinity if largest else infinity, f"int{size}")
    found = tirx.max(key, last) if largest else tirx.min(key, last)
    return tirx.reinterpret(f"float{size}", _mirrored(found)).astype(dtype)


def keys_of(x: te.Tensor, largest: bool = True) -> te.Tensor:
    """Return integers in the order of numbers, NaN at the end that is asked for."""
    return te.compute(x.shape, lambda *at: _key(x(*at), largest), "keys")


def _by_keys(
    find: Callable[[te.Tensor], te.Tensor],
    largest: bool,
    bb: relax.BlockBuilder,
    call: relax.Call,
    **attrs: int,
) -> relax.Expr:
    """Legalise what finds one of several numbers."""

    def found(x: te.Tensor) -> te.Tensor:
        key = find(keys_of(x, largest))
        return te.compute(key.shape, lambda *at: _number(key(*at), str(x.dtype), largest), "found")

    how = {"primfunc_name_hint": call.op.name.rsplit(".", 1)[-1], "primfunc_attrs": attrs or None}
    return bb.call_te(found, call.args[0], **how)


def _reduced(largest: bool, bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if _dtype(call) not in _FLOATS:
        return by_tvm(bb, call)
    reduce, attrs = (topi.max if largest else topi.min), call.attrs
    find = partial(reduce, axis=attrs.axis, keepdims=attrs.keepdims)
    return _by_keys(find, largest, bb, call, op_pattern=REDUCTION)


def _place(largest: bool, bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalise where the largest, or the smallest, element is; TVM's may be -1 for integers.

    A long axis of few rows, such as a vocabulary, is searched in parts, or one block of a GPU would
    read all of it.
    """
    x, axis, keepdims = call.args[0], call.attrs.axis, call.attrs.keepdims
    find = topi.argmax if largest else topi.argmin
    name = call.op.name.rsplit(".", 1)[-1]
    parts, size = _parts_of(x, axis)

    def place(keys: te.Tensor, axis: Any, keepdims: bool) -> te.Tensor:
        found = find(keys, axis, keepdims)
        zero = tirx.const(0, str(found.dtype))
        return te.compute(found.shape, lambda *at: tirx.max(found(*at), zero), "place")

    def whole(x: te.Tensor) -> te.Tensor:
        if not x.shape:
            return topi.full((), "int64", 0)
        return place(keys_of(x, largest), axis, keepdims)

    def of_parts(x: te.Tensor) -> te.Tensor:
        def key(*at: tirx.Expr) -> tirx.Expr:
            *row, part, i = at
            return _key(x(*row, part * size + i), largest)

        sizes = (tirx.IntImm("int64", n) for n in (parts, size))
        return place(te.compute([*x.shape[:-1], *sizes], key, "keys"), -1, False)

    def of_best(x: te.Tensor, best: te.Tensor) -> te.Tensor:
        def key(*at: tirx.Expr) -> tirx.Expr:
            return _key(x(*at[:-1], at[-1] * size + best(*at)), largest)

        def element(*at: tirx.Expr) -> tirx.Expr:
            return part(*at) * size + best(*at[: len(x.shape) - 1], part(*at))

        part = place(te.compute(best.shape, key, "keys"), -1, keepdims)
        return te.compute(part.shape, element, "element")

    if parts == 1:
        return bb.call_te(whole, x, primfunc_name_hint=name)
    best = bb.emit(bb.call_te(of_parts, x, primfunc_name_hint=f"{name}_of_parts"))
    return bb.call_te(of_best, x, best, primfunc_name_hint=name)


def _parts_of(x: relax.Expr, axis: Any) -> tuple[int, int]:
    """Return in how many parts an axis is searched, and their size."""
    shape = [int(n) for n in shape_of(x) or () if isinstance(n, tirx.IntImm)]
    if axis is None or len(shape) != x.ty.ndim or int(axis) % x.ty.ndim != x.ty.ndim - 1:
        return 1, 0
    *rows, n = shape
    count = math.prod(rows)
    if n < LONG or not 0 < count <= FEW:
        return 1, n
    parts = next(parts for parts in range(MOST_PARTS // count, 0, -1) if n % parts == 0)
    return parts, n // parts


def _pooled(pool: Callable[..., te.Tensor], bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    if _dtype(call) not in _FLOATS or attrs.out_layout != attrs.layout:
        return by_tvm(bb, call)
    sizes = (attrs.pool_size, attrs.strides, attrs.dilation, attrs.padding)

    def find(keys: te.Tensor) -> te.Tensor:
        return pool(keys, *sizes, "max", ceil_mode=attrs.ceil_mode, layout=attrs.layout)

    return _by_keys(find, True, bb, call)


LEGALIZE_MAP: dict[str, Callable[..., Any]] = {
    "relax.isnan": lambda bb, call: bb.call_te(_is_none, call.args[0], primfunc_name_hint="isnan"),
    "relax.nn.relu": _relu,
    "relax.clip": _clip,
    "relax.maximum": partial(_extreme, operator.gt),
    "relax.minimum": partial(_extreme, operator.lt),
    "relax.multiply": _product,
    "relax.subtract": partial(_of_itself, _zeros),
    "relax.not_equal": partial(_of_itself, _is_none),
    "relax.equal": partial(_of_itself, _is_number),
    "relax.less_equal": partial(_of_itself, _is_number),
    "relax.greater_equal": partial(_of_itself, _is_number),
    "relax.max": partial(_reduced, True),
    "relax.min": partial(_reduced, False),
    "relax.argmax": partial(_place, True),
    "relax.argmin": partial(_place, False),
    "relax.nn.max_pool1d": partial(_pooled, topi.nn.pool1d),
    "relax.nn.max_pool2d": partial(_pooled, topi.nn.pool2d),
    "relax.nn.max_pool3d": partial(_pooled, topi.nn.pool3d),
}
