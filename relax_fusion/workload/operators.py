"""The operators of a block graph: one table, whatever is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operator:
    """An operator on numbers.

    Parameters
    ----------
    arity : int
        Operands.
    flops : int
        Floating-point operations of one application, a transcendental function counted as one.
    text : str
        How it is written.
    formula : callable, optional
        Takes what applies operators by name (``o.exp(x)``) and the operands, and returns the value.
        With it an entry is all that an operator needs: numpy, TIR and Triton compute the formula,
        and `flops` may be 0, where those of the formula count.  Without, each has a function.
    """

    arity: int
    flops: int
    text: str
    formula: Callable[..., Any] | None = None


def _function(name: str, arity: int = 1, flops: int = 1) -> Operator:
    return Operator(arity, flops, f"{name}({', '.join(['{}'] * arity)})")


OPERATORS = {
    "add": Operator(2, 1, "{} + {}"),
    "subtract": Operator(2, 1, "{} - {}"),
    "multiply": Operator(2, 1, "{} * {}"),
    "divide": Operator(2, 1, "{} / {}"),
    "ratio": _function("ratio", 2),
    "minimum": _function("min", 2),
    "finite": _function("finite"),
    "exp": _function("exp"),
    "tanh": _function("tanh"),
    "rsqrt": _function("rsqrt"),
    "relu": _function("relu"),
    "silu": _function("silu", flops=3),
    "gelu": _function("gelu", flops=5),
    "gelu_tanh": _function("gelu_tanh", flops=9),
    "quick_gelu": _function("quick_gelu", flops=4),
    "relu2": _function("relu2", flops=2),
    "sigmoid": _function("sigmoid", flops=2),
    "maximum": _function("max", 2),
    "sqrt": _function("sqrt"),
    "log": _function("log"),
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
