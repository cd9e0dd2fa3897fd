"""TVM's FuseOps, without the groups that TVM 0.27 makes no kernels of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tvm
from tvm import ir, relax

from ..matching.expressions import found_in
from ..matching.pattern import is_call
from .in_place import OPAQUE
from .modules import with_functions


@tvm.transform.module_pass(opt_level=0, name="FuseOps")
@dataclass(frozen=True)
class FuseOps:
    """TVM's FuseOps, but for two kinds of calls, whose PrimFuncs are marked as opaque.

    Of tensors whose sizes contain calls: FuseOps takes those for calls of Relax operators where it
    makes a parameter of such a tensor, as ``x[m - n : m]`` is one, and ends in an InternalError.

    With numbers, in groups that have sizes which are sizes of none of their parameters, such as
    ``exp(arange(m, m + n))``: FuseTIR defines a size twice, and ends in an InternalError.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with groups."""
        computed = (call for f in _relax(mod) for call in _calls(f) if _has_computed_sizes(call))
        mod = _opaque(mod, computed)
        fused = relax.transform.FuseOps()(mod)
        groups = [f for f in _relax(fused) if "Primitive" in (f.attrs or {}) and _is_refused(f)]
        if not groups:
            return fused
        numbered = (call for f in groups for call in _calls(f) if _has_numbers(call))
        return relax.transform.FuseOps()(_opaque(mod, numbered))


def _relax(mod: ir.IRModule) -> list[relax.Function]:
    return [f for f in mod.functions.values() if isinstance(f, relax.Function)]


def _calls(func: relax.Function) -> list[relax.Call]:
    """Return the calls of PrimFuncs in a function."""
    found: list[relax.Call] = []

    def visit(node: relax.Expr) -> None:
        if is_call(node, "relax.call_tir"):
            found.append(node)

    relax.analysis.post_order_visit(func, visit)
    return found


def _opaque(mod: ir.IRModule, calls: Iterable[relax.Call]) -> ir.IRModule:
    """Return the module with the PrimFuncs of `calls` marked."""
    called = {mod.get_global_var(call.args[0].name_hint) for call in calls}
    return with_functions(mod, {g: mod[g].with_attr("op_pattern", OPAQUE) for g in called})


def _has_computed_sizes(call: relax.Call) -> bool:
    return any(found_in(ty, ir.Call) for ty in (call.args[1].ty, call.ty))


def _has_numbers(call: relax.Call) -> bool:
    return any(isinstance(ty, ir.PrimType) for ty in call.args[1].ty.fields)


def _is_refused(group: relax.Function) -> bool:
    """Tell whether a group takes numbers, and sizes apart."""
    return {ir.PrimType, relax.ShapeType} <= {type(p.ty) for p in group.params}
