"""What the operators become that TVM legalises otherwise, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
from tvm import relax, te, topi

from ..compute.activations import activate
from ..tvm_ir import GenericConst, structural_equal
from . import half_sums, nan
from .attention import legalize_attention
from .nan import by_tvm
from .norms import legalize_group_norm, legalize_layer_norm, legalize_rms_norm


def legalize_full(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Fill a tensor; of a number that is not finite TVM's own looks for text in a dtype."""
    like, value = call.args
    shape = like if isinstance(like, relax.ShapeExpr) else like.ty.shape
    number = value.value.numpy().item() if isinstance(value, GenericConst) else 0
    if isfinite(number) or not isinstance(shape, relax.ShapeExpr):
        return by_tvm(bb, call)
    made = (shape.values, call.ty.dtype, number)
    return bb.call_te(topi.cpp.full, *made, primfunc_name_hint="full")


def _activation(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute an activation in float32, and round it once; TVM has float64 for its own."""
    dtype, name = str(call.args[0].ty.dtype), call.op.name.rsplit(".", 1)[-1]
    if dtype == "float64":
        return by_tvm(bb, call)
    function = te.erf if name == "erf" else partial(activate, name)

    def formula(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: function(x(*i).astype("float32")).astype(dtype), name)

    return bb.call_te(formula, call.args[0], primfunc_name_hint=name)


MOST_FACTORS = 8
"""The highest power that is computed as products."""


def _power(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute a power in float32, and whole ones as products.

    TVM has no power of bfloat16, and its CUDA code gives NaN for a power of a negative float16.
    """
    base, exponent = call.args
    dtype = str(call.ty.dtype)
    number = exponent.value.numpy() if isinstance(exponent, GenericConst) else np.array([])
    whole = float(number.item()) if number.size == 1 else 0.0
    if (
        dtype != "float64"
        and whole in range(1, MOST_FACTORS + 1)
        and structural_equal(call.ty, base.ty)
    ):
        return bb.call_te(_products, base, int(whole), primfunc_name_hint="power")
    if dtype not in ("float16", "bfloat16"):
        return by_tvm(bb, call)

    def power(x: te.Tensor, y: te.Tensor) -> te.Tensor:
        return topi.cast(topi.power(topi.cast(x, "float32"), topi.cast(y, "float32")), dtype)

    return bb.call_te(power, base, exponent, primfunc_name_hint="power")


def _products(x: te.Tensor, exponent: int) -> te.Tensor:
    """Return ``x ** exponent``, each element by products in float32."""

    def product(*i: Any) -> Any:
        value = x(*i).astype("float32")
        found = value
        for bit in f"{exponent:b}"[1:]:
            found = found * found * value if bit == "1" else found * found
        return found.astype(x.dtype)

    return te.compute(x.shape, product, "power")


LEGALIZE_MAP: Mapping[str, Callable[..., Any]] = {
    **nan.LEGALIZE_MAP,
    **half_sums.LEGALIZE_MAP,
    **dict.fromkeys(
        ("relax.erf", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu"), _activation
    ),
    "relax.power": _power,
    **dict.fromkeys(("relax.nn.attention", "relax.nn.attention_bias"), legalize_attention),
    **dict.fromkeys(("relax.full", "relax.full_like"), legalize_full),
    "relax.nn.group_norm": legalize_group_norm,
    "relax.nn.layer_norm": legalize_layer_norm,
    "relax.nn.rms_norm": legalize_rms_norm,
}
"""What ``relax.transform.LegalizeOps(LEGALIZE_MAP)`` makes of operators that TVM legalises
wrongly."""
