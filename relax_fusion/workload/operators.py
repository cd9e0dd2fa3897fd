"""The operators of a block graph: one table, whatever is made of them."""

from __future__ import annotations

from dataclasses import dataclass


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
        Its formula.
    """

    arity: int
    flops: int
    text: str


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
}
"""By name: what a value may be computed with.  :mod:`.reference` has what each computes.

``finite`` is 0 for minus infinity, and ``ratio`` 0 for a divisor of 0: a softmax over nothing.
"""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh")
