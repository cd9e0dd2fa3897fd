"""Groups of FuseOps that compute nothing: parts of nested tuples."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import ir, relax

from .modules import functions_of, with_functions


@tvm.transform.module_pass(opt_level=0, name="InlineItemGroups")
@dataclass(frozen=True)
class InlineItemGroups:
    """Take apart the functions of FuseOps that only take a part of a tuple.

    rewrite: ``fused(t)`` with ``def fused(t): return t[0]`` -> ``t[0]``

    FuseOps of TVM 0.27 makes one of ``p[1][0]`` where a kernel reads it, and FuseTIR refuses it.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module without such functions; `mod` itself where there are none."""
        functions = functions_of(mod, relax.Function)
        groups = {g: f for g, f in functions.items() if _computes_nothing(f)}
        if not groups:
            return mod
        others = {g: f.inline_functions(groups) for g, f in functions.items() if g not in groups}
        return relax.transform.CanonicalizeBindings()(with_functions(mod, others, without=groups))


def _computes_nothing(func: relax.Function) -> bool:
    values = [b.value for block in func.body.blocks for b in block.bindings]
    is_group = "Primitive" in (func.attrs or {})
    return is_group and all(isinstance(v, relax.Var | relax.TupleGetItem) for v in values)
