"""Norms and activations that are written out, as the operators that they are."""

from __future__ import annotations

from functools import partial

import numpy as np
from tvm import ir, relax, tirx

from ..matching.activations import activation
from ..matching.constants import binary, is_filled, scalar, squared
from ..matching.shapes import dtype_of, is_one, same_shape, shape_of
from ..transforms.modules import module_pass
from ..tvm_ir import structural_equal
from ..workload import FLOAT_BYTES
from .rewriter import Rewriter, Rule, canonicalise, same_type

_NORMS = ("relax.nn.rms_norm", "relax.nn.layer_norm")

_ACTIVATIONS = {
    "gelu": relax.op.nn.gelu,
    "gelu_tanh": relax.op.nn.gelu_tanh,
    "relu": relax.op.nn.relu,
    "silu": relax.op.nn.silu,
}


@module_pass
class RecogniseOperators:
    """Put operators in the place of norms and activations that are written out.

    rewrite::

        m = R.mean(R.multiply(x, x), axis=[-1], keepdims=True)     # or power, or square
        h = R.multiply(x, R.rsqrt(R.add(m, eps)))                  # or by sqrt and divide
        y = R.multiply(h, g)                                       # optional
            ->
        y = R.nn.rms_norm(x, g, axes=[-1], epsilon=eps)            # ones for no g

        c = R.subtract(x, R.mean(x, axis=[-1], keepdims=True))     # the same of c: LayerNorm
            ->
        y = R.nn.layer_norm(x, g, b, axes=[-1], epsilon=eps)

        x32 = R.astype(x, "float32")                               # a norm of x32
        y = R.multiply(R.astype(h, "float16"), g)                  # or gamma in front of the cast
            ->
        y = R.nn.rms_norm(x, g, axes=[-1], epsilon=eps)

        y = R.astype(x32, "float32")                               # of what is float32
            ->
        y = x32

        a = R.multiply(x, R.sigmoid(x))                            # and both forms of GELU, ReLU
            ->
        a = R.nn.silu(x)

    declines when:
        the mean is over another axis than the last; gamma or beta is no vector along it; the
        features are dynamic or float64, or there are no rows; something writes to a tensor in
        between.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, OPERATORS)


def _product(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read ``x * 1 / sqrt(mean(x^2) + eps)``, a norm times gamma, or an activation."""
    for data, factor in (call.args, call.args[::-1]):
        root = _inverse_root(rewriter, factor)
        made = _normalised(rewriter, data, root) if root is not None else None
        made = _times_gamma(rewriter, data, factor) if made is None else made
        if made is not None and same_type(rewriter.builder.normalize(made), call):
            return made
    return _activated(rewriter, call)


