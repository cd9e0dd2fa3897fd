"""Exponential and hyperbolic tangent of float32 numbers.

On a CPU, as LLVM has no vector code for either and calls the C library once for every element, both
come from ``e^y - 1`` for y <= 0, found as ``2^n e^r - 1`` with ``y = n ln 2 + r`` (Cody and Waite,
"Software Manual for the Elementary Functions", 1980, chapter 6) and the Taylor series of
``e^r - 1``.

A GPU has an exponential: CUDA's ``__expf`` errs by 2 + 1.2 |x| units in the last place of ``e^x``,
so in a softmax by two units of 1 at most.  But TVM compiles CUDA with ``--use_fast_math``, which
makes ``tanhf`` an approximation of too few bits; so that comes from the exponential, or from a
polynomial in x near 0, where the other would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx

from .attention_tile import FLOAT, let

LOG2_E = 1 / math.log(2)

LN2_HIGH = 355 / 512
"""The natural logarithm of 2 to nine bits, so that its product with n is exact."""

LN2_LOW = math.log(2) - LN2_HIGH

LEAST = -126 * math.log(2)
"""Where the exponential is the smallest normal number; below, it counts as 0."""

SERIES = tuple(1 / math.factorial(k) for k in range(1, 8))
"""Coefficients of r, r^2 ... in ``e^r - 1``.  At ``|r| <= ln(2) / 2`` the next term is 5e-9, a
tenth of what float32 rounds 1 to."""


NEAR = 0.5
NEAR_ZERO = (-0.333331484, 0.133259869, -0.0530529242, 0.0172569385)
"""Where GPUs take the polynomial for tanh, and its coefficients c in ``x + x^3 (c0 + c1 x^2 ...)``:
least squares, reweighted until the relative error was level, 1.6e-8 at most."""


def exp(value: tirx.Expr, on_gpu: bool) -> tirx.Expr:
    """Return ``e^value`` for a float32 `value` that is not positive."""
    if on_gpu:
        return tirx.exp(value)
    return let("x", value, _exp)


def tanh(value: tirx.Expr, on_gpu: bool) -> tirx.Expr:
    """Return the hyperbolic tangent of a float32 `value`, exact to some units in the last place."""
    return _tanh_of_scalar(value) if on_gpu else let("x", value, _tanh)


def _tanh_of_scalar(x: tirx.Expr) -> tirx.Expr:
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


def _exp(x: tirx.Var) -> tirx.Expr:
    return tirx.Select(x < _const(LEAST), _const(0.0), _parts(x, lambda p, rest: p * rest + p))


def _tanh(x: tirx.Var) -> tirx.Expr:
    """Return ``-(e^y - 1) / (e^y + 1)`` at ``y = -2 |x|``, with the sign of x."""
    y = tirx.Select(x < _const(0.0), x, -x) * _const(2.0)
    less_one = let(
        "y",
        tirx.Select(y < _const(LEAST), _const(LEAST), y),
        lambda y: _parts(y, lambda p, rest: p * rest + (p - _const(1.0))),
    )
    size = let("less_one", less_one, lambda e: e / (e + _const(2.0)))
    return let("size", size, lambda size: tirx.Select(x < _const(0.0), size, -size))


def _parts(y: tirx.Var, use: Callable[[tirx.Var, tirx.Expr], tirx.Expr]) -> tirx.Expr:
    """Return what `use` makes of ``2^n`` and ``e^r - 1``.

    NaN comes out in the second, as no comparison holds for it.  Converting to an integer rounds
    towards zero, that is up.
    """
    inside = tirx.Select(y > _const(LEAST), y, _const(LEAST))
    n = (inside * _const(LOG2_E) - _const(0.5)).astype("int32")

    def rest(whole: tirx.Var) -> tirx.Expr:
        return y - whole * _const(LN2_HIGH) - whole * _const(LN2_LOW)

    def finish(n: tirx.Var) -> tirx.Expr:
        r = let("whole", n.astype(FLOAT), rest)
        return let(
            "p", power_of_2(n), lambda p: let("r", r, lambda r: use(p, polynomial(SERIES, r) * r))
        )

    return let("n", n, finish)


def power_of_2(n: tirx.Expr) -> tirx.Expr:
    """Return ``2^n`` for an int32 `n` of which it is a normal float32 number."""
    exponent = (n + tirx.const(127, "int32")) * tirx.const(1 << 23, "int32")
    return tirx.reinterpret(FLOAT, exponent)


def polynomial(coefficients: Sequence[float], x: tirx.Expr) -> tirx.Expr:
    """Return ``c0 + c1 x + c2 x^2 ...`` by Horner's rule."""
    total = _const(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + _const(coefficient)
    return total


def _const(value: float) -> tirx.Expr:
    return tirx.const(value, FLOAT)
