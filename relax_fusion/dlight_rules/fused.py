"""Fused functions: their reference body becomes the kernels of their plans, once."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from importlib import import_module
from operator import mul

from tvm import ir, s_tir, tirx
from tvm.target import Target

from ..compute import description, dims_of, within
from ..compute.ranges import stitch, unless_empty
from ..errors import Decline, Reason, RelaxFusionError, SchedulingError, TargetError, TilePlanError
from ..estimator.ranges import served
from ..estimator.registry import Family, is_launched, option_of
from ..estimator.shape import Problem
from ..estimator.tile_plan import PlanTable, TilePlan
from ..hardware.target import device_of, is_gpu
from ..transforms.fixed_arguments import Fixed
from ..transforms.lay_out_weights import LAID_ATTR
from ..tvm_ir import structural_equal
from ..validation import shown
from ..workload import DynamicDim, Graph, Workload
from .safe_rule import SCHEDULE_ERRORS, SafeRule, first_line
from .tensor_cores.dependent import waiting_first

Emitter = Callable[..., tirx.PrimFunc]
"""A function of a workload, a plan and a target; those of panels may be told that they are laid."""


class FusedRule(SafeRule):
    """Make the kernels of a fused function from the plans that it carries; leave every other one.

    rewrite::

        f(x, w, out): the statements of the workload's graph
        ->
        f(x, w, out): if rows <= 16: kernels of the first plan
                      else: kernels of the second

    declines when: an emitter cannot make the kernels of a plan.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the scheduled function, or None where it is not this rule's."""
        described = description(func)
        if described is None:
            return None
        work, table = described
        if LAID_ATTR not in func.attrs and not _fits(func, work.graph):
            return Decline(Reason.SCHEDULE, "its parameters are not those of its workload")
        if not _for_tir(work, table):
            return None
        try:
            made = _dispatched(func, work, table, target)
        except (TilePlanError, TargetError) as err:
            return Decline(Reason.SCHEDULE, str(err))
        made = made.without_attr("global_symbol").with_attrs(dict(func.attrs))
        return s_tir.Schedule(made, enable_check=False)


def _fits(func: tirx.PrimFunc, graph: Graph) -> bool:
    """Tell whether the parameters of a function are the operands of a graph."""
    operands = (*graph.inputs, *graph.outputs)
    return len(operands) == len(func.params) and all(
        tirx.is_buffer_var(param) == (operand.shape is not None)
        and str(param.ty.dtype) == operand.dtype
        for operand, param in zip(operands, func.params, strict=True)
    )


def _dispatched(
    func: tirx.PrimFunc, work: Workload, table: PlanTable, target: Target
) -> tirx.PrimFunc:
    """Return one function that runs, by its dynamic dimensions, the kernels of one of the plans.

    Sizes of Triton's plans do not come here: `EmitTritonKernels` puts their launches in front.
    """
    mine = _for_tir(work, table)
    kernels = [_kernels(func, work, plan, target) for _, plan in mine]
    if LAID_ATTR in func.attrs:  # by one plan
        return kernels[0]
    if not _weights_are_fixed(func, work.graph):
        kernels = [waiting_first(kernel) for kernel in kernels]
    dims = dims_of(work.graph, kernels[0].params)
    when = [*(within(bounds, dims) for bounds, _ in mine[:-1]), None]
    whole = stitch(list(zip(when, kernels, strict=True)))
    return unless_empty(whole, _elements(work.graph, dims)) if is_gpu(target) else whole


def _for_tir(work: Workload, table: PlanTable) -> list[tuple[dict[str, int], TilePlan]]:
    return [(bounds, plan) for bounds, plan in served(work, table) if not is_launched(plan)]


def _weights_are_fixed(func: tirx.PrimFunc, graph: Graph) -> bool:
    """Tell whether the kernel in front of a function cannot have written its weights."""
    fixed = Fixed.of(func)
    if fixed is None or fixed.leads:
        return False
    weights = graph.weights
    pairs = zip(graph.inputs, fixed.arguments, strict=True)
    return all(known for operand, known in pairs if operand in weights)


def _elements(graph: Graph, dims: dict[str, tirx.Expr]) -> tirx.Expr:
    """Return the product of the dynamic dimensions of the results."""
    sizes = dict.fromkeys(d for o in graph.outputs for d in o.shape or ())
    dynamic = [dims[d.name] for d in sizes if isinstance(d, DynamicDim)]
    return reduce(mul, dynamic) if dynamic else tirx.IntImm("int64", 1)


def _kernels(func: tirx.PrimFunc, work: Workload, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the function that the emitter of a plan's family makes in place of `func`."""
    option = option_of(plan, Problem(work, device_of(target)))
    family = option.family
    try:
        laid = {"laid": True} if LAID_ATTR in func.attrs else {}
        made = _emitter(family)(work, option.plan, target, **laid)
    except (RelaxFusionError, *SCHEDULE_ERRORS):
        raise
    except Exception as err:  # anybody may register a family
        raise SchedulingError(f"{family.emitter}: {type(err).__name__}: {first_line(err)}") from err
    if not isinstance(made, tirx.PrimFunc):
        raise SchedulingError(f"{family.emitter} made {shown(made)}, must be a PrimFunc")
    found, wanted = (ir.TupleType([p.ty for p in f.params]) for f in (made, func))
    if not structural_equal(found, wanted, map_free_vars=True):
        has, needs = map(_signature, (made, func))
        raise SchedulingError(f"{family.emitter} made a function of {has}, wanted is {needs}")
    return made


def _signature(func: tirx.PrimFunc) -> str:
    """Return the parameters of a function in one line, for people to read."""

    def typed(param: tirx.Var) -> str:
        sizes = ", ".join(str(getattr(d, "value", d)) for d in getattr(param.ty, "shape", ()))
        return f"{param.name} {param.ty.dtype}" + (f"[{sizes}]" if sizes else "")

    return f"({'; '.join(map(typed, func.params))})"


def _emitter(family: Family) -> Emitter:
    module, _, function = family.emitter.partition(":")
    try:
        emit = getattr(import_module(module), function)
    except (ImportError, AttributeError) as err:
        raise SchedulingError(f"emitter {family.emitter}: {err}") from err
    if not callable(emit):
        raise SchedulingError(f"emitter {family.emitter} is {shown(emit)}, must be a function")
    return emit
