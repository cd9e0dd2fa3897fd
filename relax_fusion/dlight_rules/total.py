"""What our schedule rules have in common: they schedule a function or leave it, and never raise."""

from __future__ import annotations

from abc import abstractmethod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from ..errors import Decline, LoweringError, Reason

SCHEDULE_ERRORS = (s_tir.ScheduleError, tvm.error.InternalError, LoweringError)
"""What a schedule primitive raises where it does not apply, and building a kernel where it cannot.
Any other exception is a mistake of ours, and is not hidden."""


def first_line(err: Exception) -> str:
    """Return the first line of a message that says something."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), "")


class TotalRule(ScheduleRule):
    """A rule whose `schedule` may fail: then it has no schedule, and `attempt` says why."""

    @abstractmethod
    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule; None for a function of another kind; a Decline with the reason."""

    def attempt(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return what `schedule` does, and a Decline where a step of it failed."""
        try:
            return self.schedule(func, target)
        except SCHEDULE_ERRORS as err:
            return Decline(Reason.SCHEDULE, first_line(err) or type(err).__name__)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Return the schedule, or None if there is none."""
        result = self.attempt(func, target)
        return result if isinstance(result, s_tir.Schedule) else None
