"""How many kernels a call of a model launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from relax_fusion import PipelineOptions
from relax_fusion.matching.expressions import substitute, thread_tag
from relax_fusion.matching.pattern import is_call
from relax_fusion.pipeline import PHASES
from relax_fusion.transforms.whole_graph import is_run_or_capture
from relax_fusion.tvm_ir import Analyzer, structural_map

Sizes = Mapping[str, int]


def lowered(mod: ir.IRModule, target: tvm.target.Target, **options: Any) -> ir.IRModule:
    """Return a module as it is when its CUDA graphs are made, by the pipeline with options."""
    told = PipelineOptions(target, **options)
    with target:
        for _, phase, _ in PHASES[:5]:
            mod = tvm.transform.Sequential(phase(told))(mod)
        for step in PHASES[5][1](told):
            mod = step(mod)
            if step.info.name == "CaptureCUDAGraphs":
                break
    return mod


def launches(mod: ir.IRModule, name: str, sizes: Sizes) -> tuple[int, int]:
    """Return how many kernels a call of a function launches, and how many of them from graphs.

    Parameters
    ----------
    mod : IRModule
        From `lowered`.
    name : str
        Of the function.
    sizes : mapping of str to int
        What its symbolic dimensions are.
    """
    func = mod[name]
    inside = sum(_launches(mod, mod[b.value.args[1].fields[0]], sizes) for b in _replays(func))
    return _launches(mod, func, sizes) + inside, inside


def _replays(func: relax.Function) -> list[relax.VarBinding]:
    return [b for block in func.body.blocks for b in block.bindings if is_run_or_capture(b.value)]


def _launches(mod: ir.IRModule, func: relax.Function, sizes: Sizes) -> int:
    """Count the launches of the PrimFuncs that a function calls itself."""
    count = 0
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value
            gvar = call.op if isinstance(call, relax.Call) else None
            if isinstance(gvar, ir.GlobalVar) and isinstance(mod[gvar], tirx.PrimFunc):
                count += _kernels(mod[gvar], call.args, sizes)
    return count


def _kernels(func: tirx.PrimFunc, args: Any, sizes: Sizes) -> int:
    """Count the kernels that a call of a PrimFunc runs: launchers, or loops bound to blocks."""
    known: dict[Any, Any] = {}
    for param, arg in zip(func.params, args, strict=True):
        is_buffer = tirx.is_buffer_var(param)
        pairs = zip(param.ty.shape, arg.ty.shape, strict=True) if is_buffer else [(param, arg)]
        known |= {size: _at(actual, sizes) for size, actual in pairs if isinstance(size, ir.Var)}
    body = structural_map(func.body, (tirx.IfThenElse, lambda stmt: _taken(stmt, known)))
    found: list[Any] = []

    def call(node: ir.Call) -> None:
        if is_call(node, "tirx.tvm_call_cpacked"):
            found.append(node)

    def loop(node: tirx.For) -> None:
        if thread_tag(node) == "blockIdx.x":
            found.append(node)

    tvm_ffi.structural_walk(body, (ir.Call, call))
    tvm_ffi.structural_walk(body, (tirx.For, loop))
    return len(found)


def _at(value: ir.Expr, sizes: Sizes) -> ir.Expr:
    """Return an expression of the caller's dimensions at given sizes."""

    def named(var: ir.Var) -> ir.Expr:
        return tirx.IntImm("int64", sizes[var.name]) if var.name in sizes else var

    return Analyzer().simplify(structural_map(value, (ir.Var, named)))


def _taken(stmt: tirx.IfThenElse, known: Mapping[Any, Any]) -> tirx.Stmt:
    """Return the branch that is taken; the condition itself where that is not known."""
    when = stmt.condition
    when = when.args[0] if is_call(when, "tirx.tvm_thread_invariant") else when
    holds = Analyzer().simplify(substitute(when, known))
    if not isinstance(holds, tirx.IntImm):
        return stmt
    return stmt.then_case if int(holds) else stmt.else_case or tirx.Evaluate(tirx.const(0))
