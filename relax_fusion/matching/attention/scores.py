"""What happens to the scores of an attention between its matmuls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from tvm import relax

from ...errors import Decline, Reason
from ..bounds import Interval
from ..pattern import PrimExpr
from ..shapes import shape_of

INFINITE = float("inf")


@dataclass(frozen=True)
class Addend:
    """What is added to the scores, where they had `shape`.

    `factor` multiplies it: what the sum is multiplied by, and -1 where it is subtracted.  `floor`
    is what later steps raise lower scores to, here and elsewhere.
    """

    expr: relax.Expr
    shape: tuple[PrimExpr, ...]
    factor: float = 1.0
    floor: float = -INFINITE


@dataclass(frozen=True)
class Most:
    """The most that scores of `shape` can be."""

    expr: relax.Expr
    shape: tuple[PrimExpr, ...]
    floor: float = -INFINITE


@dataclass(frozen=True)
class Condition:
    """Where scores of `shape` are kept: where `expr` is `value`; elsewhere they become `filler`."""

    expr: relax.Expr
    value: bool
    shape: tuple[PrimExpr, ...]
    filler: float = -INFINITE
    floor: float = -INFINITE


@dataclass(frozen=True)
class Clamp:
    """Constants between which scores are held; `factor` multiplies them later."""

    low: float
    high: float
    factor: float

    @property
    def ends(self) -> Interval:
        """The constants, multiplied."""
        return self.low * self.factor, self.high * self.factor


@dataclass(frozen=True)
class Shift:
    """The largest score of each row is taken off."""


Step: TypeAlias = Addend | Most | Condition | Clamp | Shift


@dataclass(frozen=True)
class Scores:
    """The scores at some operator, and what happens to them from there on.

    `factor` multiplies them, after the soft-cap if there is one; `scale` is what they were
    multiplied by in front of it.  `steps` are what else happens, in order; numbers in them are
    multiplied by what follows.  `floor` is the least that the steps leave of a score.  `problem` is
    why this is no attention that a kernel has.
    """

    expr: relax.Expr
    covers: tuple[relax.Var, ...]
    factor: float = 1.0
    softcap: float | None = None
    steps: tuple[Step, ...] = ()
    floor: float = -INFINITE
    problem: Decline | None = None

    def after(self, step: Step, expr: relax.Expr) -> Scores:
        """Go on with an operand of the operator at hand, to whose elements it does `step`."""
        return replace(self.inside(expr), steps=(step, *self.steps))

    @property
    def scale(self) -> float:
        """The factor on the products of queries and keys."""
        return self.factor if self.softcap is None else self.factor * self.softcap

    def inside(self, expr: relax.Expr) -> Scores:
        """Go on with an operand of the operator at hand."""
        return replace(self, expr=expr, covers=(self.expr, *self.covers))

    def refused(self, reason: Reason, detail: str) -> Scores:
        """Remember the last reason against a kernel, which is the first in the graph."""
        return replace(self, problem=Decline(reason, detail))

    @property
    def shape(self) -> tuple[PrimExpr, ...]:
        """The dimensions of the scores at this operator."""
        return tuple(shape_of(self.expr) or ())
