"""Applying schedule rules to a module, and keeping a record of which scheduled what."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from ..compute import description
from ..errors import Decline, Reason, SchedulingError
from ..estimator.ranges import served
from ..estimator.registry import is_launched, table_of
from ..estimator.tile_plan import PLAN_ATTR
from ..hardware.target import is_cpu, is_gpu
from ..matching.expressions import found_in, thread_tag, variables_of
from ..report.decision import Scheduling
from ..transforms.modules import functions_of, module_of, module_pass, with_functions
from ..transforms.running import making
from ..tvm_ir import SBlockRealize
from .cpu.vector_math import with_vector_math
from .empty_loops import with_starts, without_empty_loops
from .host_code import Functions, host_accesses
from .safe_rule import SafeRule, apply_tvm_rule, has_blocks
from .tensor_cores.dependent import launched_early

TRITON = "Triton"
"""This name stands for a rule where Triton kernels are put in place later."""


@module_pass
class ScheduleKernels:
    """Schedule every PrimFunc by the first rule that takes it, as ``dl.ApplyDefaultSchedule`` does.

    Unlike there, a rule that fails is noted and passed over, and functions whose plans are for
    Triton are left alone.  So are those that other PrimFuncs call, those for the host, and those
    for a GPU of which the host executes no more than launches and calls, whose small kernels begin
    early like others.

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

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with its PrimFuncs scheduled.

        Raises
        ------
        SchedulingError
            If a function for a GPU has no schedule, and so would access the GPU's memory from the
            host.
        """
        updated = {}
        functions = mod.functions.get
        parts = _called_by_prim_funcs(mod)
        for gvar, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or is_scheduled(func) or gvar in parts:
                continue
            with making(func):
                updated[gvar] = self._scheduled(gvar.name_hint, func, functions)
        return with_functions(mod, updated)

    def _scheduled(self, name: str, func: tirx.PrimFunc, functions: Functions) -> tirx.PrimFunc:
        target = (func.attrs or {}).get("target", self.target)
        func = without_empty_loops(func)
        is_kernel = is_gpu(target) and not host_accesses(func.body, functions)
        if is_kernel and not _has_no_threads(func):
            schedule, scheduling = None, Scheduling(name, "")
            func = launched_early(func, target)
        else:
            schedule, scheduling = schedule_by(self.rules, name, func, target)
        if self.record is not None:
            self.record.append(scheduling)
        if schedule is not None:
            func = launched_early(schedule.mod["main"], target)
            func = func.with_attr("tirx.is_scheduled", 1)
        if is_cpu(target):
            func = with_vector_math(func)
        if not is_gpu(target) and has_blocks(func):
            func = with_starts(func)
        elif is_gpu(target) and scheduling.rule != TRITON:
            _check(scheduling, func, target, functions)
        return func


def is_scheduled(func: tirx.PrimFunc) -> bool:
    """Tell whether a function is a kernel already, or is to run on the host."""
    attrs = func.attrs or {}
    return any(n in attrs and bool(attrs[n]) for n in ("tirx.is_scheduled", "tirx.is_host_func"))


def _has_no_threads(func: tirx.PrimFunc) -> bool:
    """Tell whether a function has a grid and leaves its threads to the rules, as MLC-LLM's do."""
    tags = {thread_tag(loop) for loop in found_in(func.body, tirx.For)} - {""}
    return bool(tags) and all(tag.startswith("blockIdx") for tag in tags)


def _called_by_prim_funcs(mod: ir.IRModule) -> set[ir.GlobalVar]:
    """Return the functions that are parts of others' code."""
    bodies = [func.body for func in functions_of(mod, tirx.PrimFunc).values()]
    called = (call.op for body in bodies for call in found_in(body, ir.Call))
    return {op for op in called if isinstance(op, ir.GlobalVar)}


