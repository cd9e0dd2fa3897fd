"""What our schedule rules have in common: they schedule a function or leave it, and never raise."""

from __future__ import annotations

from abc import abstractmethod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from ..errors import Decline, LoweringError, Reason
from ..matching.expressions import is_number
from ..tvm_ir import SBlock, SBlockRealize, TensorLoad, structural_map

SCHEDULE_ERRORS = (s_tir.ScheduleError, tvm.error.InternalError, LoweringError)
"""A schedule primitive raises one of these where it does not apply, and building a kernel where it
cannot. Any other exception is a mistake of ours, and is not hidden."""


TVM_RULE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""A rule of TVM is known to raise one of these on functions that it was not made for: its own
assertions, and what comes of shapes that it did not expect."""


def first_line(err: Exception) -> str:
    """Return the first line of a message that says something."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), "")


def has_blocks(func: tirx.PrimFunc) -> bool:
    """Tell whether a schedule can be made of a function; bare loops and calls have none."""
    return isinstance(func.body, SBlockRealize)


def without_single_sums(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose reductions of one element are computed element by element.

    rewrite: ``with init: s[i] = 0``, ``s[i] = s[i] + x[i, r]`` for r in 1 -> ``s[i] = 0 + x[i, 0]``

    TVM's rules drop loops of one step.  What is left is an initialisation of nothing that is
    reduced, and `Schedule.compute_inline` ends the process where it is asked for such a block.
    """
    body = structural_map(func.body, (SBlock, _elementwise))
    return func if body.same_as(func.body) else func.with_body(body)


def _elementwise(block: SBlock) -> SBlock:
    sums = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
    if block.init is None or not all(is_number(v.dom.extent, 1) for v in sums):
        return block
    spatial = [tirx.IterVar(v.dom, v.var, tirx.IterVar.DataPar, "") for v in block.iter_vars]
    body, init = block.body, block.init
    if isinstance(body, tirx.BufferStore) and isinstance(init, tirx.BufferStore):

        def first(load: TensorLoad) -> tirx.Expr:
            return init.value if load.source.same_as(body.buffer) else load

        value = structural_map(body.value, (TensorLoad, first))
        body = tirx.BufferStore(body.buffer, value, body.indices)
    else:
        body = tirx.SeqStmt([init, body])
    kept = block.name_hint, body, None, block.alloc_buffers, block.match_buffers, block.annotations
    return SBlock(spatial, block.reads, block.writes, *kept)


def apply_tvm_rule(
    rule: ScheduleRule, func: tirx.PrimFunc, target: Target
) -> s_tir.Schedule | Decline | None:
    """Return what a rule of TVM makes of a function, and a Decline where it fails."""
    try:
        found = rule.apply(without_single_sums(func), target, False)
    except TVM_RULE_ERRORS as err:
        return Decline(Reason.SCHEDULE, f"{type(err).__name__}: {first_line(err)}")
    return found[0] if isinstance(found, list) else found


class SafeRule(ScheduleRule):
    """A rule whose `schedule` may fail: then it has no schedule, and `attempt` says why."""

    @abstractmethod
    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule; None for a function of another kind; a Decline with the reason."""

    def attempt(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return what `schedule` does, and a Decline where a step of it failed."""
        if not has_blocks(func):
            return None
        try:
            return self.schedule(func, target)
        except SCHEDULE_ERRORS as err:
            return Decline(Reason.SCHEDULE, first_line(err) or type(err).__name__)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Return the schedule, or None if there is none."""
        result = self.attempt(func, target)
        return result if isinstance(result, s_tir.Schedule) else None
