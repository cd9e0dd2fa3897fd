"""What the operators become that TVM legalises otherwise, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Any

from tvm import ir, relax, te, topi

from ..compute.activations import activate
from ..tvm_ir import GenericConst
from .attention import legalize_attention
from .norms import legalize_group_norm, legalize_layer_norm


def legalize_full(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Fill a tensor; of a number that is not finite TVM's own looks for text in a dtype."""
    like, value = call.args
    shape = like if isinstance(like, relax.ShapeExpr) else like.ty.shape
    number = value.value.numpy().item() if isinstance(value, GenericConst) else 0
    if isfinite(number) or not isinstance(shape, relax.ShapeExpr):
        return ir.Op.get(call.op.name).get_attr("FLegalize")(bb, call)
    made = (shape.values, call.ty.dtype, number)
    return bb.call_te(topi.cpp.full, *made, primfunc_name_hint="full")


def _activation(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute an activation in float32, and round it once; TVM has float64 for its own."""
    dtype, name = str(call.args[0].ty.dtype), call.op.name.rsplit(".", 1)[-1]
    if dtype == "float64":
        return ir.Op.get(call.op.name).get_attr("FLegalize")(bb, call)
    function = te.erf if name == "erf" else partial(activate, name)

    def formula(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: function(x(*i).astype("float32")).astype(dtype), name)

    return bb.call_te(formula, call.args[0], primfunc_name_hint=name)


LEGALIZE_MAP: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("relax.erf", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu"), _activation
    ),
    **dict.fromkeys(("relax.nn.attention", "relax.nn.attention_bias"), legalize_attention),
    **dict.fromkeys(("relax.full", "relax.full_like"), legalize_full),
    "relax.nn.group_norm": legalize_group_norm,
    "relax.nn.layer_norm": legalize_layer_norm,
}
"""What ``relax.transform.LegalizeOps(LEGALIZE_MAP)`` makes of operators that TVM legalises
wrongly."""
