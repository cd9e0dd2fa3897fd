"""What was decided about one chain, or one kernel: the records that a report is made of."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Decline
from ..estimator import RangePrediction
from ..estimator.tile_plan import PlanTable
from ..workload import Workload


@dataclass(frozen=True)
class Decision:
    """One chain that a pass looked at, and what became of it.

    Parameters
    ----------
    pattern, spelling : str
        The pass and the way in which the chain was written (empty if it was refused early).
    function, where : str
        The Relax function and the variables that the chain defines.
    kernel : str
        Name of the PrimFunc that replaced it, empty if it was declined.
    workload, plans : optional
        What it computes and the tiles that were chosen.
    predictions : tuple of RangePrediction
        What each range should cost with and without fusing.
    decline : Decline, optional
        Why it was left alone.
    validation : str
        ``"checked"`` if the kernel was found to compute the same, else why that was not checked;
        empty where nobody asked.
    chain : tuple of str
        The variables that it computes, those inside among them; of one that was refused early,
        those that are known.
    """

    pattern: str
    spelling: str
    function: str
    where: str
    kernel: str = ""
    workload: Workload | None = None
    plans: PlanTable | None = None
    predictions: tuple[RangePrediction, ...] = ()
    decline: Decline | None = None
    validation: str = ""
    chain: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether the chain became one kernel."""
        return self.decline is None

    @property
    def names(self) -> list[str]:
        """The variables of the chain, each once."""
        return list(dict.fromkeys(n for n in (*self.chain, *self.where.split(", ")) if n))


@dataclass(frozen=True)
class Scheduling:
    """Which rule scheduled one PrimFunc."""

    function: str
    """Its name in the module."""
    rule: str
    """The class of the rule, with ``dlight.`` in front of one of TVM's; ``"Triton"`` where a Triton
    kernel takes the function's place; empty where its loops stay as they are."""
    plans: PlanTable | None = None
    """The tiles, where the rule went by a plan of ours."""
    refusals: tuple[tuple[str, Decline], ...] = ()
    """Rules that were asked before and could not do it, with their reasons."""


@dataclass(frozen=True)
class Rewrite:
    """A part of a graph in the place of which an algebraic rule put another."""

    function: str
    where: str
    """The Relax function and the variable."""
    rule: str
    """The formulas, before and after."""
    numbers: str
    """``"exact"``, the sentence of ``docs/numerics.md`` that allows other roundings, or
    ``"inexact"``."""
    saved_s: float
    """What it saves by the price of its operators, in seconds, at the largest sizes."""
    validation: str = ""
    """As that of a `Decision`."""


@dataclass(frozen=True)
class Joining:
    """Operators that no pattern took and one kernel computes, or two kernels for their price."""

    function: str
    where: str
    """The Relax function and the variable of the result."""
    names: tuple[str, ...]
    """The operators; of those that are two kernels the last of each."""
    apart_s: float = 0.0
    fused_s: float = 0.0
    """Seconds as two kernels and as one; 0 where they are one anyway."""
    times: float = 1.0
    """How often one kernel would compute an element of the first."""

    @property
    def joined(self) -> bool:
        """Whether one kernel computes them."""
        return self.fused_s <= self.apart_s


@dataclass(frozen=True)
class LeftOut:
    """A pass, or a chain, without which a module was compiled, as it could not be with it."""

    name: str  # of the pass; or the key of the chain's workload, whose decision has the rest
    where: str  # the pass that failed
    error: str  # the class of the error and the first line of its message

    def __str__(self) -> str:
        return f"{self.name} ({self.where} failed: {self.error})"
