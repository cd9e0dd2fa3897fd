"""Exponentials that a CPU computes a vector at a time."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from ..compute.attention_exp import exp
from ..compute.attention_tile import let


def with_vector_exp(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` with its float32 exponentials as arithmetic; LLVM calls the C library for each.

    rewrite: ``exp(x)`` -> ``e = exp(-|x|) by a series; select(x > 0, 1 / e, e)``
    """
    return func.with_body(tvm_ffi.structural_map(func.body, (ir.Call, _rewritten)))


def _rewritten(call: ir.Call) -> tirx.Expr:
    if not call.op.same_as(_EXP) or str(call.ty.dtype) != "float32":
        return call
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")

    def either(x: tirx.Var) -> tirx.Expr:
        small = exp(tirx.Select(x > zero, -x, x), on_gpu=False)
        return let("e", small, lambda e: tirx.Select(x > zero, one / e, e))

    return let("x", call.args[0], either)


_EXP = tirx.exp(tirx.const(0.0, "float32")).op
