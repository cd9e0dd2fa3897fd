"""The pass that turns fused PrimFuncs whose plans say "triton" into launches of Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute import description, dims_of, within
from ..errors import KernelError, LoweringError
from ..estimator.families.generated.plan import GeneratedPlan
from ..estimator.families.triton_experts import ExpertPlan
from ..estimator.ranges import served
from ..estimator.registry import is_launched
from ..estimator.shape import most_rows
from ..estimator.tile_plan import PlanTable, TilePlan
from ..hardware import DeviceSpec
from ..hardware.target import compute_capability, device_of
from ..launch.arguments import Workspace, is_number
from ..launch.branches import Branch, Launch, Others
from ..launch.cuda_source import source_compiler
from ..launch.prim_func import ExternFunc
from ..matching.expressions import found_in
from ..matching.pattern import calls_kernel
from ..transforms.fixed_arguments import Fixed
from ..transforms.modules import module_pass
from ..transforms.running import making
from ..workload import Attention, Chain, DynamicDim, ExpertMatmul, Workload
from .attention import attention_cases, empty_cases
from .attention_call import Appended, Case
from .compile import Made, try_kernels
from .contraction import contraction_steps
from .expert_order import PLACE_OF_IDS, ExpertSort, expert_sorts
from .experts import ExpertOrder, expert_steps
from .generated.launch import generated_steps
from .launches import NOTHING_FIXED, AnyStep, FixedWeights, SourceStep, Step
from .operands import named_operands
from .rewriter import Rewriter
from .specialize import specialize


@dataclass(frozen=True)
class Fused:
    """A PrimFunc to be replaced: what it computes, its plans, and its parameters.

    Those are tensors, and for the keys to read of a preallocated cache a number.  Where some plans
    are not for Triton, `others` are their kernels.  `fixed` tells what no kernel writes, `appended`
    what an attention appends to its caches, which are inputs and outputs then.  `sort` is how the
    pairs of a product by experts are sorted, and `order` what comes of it.
    """

    func: tirx.PrimFunc
    work: Workload
    plans: PlanTable
    inputs: list[ir.Expr]
    outputs: list[relax.TensorType]
    dims: dict[str, ir.Expr]
    others: Others | None
    fixed: Fixed | None
    appended: Appended | None
    sort: ExpertSort | None
    order: ExpertOrder | None

    @property
    def operands(self) -> list[ir.Expr]:
        """The inputs that the workload has."""
        return self.inputs[: len(self.work.graph.inputs)]

    def cases(self, dev: DeviceSpec) -> list[Case]:
        """Return conditions, and what is launched where they are the first that hold."""
        workspaces: dict[str, Workspace] = {}
        found: list[Case] = []
        if isinstance(self.work, Attention):
            found += empty_cases(self.work, self.plans, self.operands, dev)
        others: Any = True  # no box of the plans before that are not for Triton
        for here, bounds, plan in self.served():
            if is_launched(plan):
                launches = self._launches(plan, bounds, dev, workspaces)
                found += [(_both(_both(others, here), when), steps) for when, steps in launches]
            elif here is not True:
                others = _both(others, tirx.Not(here))
        return found

    def served(self) -> list[tuple[Any, dict[str, int], TilePlan]]:
        """Return a condition, bounds and a plan for each box; where the first that holds decides.

        A plan that serves several ranges of rows comes once, with a condition of all of them.
        """
        found = served(self.work, self.plans)
        every = list(dict.fromkeys(plan for _, plan in found))
        names = {name for bounds, _ in found for name in bounds}
        if len(every) == len(found) or len(names) != 1 or self.others is not None:
            return [(within(b, self.dims) if b else True, b, plan) for b, plan in found]
        (name,) = names
        size, spans = self.dims[name], {plan: list[Any]() for plan in every}
        last: dict[TilePlan, dict[str, int]] = {}
        before: int | None = None
        for bounds, plan in found:
            inside = [size <= tirx.IntImm("int64", bounds[name])] if bounds else []
            behind: list[Any] = [size > tirx.IntImm("int64", before)] if before is not None else []
            spans[plan].append(tirx.all(*behind, *inside))
            before, last[plan] = bounds.get(name), bounds
        *closed, rest = sorted(every, key=lambda plan: not last[plan])
        return [(tirx.any(*spans[p]), last[p], p) for p in closed] + [(True, last[rest], rest)]

    def _launches(
        self,
        plan: TilePlan,
        bounds: dict[str, int],
        dev: DeviceSpec,
        workspaces: dict[str, Workspace],
    ) -> list[Case]:
        """Return the launches of a plan, at sizes within bounds."""
        most = self._most(bounds)
        if isinstance(self.work, Attention):
            given = self.work, plan, self.operands, most, dev, workspaces
            return attention_cases(*given, self.appended)
        if isinstance(self.work, Chain):
            assert isinstance(plan, GeneratedPlan), plan
            return [(True, generated_steps(self.work, plan, self.inputs, self.dims, bounds, dev))]
        read = most, dev, workspaces, self._weights()
        if isinstance(self.work, ExpertMatmul):
            assert isinstance(plan, ExpertPlan), plan
            order = self.order._asdict() if self.order is not None else {}
            named = {**named_operands(self.work, self.inputs), **order}
            return [(True, [*expert_steps(self.work, plan, named, *read)])]
        return [(True, contraction_steps(self.work, plan, self.inputs, *read))]

    def _weights(self) -> FixedWeights:
        """Return which inputs may be read before the kernel in front has ended."""
        if self.fixed is None:
            return NOTHING_FIXED
        fixed, settled = (
            [v for v, known in zip(self.inputs, each, strict=True) if known]
            for each in (self.fixed.arguments, self.fixed.settled)
        )
        return FixedWeights(fixed, self.fixed.leads, settled)

    def _most(self, bounds: dict[str, int]) -> int | None:
        """Return the most rows or query positions within bounds; None if nothing bounds them."""
        dim = self.work.ranged["rows"]
        upper = bounds.get(dim.name) if isinstance(dim, DynamicDim) else None
        return most_rows(self.work, upper)


@module_pass
class EmitTritonKernels:
    """Replace every PrimFunc whose plans are for Triton by one that launches the kernels.

    rewrite::

        R.call_tir(f, (x, g, w), out)   ->   R.call_tir(f, (x, g, w), [out, workspace])[0]

    Kernels of the whole module are compiled together, in parallel.

    Parameters
    ----------
    target : Target
        A CUDA target.

    Raises
    ------
    LoweringError
        If such a function is called otherwise than by ``R.call_tir``, as behind CallTIRRewrite.
    """

    target: Target

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with its Triton kernels in place."""
        fused = {
            gvar: found
            for gvar, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and (found := fused_of(func)) is not None
        }
        if not fused:
            return mod
        _check_calls(mod, fused)
        asked = {gvar: each.sort for gvar, each in fused.items() if each.sort is not None}
        sorts = expert_sorts(mod, asked)
        made = self._make({**fused, **{sort: sort for _, sort in sorts.values()}})
        return Rewriter(mod, fused, sorts, made).run()

    def _make(self, fused: Mapping[Any, Fused | ExpertSort]) -> dict[Any, ExternFunc]:
        """Compile the kernels of all functions, then write the functions."""
        dev = device_of(self.target)
        cases: dict[Any, list[Case]] = {}
        for gvar, found in fused.items():
            with making(found.func):
                cases[gvar] = found.cases(dev)
        every = [(f.outputs, s) for g, f in fused.items() for _, steps in cases[g] for s in steps]
        done = iter(_compiled(every, compute_capability(self.target)))
        made = {}
        for gvar, found in fused.items():
            with making(found.func):
                branches = [
                    Branch(when, [_launch(step, *next(done)) for step in steps])
                    for when, steps in cases[gvar]
                ]
                made[gvar] = ExternFunc.of(found.outputs, branches, found.others)
        return made


