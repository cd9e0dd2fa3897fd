"""Many plans of a workload as functions of one Relax module, made as the fusing passes do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax, tirx

from benchmarks.building import Built, compiled, in_halves
from benchmarks.report import plan_words
from relax_fusion import PATTERNS
from relax_fusion.compute import build_prim_func
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.workload import Attention, GatedFFN, NormMatmul

Work = NormMatmul | GatedFFN | Attention

Uppers = Sequence[int | None]


def module_of(work: Work, plans: Mapping[TilePlan, Uppers]) -> tuple[ir.IRModule, list[str]]:
    """Return a module with a function for each plan, and their names.

    Parameters
    ----------
    work : NormMatmul, GatedFFN or Attention
        With one result; an attention of fixed sizes.
    plans : mapping of TilePlan to sequence of (int or None)
        For each plan, the upper ends of the ranges of rows in which it is to serve (None alone, if
        they are fixed); what a kernel may assume of its rows depends on them.
    """
    builder = relax.BlockBuilder()
    names = []
    for i, (plan, uppers) in enumerate(plans.items()):
        bounded = sorted(u for u in set(uppers) if u is not None)
        table = PlanTable(tuple((upper, plan) for upper in (*bounded, None)))
        func = build_prim_func(work, table).without_attr("global_symbol")
        names.append(f"run_{i}")
        _add(builder, builder.add_func(func, f"plan_{i}"), func, names[-1])
    return builder.get(), names


def _add(builder: relax.BlockBuilder, gvar: ir.GlobalVar, func: tirx.PrimFunc, name: str) -> None:
    """Add a function that calls a PrimFunc of one result with all of its parameters."""
    dims: dict[ir.Var, ir.Var] = {}

    def size(dim: ir.Expr) -> ir.Expr:
        if not isinstance(dim, ir.Var):
            return dim
        return dims.setdefault(dim, tirx.Var("rows", "int64"))

    types = [relax.TensorType([size(d) for d in p.ty.shape], str(p.ty.dtype)) for p in func.params]
    params = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types[:-1])]
    with builder.function(name, params):
        with builder.dataflow():
            out = builder.emit_output(relax.op.call_tir(gvar, relax.Tuple(params), types[-1]))
        builder.emit_func_output(out)


@dataclass(frozen=True)
class PlanJob:
    """A plan to be compiled on its own; see `benchmarks.building.fill_cache`."""

    work: Work
    plan: TilePlan
    target: str

    @property
    def name(self) -> str:
        return plan_words(self.plan)


def build(job: PlanJob) -> None:
    """Compile a plan for the sake of the kernels' cache."""
    _, failed = compile_plans(job.work, {job.plan: [None]}, job.target)
    for why in failed.values():
        raise RuntimeError(why)


def compile_plans(
    work: Work, plans: Mapping[TilePlan, Uppers], target: str
) -> tuple[dict[TilePlan, tuple[Built, str]], dict[TilePlan, str]]:
    """Compile all plans in one module; where that fails, find out which do not compile.

    Returns
    -------
    compiled : dict of TilePlan to (Built, str)
        And the name of the function.
    failed : dict of TilePlan to str
        With the reason.
    """

    def build_some(some: list[TilePlan]) -> dict[TilePlan, tuple[Built, str]]:
        mod, names = module_of(work, {plan: plans[plan] for plan in some})
        built = compiled(mod, target, disable=list(PATTERNS))
        return {plan: (built, name) for plan, name in zip(some, names, strict=True)}

    return in_halves(build_some, plans)
