"""Exponentials that a CPU computes a vector at a time."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from ...compute.attention_exp import exp
from ...compute.attention_tile import let
from ...matching.expressions import found_in
from .vector_transpose import float32_bits


def with_vector_exp(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` with its float32 exponentials as arithmetic; LLVM calls the C library for each.

    rewrite: ``exp(x)`` -> ``e = exp(-|x|) by a series; select(x > 0, 1 / e, e)``

    A function that rounds to bfloat16 stays as it is: TVM 0.27 repeats what it rounds, with the
    names bound in it, and then refuses names that are bound twice.  What is read as bfloat16 is
    made float32 here: TVM 0.27 takes bits for an integer in a value that is bound to a name.
    """
    if any(str(cast.ty.dtype) == "bfloat16" for cast in found_in(func.body, tirx.Cast)):
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, (ir.Call, _rewritten)))


def _rewritten(call: ir.Call) -> tirx.Expr:
    if not call.op.same_as(_EXP) or str(call.ty.dtype) != "float32":
        return call
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")

    def either(x: tirx.Var) -> tirx.Expr:
        small = exp(tirx.Select(x > zero, -x, x), on_gpu=False)
        return let("e", small, lambda e: tirx.Select(x > zero, one / e, e))

    return let("x", tvm_ffi.structural_map(call.args[0], (tirx.Cast, _widened)), either)


def _widened(cast: tirx.Cast) -> tirx.Expr:
    dtypes = str(cast.value.ty.dtype), str(cast.ty.dtype)
    return float32_bits(cast.value) if dtypes == ("bfloat16", "float32") else cast


_EXP = tirx.exp(tirx.const(0.0, "float32")).op