def _compiled(
    every: Sequence[tuple[Sequence[relax.TensorType], AnyStep]], capability: int
) -> list[tuple[Made, Sequence[Any]]]:
    """Compile the kernels of steps, each with the outputs of its function; return the arguments."""
    special = {
        id(s): specialize(s.function, s.args, s.constexprs, s.options, outputs, capability)
        for outputs, s in every
        if isinstance(s, Step)
    }
    sources = [s.source for _, s in every if isinstance(s, SourceStep)]
    with source_compiler() as compiler:
        with ExitStack() as fork:
            fork.enter_context(compiler.paused())
            fork.callback(compiler.start, sources)  # in threads, beside the processes of Triton
            made = try_kernels([s for s, _ in special.values()], meanwhile=fork.close)
        kernels = dict(zip(special, made, strict=True))
        return [
            (compiler.kernel(s.source), s.args)
            if isinstance(s, SourceStep)
            else (kernels[id(s)], special[id(s)][1])
            for _, s in every
        ]


def _launch(step: AnyStep, kernel: Made, args: Sequence[Any]) -> Launch:
    if isinstance(kernel, KernelError):
        raise kernel
    return Launch(kernel, step.grid, args)


def _check_calls(mod: ir.IRModule, fused: Mapping[ir.GlobalVar, Fused]) -> None:
    """Refuse calls that would stay as they are, of functions that take other arguments then."""
    for gvar, func in mod.functions_items():
        for call in found_in(func, ir.Call):
            args = call.args[1:] if calls_kernel(call) else call.args
            for used in (call.op, *args):
                if isinstance(used, ir.GlobalVar) and used in fused:
                    raise LoweringError(
                        f"{gvar.name_hint} uses {used.name_hint}, which is for Triton, otherwise "
                        "than by R.call_tir; run EmitTritonKernels before what lowers R.call_tir"
                    )


def fused_of(func: tirx.PrimFunc) -> Fused | None:
    """Return what a PrimFunc computes if its plans are for Triton."""
    work, plans = description(func) or (None, None)
    if work is None or plans is None:
        return None
    launched = {is_launched(plan) for _, plan in served(work, plans)}
    if True not in launched:
        return None
    graph, params = work.graph, func.params
    count = len(graph.outputs)
    inputs = [p if is_number(p) else relax.Var(p.name, _tensor(p)) for p in params[:-count]]
    outputs = [_tensor(p) for p in params[-count:]]
    others = Others(func, inputs) if False in launched else None
    appended = Appended.of(func, inputs)
    if appended is not None:
        of = named_operands(work, inputs[: len(graph.inputs)])
        outputs += [of[name].ty for name in ("k", "v")]
        params = [*params[: len(graph.inputs)], *params[-count:]]
    told = dims_of(graph, params), others, Fixed.of(func), appended
    if not isinstance(work, ExpertMatmul):
        return Fused(func, work, plans, inputs, outputs, *told, None, None)
    sort = ExpertSort.of(work, plans, inputs[PLACE_OF_IDS], func)
    order = sort.result if sort is not None else None
    return Fused(func, work, plans, inputs, outputs, *told, sort, order)


def _both(first: Any, second: Any) -> Any:
    """Return the conjunction of two conditions, each an expression or True."""
    if first is True or second is True:
        return second if first is True else first
    return tirx.And(first, second)


def _tensor(param: ir.Var) -> relax.TensorType:
    return relax.TensorType(list(param.ty.shape), str(param.ty.dtype))
