"""The pass that turns fused PrimFuncs whose plans say "triton" into launches of Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute import description
from ..estimator.tile_plan import PlanTable
from ..hardware import DeviceSpec
from ..hardware.target import compute_capability, device_of
from ..transforms.modules import with_functions
from ..workload import Attention, Dim, GatedFFN, MatmulChain, NormMatmul
from .arguments import Workspace, is_number
from .attention import Case, attention_cases, empty_cases
from .compile import compile_kernels
from .contraction import contraction_steps
from .fixed import Fixed, fixed_arguments
from .prim_func import Branch, ExternFunc, Launch
from .specialize import specialize
from .steps import FixedWeights, Step


@dataclass(frozen=True)
class _Fused:
    """A PrimFunc to be replaced: what it computes, its plans, and its parameters.

    Those are tensors, and for the keys to read of a preallocated cache a number.
    """

    work: NormMatmul | GatedFFN | Attention
    plans: PlanTable
    inputs: list[ir.Expr]
    outputs: list[relax.TensorType]

    @property
    def size(self) -> ir.Expr:
        """What the ranges of the plans are of: rows, or query positions."""
        axis = self.work.q_layout.index("s") if isinstance(self.work, Attention) else 0
        return self.inputs[0].ty.shape.values[axis]

    def cases(self, dev: DeviceSpec, fixed: Fixed | None) -> list[Case]:
        """Return conditions, and the launches where they are the first that hold."""
        work = self.work
        workspaces: dict[str, Workspace] = {}
        found: list[Case] = []
        if isinstance(work, Attention):
            found += empty_cases(work, self.plans, self.inputs, dev)
            for upper, plan in self.plans.entries:
                most = _most(work.q_len, upper)
                inside = attention_cases(work, plan, self.inputs, most, dev, workspaces)
                found += [(_both(self._within(upper), when), steps) for when, steps in inside]
            return found
        known = zip(self.inputs, fixed.arguments, strict=True) if fixed else ()
        weights = FixedWeights([v for v, k in known if k], fixed is None or fixed.leads)
        for upper, plan in self.plans.entries:
            most = _most(work.rows, upper)
            steps = contraction_steps(work, plan, self.inputs, most, dev, workspaces, weights)
            found.append((self._within(upper), steps))
        return found

    def _within(self, upper: int | None) -> Any:
        """Return the condition of a range, for those below it ruled out."""
        return True if upper is None else self.size <= tirx.IntImm("int64", upper)


def _both(first: Any, second: Any) -> Any:
    """Return the conjunction of two conditions, each an expression or True."""
    if first is True or second is True:
        return second if first is True else first
    return tirx.And(first, second)


def _most(dim: Dim, upper: int | None) -> int | None:
    """Return the largest size that the range up to `upper` has; None if nothing bounds it."""
    if upper is not None:
        return upper
    return dim if isinstance(dim, int) else dim.upper


@tvm.transform.module_pass(opt_level=0, name="EmitTritonKernels")
class EmitTritonKernels:
    """Replace every PrimFunc whose plans are for Triton by one that launches the kernels.

    rewrite::

        R.call_tir(f, (x, g, w), out)   ->   R.call_tir(f, (x, g, w), [out, workspace])[0]

    Kernels of the whole module are compiled together, in parallel.

    Parameters
    ----------
    target : Target
        A CUDA target.
    """

    def __init__(self, target: Target):
        self.target = target

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with its Triton kernels in place."""
        fused = {
            gvar: found
            for gvar, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and (found := _fused(func)) is not None
        }
        if not fused:
            return mod
        made = self._make(fused, fixed_arguments(mod, fused))
        return _Rewriter(mod, fused, made).run()

    def _make(
        self, fused: dict[ir.GlobalVar, _Fused], fixed: dict[ir.GlobalVar, Fixed]
    ) -> dict[ir.GlobalVar, ExternFunc]:
        """Compile the kernels of all functions, then write the functions."""
        dev = device_of(self.target)
        cases = {gvar: f.cases(dev, fixed.get(gvar)) for gvar, f in fused.items()}
        capability = compute_capability(self.target)
        special = [
            specialize(s.function, s.args, s.constexprs, s.options, fused[gvar].outputs, capability)
            for gvar, s in _every(cases)
        ]
        kernels = iter(compile_kernels([source for source, _ in special]))
        passed = iter(args for _, args in special)
        made = {}
        for gvar, found in cases.items():
            branches = [
                Branch(when, [Launch(next(kernels), s.grid, next(passed)) for s in steps])
                for when, steps in found
            ]
            made[gvar] = ExternFunc.of(fused[gvar].outputs, branches)
        return made


def _every(cases: dict[ir.GlobalVar, list[Case]]) -> Iterator[tuple[ir.GlobalVar, Step]]:
    for gvar, found in cases.items():
        for _, steps in found:
            for step in steps:
                yield gvar, step


def _fused(func: tirx.PrimFunc) -> _Fused | None:
    """Return what a PrimFunc computes if its plans are for Triton."""
    work, plans = description(func) or (None, None)
    if work is None or plans is None:
        return None
    if isinstance(work, MatmulChain) or any(p.backend != "triton" for _, p in plans.entries):
        return None
    count = len(work.graph.outputs)
    inputs = [p if is_number(p) else relax.Var(p.name, _tensor(p)) for p in func.params[:-count]]
    return _Fused(work, plans, inputs, [_tensor(p) for p in func.params[-count:]])


def _tensor(param: ir.Var) -> relax.TensorType:
    return relax.TensorType(list(param.ty.shape), str(param.ty.dtype))


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Puts the new functions and calls in place of the old."""

    def __init__(
        self,
        mod: ir.IRModule,
        fused: dict[ir.GlobalVar, _Fused],
        made: dict[ir.GlobalVar, ExternFunc],
    ):
        kept = with_functions(mod, {}, without=made)
        super().__init__(kept)
        self.kept, self.fused, self.made = kept, fused, made
        # Functions of other signatures, so other variables, under the same names
        self.launchers = {
            gvar: self.builder_.add_func(extern.func, gvar.name_hint)
            for gvar, extern in made.items()
        }

    def run(self) -> ir.IRModule:
        """Return the module with every function visited."""
        for gvar, func in self.kept.functions_items():
            if isinstance(func, relax.Function):
                self.builder_.update_func(gvar, self.visit_expr(func))
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite the calls of the functions that were replaced."""
        call = super().visit_call_(call)
        if not call.op.same_as(ir.Op.get("relax.call_tir")) or call.args[0] not in self.made:
            return call
        gvar = call.args[0]
        inputs, args = self.fused[gvar].inputs, list(call.args[1].fields)
        dims = _symbols(inputs, args)
        tensors = dict(zip(inputs, args, strict=True))
        out = call.ty_args[0]
        place = (out.fields[0] if isinstance(out, ir.TupleType) else out).vdevice
        return self.made[gvar].call(self.builder_, self.launchers[gvar], tensors, dims, place)


def _symbols(params: Sequence[ir.Expr], args: Sequence[relax.Expr]) -> dict[ir.Var, ir.Expr]:
    """Return the value, at a call, of every symbolic dim of the parameters."""
    found: dict[ir.Var, ir.Expr] = {}
    for param, arg in zip(params, args, strict=True):
        if is_number(param):
            found[param] = arg
            continue
        sizes = zip(param.ty.shape.values, arg.ty.shape.values, strict=True)
        found |= {dim: size for dim, size in sizes if isinstance(dim, ir.Var)}
    return found
