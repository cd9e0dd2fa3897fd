"""Activations of the TIR path, as expressions.

TVM compiles CUDA with ``--use_fast_math``, which makes ``tanhf`` an approximation of too few bits.
So it comes from the exponential, or from a polynomial in x near 0, where the other would cancel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from tvm import te, tirx

from ..errors import LoweringError

ACCUMULATE = "float32"
"""The dtype that sums and activations are computed in."""

NEAR = 0.5
NEAR_ZERO = (-0.333331484, 0.133259869, -0.0530529242, 0.0172569385)
"""Below this magnitude, tanh is the polynomial ``x + x^3 (c0 + c1 x^2 ...)`` with these
coefficients: least squares, reweighted until the relative error was level, 1.6e-8 at most."""

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
        return tanh(x)
    raise LoweringError(f"no formula for activation {name!r}")


def tanh(x: tirx.Expr) -> tirx.Expr:
    """Return the polynomial near 0, else ``1 - 2 / (e^(2 |x|) + 1)`` with the sign of x.

    Not by a `Let`: TVM's passes visit one inside of another twice as often, and where rows are
    unrolled, TVM 0.27 shares what one copy's variable is used for before the next defines it.
    """
    square, one, two = x * x, _const(1.0), _const(2.0)
    near = x + x * square * polynomial(NEAR_ZERO, square)
    size = tirx.Select(x < _const(0.0), -x, x)
    far = one - two / (tirx.exp(two * size) + one)
    signed = tirx.Select(x < _const(0.0), -far, far)
    return tirx.Select(size < _const(NEAR), near, signed)


def polynomial(coefficients: Sequence[float], x: tirx.Expr) -> tirx.Expr:
    """Return ``c0 + c1 x + c2 x^2 ...`` by Horner's rule."""
    total = _const(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + _const(coefficient)
    return total


def _const(value: float) -> tirx.Expr:
    return tirx.const(value, ACCUMULATE)


def clipped(value: tirx.Expr, low: float, high: float) -> tirx.Expr:
    """Return an element between two ends, which may be infinite; NaN stays, as in PyTorch."""
    for end, beyond in ((low, operator.lt), (high, operator.gt)):
        if not math.isinf(end):
            bound = tirx.const(end, str(value.ty.dtype))
            value = tirx.Select(beyond(value, bound), bound, value)
    return value
