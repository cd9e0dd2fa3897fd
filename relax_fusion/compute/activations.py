"""Activations of the TIR path, as expressions."""

from __future__ import annotations

from tvm import te, tirx

from ..errors import LoweringError
from .attention_exp import tanh

ACCUMULATE = "float32"
"""The dtype that sums and activations are computed in."""

_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654


def activate(name: str, x: tirx.Expr) -> tirx.Expr:
    """Return an activation of a float32 scalar expression.

    ``gelu`` is exact (erf), ``gelu_tanh`` and ``quick_gelu`` its approximations by tanh and by a
    sigmoid (Hendrycks and Gimpel, 2016).  ``relu2`` is the square of ``relu`` (So et al., 2021).
    """
    one = tirx.const(1.0, ACCUMULATE)
    if name == "relu":
        zero = tirx.const(0.0, ACCUMULATE)
        return tirx.Select(x < zero, zero, x)  # a maximum would be 0 for NaN
    if name == "relu2":
        return tirx.Select(x < tirx.const(0.0, ACCUMULATE), tirx.const(0.0, ACCUMULATE), x * x)
    if name == "quick_gelu":
        return x / (one + te.exp(tirx.const(-1.702, ACCUMULATE) * x))
    if name == "silu":
        return x / (one + te.exp(-x))
    if name == "gelu":
        half = tirx.const(0.5, ACCUMULATE)
        return half * x * (one + te.erf(x * tirx.const(_SQRT_HALF, ACCUMULATE)))
    if name == "gelu_tanh":
        cubic = x + tirx.const(0.044715, ACCUMULATE) * x * x * x
        # (1 + tanh(y)) / 2 is sigmoid(2 y): one exponential, and no difference of close numbers.
        return x / (one + te.exp(tirx.const(-2.0 * _SQRT_2_OVER_PI, ACCUMULATE) * cubic))
    if name == "sigmoid":
        return one / (one + te.exp(-x))
    if name == "tanh":
        return tanh(x, on_gpu=True)
    raise LoweringError(f"no formula for activation {name!r}")
