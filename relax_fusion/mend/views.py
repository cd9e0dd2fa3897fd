"""Reshapes as views, but not of memory that is overwritten while they live."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import ir, relax

from ..matching.effects import Memory
from ..matching.pattern import is_call
from ..transforms.modules import functions_of, module_pass
from ..tvm_ir import GenericConst


@module_pass
class RewriteReshapes:
    """TVM's RewriteDataflowReshape, without views of memory that is overwritten while they live.

    rewrite: ``b = R.call_tir(reshape, (a,), ...)`` -> ``b = R.reshape(a, ...)``

    TVM takes every PrimFunc that stores what it loads for a reshape, ``x * 1`` too.  Where a later
    call writes either tensor in place, and the view is still read, the two have to be two.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with views, and with copies where one is needed."""
        viewed = relax.transform.RewriteDataflowReshape()(mod)
        for gvar, func in functions_of(viewed, relax.Function).items():
            memory = Memory(func, viewed)
            if memory.written or memory.returned:
                calls = Memory(mod[gvar], mod).values
                viewed.update_func(gvar, _Copier(viewed, memory, calls).visit_expr(func))
        return viewed


@relax.expr_functor.mutator
class _Copier(relax.PyExprMutator):
    """Puts the calls back of which a view would change."""

    def __init__(self, mod: ir.IRModule, memory: Memory, calls: Mapping[relax.Var, relax.Expr]):
        super().__init__(mod)
        self.memory, self.calls = memory, calls

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, view = binding.var, is_call(binding.value, "relax.reshape")
        call = self.calls.get(var)
        if view and is_call(call, "relax.call_tir") and self._changes(var, binding.value.args[0]):
            binding = relax.VarBinding(var, call)
        super().visit_var_binding_(binding)

    def _changes(self, var: relax.Var, source: relax.Expr) -> bool:
        of_constant = isinstance(source, GenericConst) and self.memory.is_exposed(var)
        return of_constant or self.memory.changes_in_use(var, var)
