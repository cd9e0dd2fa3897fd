"""What was decided about one chain: the records that a report is made of."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Decline
from .estimator import RangePrediction
from .tile_plan import PlanTable
from .workload import Workload


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

    @property
    def fused(self) -> bool:
        """Whether the chain became one kernel."""
        return self.decline is None
