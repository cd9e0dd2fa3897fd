"""Matmuls of bytes that a graph widens: as matmuls of bytes, zero points behind their sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from tvm import ir, relax, tirx

from ..matching.shapes import dtype_of, is_one, same_shape, shape_of
from ..transforms.modules import module_pass
from ..tvm_ir import GenericConst
from ..workload import INTEGER_DTYPES
from .rewriter import Rewriter, canonicalise

SUMS = "int32"
SIGN = 128
"""A uint8 less this is an int8."""

_MOVED = ("relax.astype", "relax.expand_dims", "relax.reshape")


@module_pass
class MultiplyBytes:
    """Multiply int8 and uint8 as they are, where a graph widens them to int32, as ONNX's importer.

    rewrite::

        a = R.subtract(R.astype(x, "int32"), zero)
        y = R.matmul(a, R.astype(w, "int32"), out_dtype="int32")
            ->
        s = R.multiply(zero, R.sum(R.astype(w, "int32"), axis=-2, keepdims=True))
        y = R.subtract(R.matmul(x, w, out_dtype="int32"), s)

    Sums are int32 and wrap around in both: they are the same.  Where x is of uint8 and w of int8,
    or the other way round, x is brought to the type of w by 128, which its zero point takes back.

    declines when:
        w has more than two axes, or features that are not known; a zero point differs between
        features that are added up.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, {"relax.matmul": _multiplied})


@dataclass(frozen=True)
class _Factor:
    """Bytes, and what is taken off each."""

    value: relax.Expr
    zero: relax.Expr | None = None

    @property
    def dtype(self) -> str:
        return dtype_of(self.value)


def _multiplied(rewriter: Rewriter, value: relax.Call | relax.TupleGetItem) -> relax.Expr | None:
    assert isinstance(value, relax.Call)
    factors = [_factor(rewriter, arg) for arg in value.args]
    x, w = factors
    if dtype_of(value) != SUMS or x is None or w is None:
        return None
    rows, weight = (shape_of(arg) or () for arg in value.args)
    if len(rows) < 2 or len(weight) != 2 or not isinstance(weight[0], tirx.IntImm):
        return None
    if not _is_even(x, -1) or not _is_even(w, -2):
        return None
    if x.dtype == w.dtype and x.value.same_as(value.args[0]) and w.value.same_as(value.args[1]):
        return None  # as it is to be
    x = x if x.dtype == w.dtype else _of_type(rewriter, x, w.dtype)
    product = rewriter.emit(relax.op.matmul(x.value, w.value, out_dtype=SUMS))
    terms = [(x.zero, w.value, -2), (w.zero, x.value, -1)]
    for zero, other, axis in terms:
        if zero is not None:
            taken = rewriter.emit(relax.op.multiply(zero, _sum(rewriter, other, axis)))
            product = rewriter.emit(relax.op.subtract(product, taken))
    if x.zero is None or w.zero is None:
        return product
    both = rewriter.emit(relax.op.multiply(x.zero, w.zero))
    k = relax.const(int(weight[0]), SUMS)
    return relax.op.add(product, rewriter.emit(relax.op.multiply(both, k)))


def _factor(rewriter: Rewriter, expr: relax.Expr) -> _Factor | None:
    """Read bytes that are widened, and what is subtracted from them then."""
    if dtype_of(expr) in INTEGER_DTYPES:
        return _Factor(expr)
    if dtype_of(expr) != SUMS:
        return None
    wide = rewriter.call(expr, "relax.astype")
    if wide is not None:
        return _Factor(wide.args[0]) if dtype_of(wide.args[0]) in INTEGER_DTYPES else None
    less = rewriter.call(expr, "relax.subtract")
    found = _factor(rewriter, less.args[0]) if less is not None else None
    if found is None or less is None:
        return None
    if found.zero is not None or not same_shape(shape_of(expr), shape_of(found.value)):
        return None
    constant = _constant(rewriter, less.args[1])
    nothing = constant is not None and not constant.any()
    return found if nothing else replace(found, zero=less.args[1])


def _constant(rewriter: Rewriter, expr: relax.Expr) -> np.ndarray | None:
    """Return the elements of a constant, in whatever shape and type."""
    found = rewriter.definition(expr)
    while rewriter.call(expr, *_MOVED) is not None:
        expr = found.args[0]
        found = rewriter.definition(expr)
    return found.value.numpy() if isinstance(found, GenericConst) else None


def _is_even(factor: _Factor, axis: int) -> bool:
    """Tell whether the same is taken off all elements along an axis."""
    shape = () if factor.zero is None else shape_of(factor.zero)
    return shape is not None and (len(shape) < -axis or is_one(shape[axis]))


def _of_type(rewriter: Rewriter, factor: _Factor, dtype: str) -> _Factor:
    """Return a factor whose bytes have the other sign."""
    shift = relax.const(-SIGN if dtype == "int8" else SIGN, SUMS)
    wide = rewriter.emit(relax.op.astype(factor.value, SUMS))
    moved = rewriter.emit(relax.op.astype(rewriter.emit(relax.op.add(wide, shift)), dtype))
    zero = shift if factor.zero is None else rewriter.emit(relax.op.add(factor.zero, shift))
    return _Factor(moved, zero)


def _sum(rewriter: Rewriter, value: relax.Expr, axis: int) -> relax.Expr:
    """Return the sums along an axis, which is kept; those of a constant as one."""
    known = rewriter.definition(value)
    if isinstance(known, GenericConst):
        array = known.value.numpy()
        return relax.const(array.sum(axis=axis, keepdims=True, dtype=SUMS), SUMS)
    wide = rewriter.emit(relax.op.astype(value, SUMS))
    return rewriter.emit(relax.op.sum(wide, axis, keepdims=True))
