"""What is around a matmul: a norm in front of it, and element-wise steps behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .base import repr_without
from .builder import GraphBuilder, Handle
from .dims import Dim, parts_of
from .operators import ACTIVATIONS
from .values import At, Axis, Const, Expr, Size, apply

EPILOGUE_STEPS = ("bias", "residual", "scale", *ACTIVATIONS)

Step: TypeAlias = str | float
"""A step after a matmul: one of `EPILOGUE_STEPS`, a number that multiplies, "bias:24" or "scale:24"
of a tensor with a row for each 24 rows in turn, or "residual:24" of 24 rows that repeat."""


def per_rows(step: str) -> tuple[str, int]:
    """Return a step's name, and how many rows share a row of its operand, or repeat; else 0."""
    name, _, rows = step.partition(":")
    return name, int(rows) if rows.isdecimal() else 0


def operand_name(step: str, index: int, position: int) -> str:
    """Return how a graph calls the operand of the step at a position of a projection's steps."""
    return f"{per_rows(step)[0]}{index}_{position}"


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
            kind, rows = per_rows(step)
            (first, *_), name = axes, operand_name(step, index, position)
            if rows and kind == "residual":
                operand = g.input(name, (rows, axes[1].size), dtype)[
                    At(((first.name, 1),), mod=rows), axes[1]
                ]
            elif rows:
                made = g.input(name, (parts_of(first.size, rows), axes[1].size), dtype)
                operand = made[At(((first.name, 1),), div=rows), axes[1]]
            else:
                along = axes if step == "residual" else axes[-1:]
                operand = g.input(name, [a.size for a in along], dtype)[along]
            value = value * operand if kind == "scale" else value + operand
    return value


@dataclass(frozen=True)
class PostNorm:
    """An RMSNorm of x behind the projection that made it, in front of the residual's sum.

    Parameters
    ----------
    eps : float
        Added to the mean square.
    unit_offset : bool
        Whether the rows are multiplied by ``1 + gamma``.
    """

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last axis, with an optional residual add in front of it.

    Parameters
    ----------
    kind : {"rms", "layer", "none"}
        ``x / sqrt(mean(x^2) + eps)`` or ``(x - mean) / sqrt(var + eps)``, times gamma (plus beta);
        "none" for the rows of the sum as they are.
    eps : float
        Added to the mean square or the variance.
    beta : bool
        Whether a shift is added (LayerNorm's, or with `each` any norm's).
    residual : bool
        Whether the input is the sum of two tensors, added here.
    returns_sum : bool
        Whether that sum is an output too.
    returns_norm : bool
        Whether the normalised value is an output too (a post-norm residual reads it).
    unit_offset : bool
        Whether the rows are multiplied by ``1 + gamma``, as Gemma's are.
    first : PostNorm, optional
        What x is normalised by before the residual is added.
    each : int
        For how many rows in turn gamma and beta have a row (adaLN's scale and shift, one for each
        sequence); 0 where they are one row.
    """

    kind: Literal["rms", "layer", "none"]
    eps: float
    beta: bool = False
    residual: bool = False
    returns_sum: bool = False
    returns_norm: bool = False
    unit_offset: bool = False
    first: PostNorm | None = None
    each: int = 0

    def __repr__(self) -> str:
        """Return the fields, of which the last two are left out if unused: keys are made of it."""
        return repr_without(self, "first", "each")


@dataclass(frozen=True)
class HeadNorm:
    """An RMSNorm of the heads that a projection makes, or of each whole row of its result."""

    width: int
    """Features that are normalised together: those of a head, or all of the projection."""
    eps: float
    """Added to the mean square."""
    unit_offset: bool = False
    """Whether heads are multiplied by ``1 + gamma``."""
    rounds: bool = False
    """Whether what is normalised is rounded to the dtype of the results before it is rotated."""


def head_normalised(
    g: GraphBuilder, norm: HeadNorm, element: tuple[Expr, tuple[Axis, Axis]], dtype: str, index: int
) -> Expr:
    """Write down the norm of the heads behind a matmul; return a normalised element."""
    value, (i, j) = element
    before = g.map(f"unnormed{index}", (i, j), value, "float32")
    width, columns = norm.width, j.size
    assert isinstance(columns, int), "heads have a number of features"
    head, lane = Axis("head", columns // width), Axis("lane", width)
    own = before[i, head * width + lane]
    square = g.sum(f"head_sum{index}", (i, head), (lane,), own * own)
    gamma = g.input(f"gamma{index}", (width,), dtype)[j % width]
    mean = square[i, At(((j.name, 1),), div=width)] / Size(width)
    factor: Expr = gamma + 1.0 if norm.unit_offset else gamma
    normed = before[i, j] * apply("rsqrt", mean + norm.eps) * factor
    return g.map(f"normed{index}", (i, j), normed, dtype, True)[i, j] if norm.rounds else normed


def normalised(g: GraphBuilder, norm: Norm | None, axes: tuple[Axis, Axis], dtype: str) -> Handle:
    """Write down x ``[rows, k]`` and its norm; return what the matmuls read."""
    i, k = axes
    shape = (i.size, k.size)
    x = g.input("x", shape, dtype)
    if norm is None:
        return x
    if norm.residual:
        value = x[i, k] if norm.first is None else _first(g, norm.first, (x, dtype), axes)
        residual = g.input("residual", shape, dtype)
        normed = norm.kind != "none"
        x = g.map("x_sum", axes, value + residual[i, k], dtype, rounds=normed)
        if norm.returns_sum:
            g.output(x)
        if not normed:
            return x
    at: tuple[At | Axis, ...] = (k,)
    size: tuple[Dim, ...] = (k.size,)
    if norm.each:
        at, size = (At(((i.name, 1),), div=norm.each), k), (parts_of(i.size, norm.each), k.size)
    gamma = g.input("gamma", size, dtype)
    beta = g.input("beta", size, dtype) if norm.beta else None
    centred: Expr = x[i, k]
    if norm.kind == "layer":
        centred = centred - g.sum("mean_sum", (i,), (k,), x[i, k])[i] / Size(k.size)
    square = g.sum("square_sum", (i,), (k,), centred * centred)
    factor: Expr = gamma[at] + 1.0 if norm.unit_offset else gamma[at]
    value = centred * apply("rsqrt", square[i] / Size(k.size) + norm.eps) * factor
    result = g.map("x_norm", axes, value if beta is None else value + beta[at], dtype)
    if norm.returns_norm:
        g.output(result)
    return result


def _first(
    g: GraphBuilder, norm: PostNorm, rows: tuple[Handle, str], axes: tuple[Axis, Axis]
) -> Expr:
    """Return an element of x normalised, in float32."""
    (i, k), (x, dtype) = axes, rows
    gamma = g.input("gamma_first", (k.size,), dtype)
    square = g.sum("first_square_sum", (i,), (k,), x[i, k] * x[i, k])
    factor: Expr = gamma[k] + 1.0 if norm.unit_offset else gamma[k]
    return x[i, k] * apply("rsqrt", square[i] / Size(k.size) + norm.eps) * factor
