"""TVM's FuseOps, without the groups that TVM 0.27 makes no kernels of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import tvm
from tvm import ir, relax

from ..matching.pattern import calls_in
from ..matching.shapes import has_computed_sizes
from .in_place import OPAQUE
from .modules import functions_of, with_functions
from .wide_indices import is_narrow


@tvm.transform.module_pass(opt_level=0, name="FuseOps")
@dataclass(frozen=True)
class FuseOps:
    """TVM's FuseOps, but for three kinds of calls, whose PrimFuncs are marked as opaque.

    Of tensors whose sizes contain calls: FuseOps takes those for calls of Relax operators where it
    makes a parameter of such a tensor, as ``x[m - n : m]`` is one, and ends in an InternalError.

    Of PrimFuncs with sizes of int32, which no tensor of Relax has: FuseTIR ends in such an error.

    With numbers, in groups that have sizes which are sizes of none of their parameters, such as
    ``exp(arange(m, m + n))``: FuseTIR defines a size twice, and ends in an InternalError.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with groups."""
        functions = functions_of(mod, relax.Function).values()
        mod = _opaque(
            mod, functions, lambda c: has_computed_sizes(c, c.args[1]) or is_narrow(mod[c.args[0]])
        )
        fused = relax.transform.FuseOps()(mod)
        functions = functions_of(fused, relax.Function).values()
        groups = [f for f in functions if "Primitive" in (f.attrs or {}) and _is_refused(f)]
        return relax.transform.FuseOps()(_opaque(mod, groups, _has_numbers)) if groups else fused


def _opaque(
    mod: ir.IRModule, functions: Iterable[relax.Function], is_meant: Callable[[relax.Call], bool]
) -> ir.IRModule:
    """Return the module with the PrimFuncs marked that are meant by a call in `functions`."""
    calls = [call for func in functions for call in calls_in(func, "relax.call_tir")]
    called = {mod.get_global_var(call.args[0].name_hint) for call in calls if is_meant(call)}
    return with_functions(mod, {g: mod[g].with_attr("op_pattern", OPAQUE) for g in called})


def _has_numbers(call: relax.Call) -> bool:
    return any(isinstance(ty, ir.PrimType) for ty in call.args[1].ty.fields)


def _is_refused(group: relax.Function) -> bool:
    """Tell whether a group takes numbers, and sizes apart."""
    return {ir.PrimType, relax.ShapeType} <= {type(p.ty) for p in group.params}
