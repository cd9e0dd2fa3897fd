"""Applying schedule rules to a module, and keeping a record of which scheduled what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from ..compute import description
from ..decision import Scheduling
from ..errors import Decline
from ..modules import with_functions
from ..tile_plan import PLAN_ATTR, PlanTable
from .total import TotalRule, apply_tvm_rule, has_blocks

TRITON = "Triton"
"""Stands for a rule where Triton kernels are put in place later."""


@tvm.transform.module_pass(opt_level=0, name="ScheduleKernels")
@dataclass(frozen=True)
class ScheduleKernels:
    """Schedule every PrimFunc by the first rule that takes it, as ``dl.ApplyDefaultSchedule`` does.

    Unlike there, a rule that fails is noted and passed over, and functions whose plans are for
    Triton are left alone.

    Parameters
    ----------
    target : Target
        For functions that name none.
    rules : sequence of ScheduleRule
        In the order in which they are asked.
    record : list of Scheduling, optional
        Receives what became of each function.
    """

    target: Target
    rules: Sequence[ScheduleRule]
    record: list[Scheduling] | None = None

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with its PrimFuncs scheduled."""
        updated = {}
        for gvar, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or is_scheduled(func):
                continue
            target = (func.attrs or {}).get("target", self.target)
            schedule, scheduling = schedule_by(self.rules, gvar.name_hint, func, target)
            if schedule is not None:
                updated[gvar] = schedule.mod["main"].with_attr("tirx.is_scheduled", 1)
            if self.record is not None:
                self.record.append(scheduling)
        return with_functions(mod, updated)


def is_scheduled(func: tirx.PrimFunc) -> bool:
    """Tell whether a function is a kernel already."""
    attrs = func.attrs or {}
    return "tirx.is_scheduled" in attrs and bool(attrs["tirx.is_scheduled"])


def schedule_by(
    rules: Sequence[ScheduleRule], name: str, func: tirx.PrimFunc, target: Target
) -> tuple[s_tir.Schedule | None, Scheduling]:
    """Return the first schedule that a rule has for `func`, and the record of it."""
    described = description(func)
    if described is not None and described[1].entries[0][1].backend == "triton":
        return None, Scheduling(name, TRITON, described[1])
    if not has_blocks(func):
        return None, Scheduling(name, "")
    refusals: list[tuple[str, Decline]] = []
    for rule in rules:
        result = _attempt(rule, func, target)
        if isinstance(result, s_tir.Schedule):
            attrs = result.mod["main"].attrs or {}
            plans = PlanTable.from_attr(attrs[PLAN_ATTR]) if PLAN_ATTR in attrs else None
            return result, Scheduling(name, rule_name(rule), plans, tuple(refusals))
        if isinstance(result, Decline):
            refusals.append((rule_name(rule), result))
    return None, Scheduling(name, "", None, tuple(refusals))


def rule_name(rule: ScheduleRule) -> str:
    """Return how a report calls a rule: by its class, TVM's own with ``dlight.`` in front."""
    kind = type(rule)
    return f"dlight.{kind.__name__}" if kind.__module__.startswith("tvm.") else kind.__name__


def _attempt(
    rule: ScheduleRule, func: tirx.PrimFunc, target: Target
) -> s_tir.Schedule | Decline | None:
    if isinstance(rule, TotalRule):
        return rule.attempt(func, target)
    return apply_tvm_rule(rule, func, target)
