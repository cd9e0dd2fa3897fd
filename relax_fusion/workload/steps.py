"""The element-wise steps behind a matmul."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .builder import GraphBuilder
from .operators import ACTIVATIONS
from .values import Axis, Const, Expr, apply

EPILOGUE_STEPS = ("bias", "residual", "scale", *ACTIVATIONS)

Step: TypeAlias = str | float
"""A step after a matmul: one of `EPILOGUE_STEPS`, or a number that multiplies."""


def operand_name(step: str, index: int, position: int) -> str:
    """Return how a graph calls the operand of the step at a position of a projection's steps."""
    return f"{step}{index}_{position}"


def operand_names(steps: Sequence[Step], index: int) -> list[str]:
    """Return how a graph calls the operands of the steps of projection number `index`, in order."""
    named = ((s, p) for p, s in enumerate(steps) if isinstance(s, str) and s not in ACTIVATIONS)
    return [operand_name(step, index, position) for step, position in named]


def epilogue(
    g: GraphBuilder,
    steps: tuple[Step, ...],
    element: tuple[Expr, tuple[Axis, ...]],
    dtype: str,
    index: int,
) -> Expr:
    """Write down the operands of steps after a matmul; return an element behind them."""
    value, axes = element
    for position, step in enumerate(steps):
        if isinstance(step, float):
            value = value * Const(step)
        elif step in ACTIVATIONS:
            value = apply(step, value)
        else:
            along = axes if step == "residual" else axes[-1:]
            name = operand_name(step, index, position)
            operand = g.input(name, [a.size for a in along], dtype)[along]
            value = value * operand if step == "scale" else value + operand
    return value
