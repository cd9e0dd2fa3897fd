"""Tensors full of a number that is not finite, as masks are."""

from __future__ import annotations

from math import isfinite

from tvm import ir, relax, topi


def legalize_full(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Fill a tensor; of a number that is not finite TVM's own looks for text in a dtype."""
    like, value = call.args
    shape = like if isinstance(like, relax.ShapeExpr) else like.ty.shape
    number = value.value.numpy().item() if isinstance(value, ir.GenericConst) else 0
    if isfinite(number) or not isinstance(shape, relax.ShapeExpr):
        return ir.Op.get(call.op.name).get_attr("FLegalize")(bb, call)
    made = (shape.values, call.ty.dtype, number)
    return bb.call_te(topi.cpp.full, *made, primfunc_name_hint="full")
