"""What happens to the scores of an attention between its matmuls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import relax

from ...errors import Decline, Reason
from ..pattern import PrimExpr
from ..shapes import shape_of

HIDDEN = -1e4
"""A score of this size or below counts as hidden: ``exp`` of it is zero beside any other's."""


@dataclass(frozen=True)
class Addend:
    """What is added to the scores, or is the most that they can be, where they had `shape`.

    `factor` multiplies it: what the sum is multiplied by, and -1 where it is subtracted.
    """

    expr: relax.Expr
    shape: tuple[PrimExpr, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class Condition:
    """Where scores of `shape` are kept: where `expr` is `value`."""

    expr: relax.Expr
    value: bool
    shape: tuple[PrimExpr, ...]


@dataclass(frozen=True)
class Scores:
    """The scores at some operator, and what happens to them from there on.

    `factor` multiplies them, after the soft-cap if there is one; `scale` is what they were
    multiplied by in front of it.  `shifted` tells whether the largest of a row was subtracted.
    `problem` is why this is no attention that a kernel has.
    """

    expr: relax.Expr
    covers: tuple[relax.Var, ...]
    factor: float = 1.0
    softcap: float | None = None
    added: tuple[Addend, ...] = ()
    least: tuple[Addend, ...] = ()
    conditions: tuple[Condition, ...] = ()
    shifted: bool = False
    problem: Decline | None = None

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