def _quotient(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read ``x / sqrt(mean(x^2) + eps)``."""
    root = rewriter.call(call.args[1], "relax.sqrt")
    made = _normalised(rewriter, call.args[0], root.args[0]) if root is not None else None
    return made if made is not None and same_type(rewriter.builder.normalize(made), call) else None


def _inverse_root(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Return what ``rsqrt(v)``, ``1 / sqrt(v)`` or ``v ** -0.5`` is of."""
    root = rewriter.call(expr, "relax.rsqrt")
    if root is not None:
        return root.args[0]
    quotient = rewriter.call(expr, "relax.divide")
    if quotient is not None and scalar(rewriter, quotient.args[0]) == 1.0:
        root = rewriter.call(quotient.args[1], "relax.sqrt")
        return root.args[0] if root is not None else None
    power = rewriter.call(expr, "relax.power")
    if power is not None and scalar(rewriter, power.args[1]) == -0.5:
        return power.args[0]
    return None


def _normalised(rewriter: Rewriter, data: relax.Expr, root: relax.Expr) -> relax.Expr | None:
    """Return the norm of which `data` is normalised by the root of ``mean(data^2) + eps``."""
    *rows, width = shape_of(data) or (None,)
    dtype = dtype_of(data)
    if not rows or not isinstance(width, tirx.IntImm) or dtype not in FLOAT_BYTES:
        return None  # TVM has no kernel that normalises a vector
    if dtype == "float64":
        return None  # TVM's norms compute in float32
    ones, zeros = (_filled(value, int(width), dtype) for value in (1.0, 0.0))
    for mean, added in binary(rewriter, root, "relax.add"):
        eps, square = scalar(rewriter, added), _mean_of(rewriter, mean)
        alike = partial(_same, rewriter)
        base = None if square is None else squared(rewriter, square, alike)
        if eps is None or base is None or not alike(base, data):
            continue
        attrs, whole = {"axes": [-1], "epsilon": eps}, _centred(rewriter, data)
        if whole is not None:
            return relax.op.nn.layer_norm(whole, ones, zeros, **attrs)
        return relax.op.nn.rms_norm(data, ones, **attrs)
    return None


def _centred(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Return what `expr` is without its mean."""
    call = rewriter.call(expr, "relax.subtract")
    mean = _mean_of(rewriter, call.args[1]) if call is not None else None
    if call is None or mean is None or not _same(rewriter, mean, call.args[0]):
        return None
    return call.args[0]


def _mean_of(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Return what is averaged over its last axis, which is kept as one of size 1."""
    mean = rewriter.call(expr, "relax.mean")
    if mean is None or not mean.attrs.keepdims or mean.attrs.axis is None:
        return None
    rank = len(shape_of(mean.args[0]) or ())
    return mean.args[0] if [int(a) % rank for a in mean.attrs.axis] == [rank - 1] else None


def _same(rewriter: Rewriter, a: relax.Expr, b: relax.Expr, depth: int = 3) -> bool:
    """Tell whether two values are computed alike, of the same tensors."""
    if a.same_as(b):
        return True
    first, second = rewriter.definition(a), rewriter.definition(b)
    if not depth or not isinstance(first, relax.Call) or not isinstance(second, relax.Call):
        return False
    if not isinstance(first.op, ir.Op) or not first.op.same_as(second.op):
        return False
    if not structural_equal(first.attrs, second.attrs) or len(first.args) != len(second.args):
        return False
    pairs = zip(first.args, second.args, strict=True)
    return all(_same(rewriter, x, y, depth - 1) for x, y in pairs)


def _times_gamma(rewriter: Rewriter, data: relax.Expr, gamma: relax.Expr) -> relax.Expr | None:
    """Return the norm that `data` is, with its gamma, in front of a cast or behind it."""
    cast = rewriter.call(data, "relax.astype")
    norm = rewriter.call(cast.args[0] if cast is not None else data, *_NORMS)
    if norm is None or not is_filled(norm.args[1], 1.0):
        return None
    if not all(is_filled(beta, 0.0) for beta in norm.args[2:]):
        return None  # it is multiplied, too
    row = _vector(rewriter, gamma, norm.args[1])
    if row is None:
        return None
    if cast is not None:
        row = rewriter.emit(relax.op.astype(row, dtype_of(norm)))
    made = _with(norm, [norm.args[0], row, *norm.args[2:]])
    if cast is None:
        return made
    return relax.op.astype(rewriter.emit(made), dtype_of(data))


def _sum(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read LayerNorm plus beta."""
    for data, other in (call.args, call.args[::-1]):
        norm = rewriter.call(data, "relax.nn.layer_norm")
        if norm is None or not is_filled(norm.args[2], 0.0):
            continue
        row = _vector(rewriter, other, norm.args[2])
        if row is not None:
            return _with(norm, [*norm.args[:2], row])
    return None


def _cast(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Drop a cast to the same dtype; compute in its dtype what was widened for a norm only."""
    source, dtype = call.args[0], dtype_of(call)
    if dtype_of(source) == dtype:
        return source
    norm = rewriter.call(source, *_NORMS)
    if norm is None or dtype_of(norm) != "float32" or dtype not in ("float16", "bfloat16"):
        return None
    args = [_narrow(rewriter, arg, dtype) for arg in norm.args]
    return _with(norm, args) if all(arg is not None for arg in args) else None


def _narrow(rewriter: Rewriter, expr: relax.Expr, dtype: str) -> relax.Expr | None:
    """Return what was widened from `dtype`; of ones and zeros, those of `dtype`."""
    cast = rewriter.call(expr, "relax.astype")
    if cast is not None:
        return cast.args[0] if dtype_of(cast.args[0]) == dtype else None
    value = next((v for v in (0.0, 1.0) if is_filled(expr, v)), None)
    width = shape_of(expr)
    return None if value is None or width is None else _filled(value, int(width[0]), dtype)


def _with(norm: relax.Call, args: list[relax.Expr]) -> relax.Call:
    """Return a norm of other operands."""
    return relax.Call(norm.op, args, norm.attrs)


def _vector(rewriter: Rewriter, expr: relax.Expr, like: relax.Expr) -> relax.Expr | None:
    """Return a tensor that is one row of as many features as `like`, as that row.

    A number is added to the row: it may be the 1 of a kernel that multiplies by ``1 + gamma``.
    """
    shape, width = shape_of(expr), shape_of(like)
    if shape is None or width is None or not same_shape(shape[-1:], width):
        return None
    if not all(map(is_one, shape[:-1])):
        return None
    if len(shape) == 1:
        return expr
    for row, number in binary(rewriter, expr, "relax.add"):
        value = scalar(rewriter, number)
        if value is not None and same_shape(shape_of(row), shape):
            row = rewriter.emit(relax.op.reshape(row, width))
            return rewriter.emit(relax.op.add(row, relax.const(value, dtype_of(row))))
    return rewriter.emit(relax.op.reshape(expr, width))


def _filled(value: float, width: int, dtype: str) -> relax.Expr:
    return relax.const(np.full(width, value), dtype)


def _activated(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    found = activation(rewriter, rewriter.probe(call))
    known = found is not None and found.name in _ACTIVATIONS  # others, Relax has no operator for
    return _ACTIVATIONS[found.name](found.source) if found is not None and known else None


OPERATORS: dict[str, Rule] = {
    "relax.multiply": _product,
    "relax.divide": _quotient,
    "relax.add": _sum,
    "relax.astype": _cast,
    "relax.maximum": _activated,
}
