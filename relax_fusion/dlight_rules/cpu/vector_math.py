"""Exponentials and what is made of them, as arithmetic that a CPU does a vector at a time.

LLVM calls the C library for each element.  The error function stays such a call: the names that its
arithmetic binds inside of each other take TVM 0.27 minutes in kernels with unrolled tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm_ffi
from tvm import ir, tirx

from ...compute.attention_exp import LN2_HIGH, LN2_LOW, LOG2_E, SERIES, polynomial, power_of_2, tanh
from ...compute.attention_tile import let
from ...matching.expressions import found_in
from .vector_transpose import float32_bits

LEAST, MOST = -104.0, 89.0
"""Where the exponential is 0 in float32, and where it is infinity."""


def with_vector_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` with exp, sigmoid and tanh of float32 and float16 as arithmetic.

    rewrite: ``exp(x)`` -> ``n = round(x / ln 2); 2^n * series(x - n ln 2)``

    A function of such a function stays a call: TVM 0.27 puts the arithmetic of the inner one in the
    place of each use by the outer one, which takes it minutes.

    A function that rounds to bfloat16 stays as it is: TVM 0.27 repeats what it rounds, with the
    names bound in it, and then refuses names that are bound twice.  What is read as bfloat16 is
    made float32 here: TVM 0.27 takes bits for an integer in a value that is bound to a name.
    """
    if any(str(cast.ty.dtype) == "bfloat16" for cast in found_in(func.body, tirx.Cast)):
        return func
    body = tvm_ffi.structural_map(func.body, (ir.Call, _rewritten))
    return func if body.same_as(func.body) else func.with_body(body)


def _rewritten(call: ir.Call) -> tirx.Expr:
    formula = _FORMULAS.get(getattr(call.op, "name", ""))
    if formula is None or str(call.ty.dtype) not in ("float32", "float16"):
        return call
    if found_in(call.args[0], tirx.Let):
        return call
    value = tvm_ffi.structural_map(call.args[0], (tirx.Cast, _widened))
    return let("x", value.astype("float32"), formula).astype(str(call.ty.dtype))


def _widened(cast: tirx.Cast) -> tirx.Expr:
    dtypes = str(cast.value.ty.dtype), str(cast.ty.dtype)
    return float32_bits(cast.value) if dtypes == ("bfloat16", "float32") else cast


def _const(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


def exp(x: tirx.Var) -> tirx.Expr:
    """Return ``e^x`` by two powers of 2, of which neither overflows where the result does not.

    NaN has no integer, and comes out in the series.
    """
    high, low = _const(MOST), _const(LEAST)
    number = tirx.Select(x > low, tirx.Select(x < high, x, high), low)
    finite = tirx.Select(x > high, high, tirx.Select(x < low, low, x))
    half = tirx.Select(x < _const(0.0), _const(-0.5), _const(0.5))
    n = (number * _const(LOG2_E) + half).astype("int32")

    def finish(n: tirx.Var) -> tirx.Expr:
        whole, first = n.astype("float32"), n >> tirx.const(1, "int32")
        r = finite - whole * _const(LN2_HIGH) - whole * _const(LN2_LOW)
        series = let("r", r, lambda r: polynomial(SERIES, r) * r + _const(1.0))
        return series * power_of_2(first) * power_of_2(n - first)

    return let("n", n, finish)


def sigmoid(x: tirx.Var) -> tirx.Expr:
    """Return ``1 / (1 + e^-x)``."""
    one = _const(1.0)
    return one / (one + let("minus", -x, exp))


_FORMULAS: Mapping[str, Callable[[tirx.Var], tirx.Expr]] = {
    "tirx.exp": exp,
    "tirx.sigmoid": sigmoid,
    "tirx.tanh": lambda x: tanh(x, on_gpu=False),
}
