"""Modules in which a workload is computed by several plans, each in a function of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute import build_prim_func
from ..estimator.registry import is_launched
from ..estimator.tile_plan import PlanTable, TilePlan
from ..passes import PATTERNS
from ..workload import Workload
from .contests import Contest

FOREIGN_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError)
"""What compilers raise of a kernel that they cannot make."""


def tables_of(contests: Sequence[Contest]) -> dict[TilePlan, PlanTable]:
    """Return for each plan of some contests a table in which it serves all sizes.

    Triton's kernels rely on the most rows of their range, so the ranges are there in which the plan
    is measured; other kernels know nothing of theirs.  Beyond, where it is not measured, all share
    one plan.
    """
    tables = {}
    shared = contests[-1].plans[0] if contests else None
    for plan in dict.fromkeys(plan for contest in contests for plan in contest.plans):
        known = {c.box.rows for c in contests if plan in c.plans and is_launched(plan)}
        uppers = sorted(rows for rows in known if rows is not None)
        beyond = plan if shared is None or not uppers or None in known else shared
        tables[plan] = PlanTable((*((rows, plan) for rows in uppers), (None, beyond)))
    return tables


def compiled(
    work: Workload, tables: Mapping[TilePlan, PlanTable], target: Target
) -> tuple[list[tuple[relax.VMExecutable, dict[TilePlan, str]]], dict[TilePlan, str]]:
    """Compile plans together; where that fails, halves of them, until it is known which fails.

    Returns
    -------
    executables : list of (VMExecutable, dict of TilePlan to str)
        With the names of the functions.
    failed : dict of TilePlan to str
        Why others do not compile.
    """
    names = {plan: f"run_{number}" for number, plan in enumerate(tables)}
    try:
        mod = _module(work, {names[plan]: table for plan, table in tables.items()})
        pipeline = relax.get_pipeline(
            "relax_fusion", target=target, disable=list(PATTERNS), use_cuda_graph=False
        )
        return [(tvm.compile(mod, target=target, relax_pipeline=pipeline), names)], {}
    except FOREIGN_ERRORS as err:
        if len(tables) == 1:
            return [], {plan: first_sentence(err) for plan in tables}
    plans, executables = list(tables), []
    failed: dict[TilePlan, str] = {}
    half = len(plans) // 2
    for some in (plans[:half], plans[half:]):
        made, wrong = compiled(work, {plan: tables[plan] for plan in some}, target)
        executables += made
        failed |= wrong
    return executables, failed


def first_sentence(err: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[0][:200]}" if lines else type(err).__name__


def _module(work: Workload, tables: Mapping[str, PlanTable]) -> ir.IRModule:
    builder = relax.BlockBuilder()
    for name, table in tables.items():
        func = build_prim_func(work, table).without_attr("global_symbol")
        gvar = builder.add_func(func, f"kernel_of_{name}")
        _add_call(builder, gvar, func, (name, len(work.graph.outputs)))
    return builder.get()


def _add_call(
    builder: relax.BlockBuilder, gvar: ir.GlobalVar, func: tirx.PrimFunc, told: tuple[str, int]
) -> None:
    """Add a function, of a name and a number of results, that calls a PrimFunc."""
    name, results = told
    dims: dict[ir.Var, ir.Var] = {}

    def size(dim: ir.Expr) -> ir.Expr:
        known = isinstance(dim, ir.Var)
        return dims.setdefault(dim, tirx.Var(dim.name, "int64")) if known else dim

    def type_of(param: tirx.Var) -> ir.Type:
        if not hasattr(param.ty, "shape"):  # a number
            return param.ty
        return relax.TensorType([size(dim) for dim in param.ty.shape], str(param.ty.dtype))

    types = [type_of(param) for param in func.params]
    params = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types[:-results])]
    out = types[-1] if results == 1 else types[-results:]
    with builder.function(name, params):
        with builder.dataflow():
            made = builder.emit_output(relax.op.call_tir(gvar, relax.Tuple(params), out))
        builder.emit_func_output(made)