def _check(
    scheduling: Scheduling, func: tirx.PrimFunc, target: Target, functions: Functions
) -> None:
    """Refuse a function that would access memory of the device from the host."""
    tensors = host_accesses(func.body, functions)
    if not tensors:
        return
    reasons = "; ".join(f"{rule}: {decline.detail}" for rule, decline in scheduling.refusals)
    raise SchedulingError(
        f"no rule schedules {scheduling.function} for {target.kind.name}, which would access "
        f"{', '.join(tensors)} on the host ({reasons or 'every rule left it'})"
    )


def schedule_by(
    rules: Sequence[ScheduleRule], name: str, func: tirx.PrimFunc, target: Target
) -> tuple[s_tir.Schedule | None, Scheduling]:
    """Return the first schedule that a rule has for `func`, and the record of it.

    One for a GPU that leaves accesses of its memory to the host counts as none, as does one whose
    sums over threads TVM would not see.
    """
    described = description(func)
    if described is not None and all(is_launched(plan) for _, plan in served(*described)):
        return None, Scheduling(name, TRITON, described[1])
    refusals: list[tuple[str, Decline]] = []
    for rule in rules:
        result = _attempt(rule, func, target)
        if isinstance(result, s_tir.Schedule):
            made = result.mod["main"]
            why = _unfit(made) if is_gpu(target) else ""
            if not why:
                attrs = made.attrs or {}
                plans = table_of(attrs[PLAN_ATTR]) if PLAN_ATTR in attrs else None
                return result, Scheduling(name, rule_name(rule), plans, tuple(refusals))
            result = Decline(Reason.SCHEDULE, why)
        if isinstance(result, Decline):
            refusals.append((rule_name(rule), result))
    return None, Scheduling(name, "", None, tuple(refusals))


def _unfit(func: tirx.PrimFunc) -> str:
    """Return why a schedule for a GPU cannot be taken; nothing if it can."""
    if left := host_accesses(func.body):
        return f"it leaves {', '.join(left)} to the host"
    if lost := lost_reductions(func):
        return f"{lost} of its reductions over threads would be lost"
    return ""


def rule_name(rule: ScheduleRule) -> str:
    """Return how a report calls a rule: by its class, TVM's own with ``dlight.`` in front."""
    kind = type(rule)
    return f"dlight.{kind.__name__}" if kind.__module__.startswith("tvm.") else kind.__name__


def _attempt(
    rule: ScheduleRule, func: tirx.PrimFunc, target: Target
) -> s_tir.Schedule | Decline | None:
    if isinstance(rule, SafeRule):
        return rule.attempt(func, target)
    return apply_tvm_rule(rule, func, target) if has_blocks(func) else None


_ALL_REDUCE = ir.Op.get("tirx.tvm_thread_allreduce")


def lost_reductions(func: tirx.PrimFunc) -> int:
    """Return how many reductions over threads a kernel would lose.

    TVM takes a block for one only where its indices are affine in the loops around it.  Where they
    are not, as where the number of thread blocks is odd and the index of one is halved, each thread
    goes on with its own part of the sum, and nobody is told.
    """
    threads = {
        loop.loop_var
        for loop in found_in(func.body, tirx.For)
        if thread_tag(loop).startswith("threadIdx")
    }
    meant = sum(_reduces_over(realize, threads) for realize in found_in(func.body, SBlockRealize))
    if not meant:
        return 0
    mod = module_of({ir.GlobalVar("main"): func})
    lowered = s_tir.transform.LowerCrossThreadReduction()(mod)["main"]
    calls = found_in(lowered.body, ir.Call)
    return max(0, meant - sum(call.op.same_as(_ALL_REDUCE) for call in calls))


def _reduces_over(realize: SBlockRealize, threads: set[tirx.Var]) -> bool:
    block = realize.block
    used = {
        var
        for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)
        if axis.iter_type == tirx.IterVar.CommReduce
        for var in variables_of(value)
    }
    return block.init is not None and not threads.isdisjoint(used)
