"""The operators of a block graph: one table, whatever is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operator:
    """An operator on numbers."""

    arity: int
    flops: int
    """Floating-point operations of one application, a transcendental function counted as one."""
    text: str
    """How it is written."""
    formula: Callable[..., Any] | None = None
    """Takes what applies operators by name (``o.exp(x)``) and the operands, and returns the value.
    With it an entry is all that an operator needs: numpy, TIR and Triton compute the formula, and
    `flops` may be 0, where those of the formula count.  Without, each has a function."""
    slots: int = 1
    """Instructions of a GPU's thread for one application, about as many as Triton's text compiles
    to for sm_90 (`2026-11-23-slots.log`); of both GELUs a quarter more, by which the times of
    matmuls come out (`2026-11-23-gelu_tiles.log`).  Those of a formula count where it has one. The
    only measure of an operator's work: `estimator.cpu_cost.SLOT_CYCLES` makes cycles of a CPU of
    it."""


def _function(name: str, slots: int, arity: int = 1, flops: int = 1) -> Operator:
    return Operator(arity, flops, f"{name}({', '.join(['{}'] * arity)})", slots=slots)


OPERATORS = {
    "add": Operator(2, 1, "{} + {}"),
    "subtract": Operator(2, 1, "{} - {}"),
    "multiply": Operator(2, 1, "{} * {}"),
    "divide": Operator(2, 1, "{} / {}", slots=8),
    "ratio": _function("ratio", 10, arity=2),
    "minimum": _function("min", 1, arity=2),
    "finite": _function("finite", 4),
    "exp": _function("exp", 5),
    "tanh": _function("tanh", 24),
    "rsqrt": _function("rsqrt", 24),
    "relu": _function("relu", 3),
    "silu": _function("silu", 13, flops=3),
    "gelu": _function("gelu", 24, flops=5),
    "gelu_tanh": _function("gelu_tanh", 20, flops=9),
    "quick_gelu": _function("quick_gelu", 13, flops=4),
    "relu2": _function("relu2", 4, flops=2),
    "sigmoid": _function("sigmoid", 12, flops=2),
    "maximum": _function("max", 1, arity=2),
    "sqrt": _function("sqrt", 16),
    "log": _function("log", 25),
    "square": Operator(1, 0, "square({})", lambda o, x: o.multiply(x, x)),
    "softplus": Operator(
        *(1, 0, "softplus({})"),
        lambda o, x: o.add(o.maximum(x, 0.0), o.log(o.add(1.0, o.exp(o.minimum(x, o.minus(x)))))),
    ),
    "minus": Operator(1, 0, "-({})", lambda o, x: o.multiply(x, -1.0)),
    "hard_sigmoid": Operator(
        *(1, 0, "hard_sigmoid({})"),
        lambda o, x: o.divide(o.minimum(o.maximum(o.add(x, 3.0), 0.0), 6.0), 6.0),
    ),
    "hard_swish": Operator(1, 0, "hard_swish({})", lambda o, x: o.multiply(x, o.hard_sigmoid(x))),
}
"""By name: what a value may be computed with.  :mod:`.reference` has what numpy computes of those
that are no formulas.

``finite`` is 0 for minus infinity, and ``ratio`` 0 for a divisor of 0: a softmax over nothing.
"""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh")
