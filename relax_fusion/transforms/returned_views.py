"""Reshapes as views: also of results on their way out, but not of memory that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import tvm
from tvm import ir, relax

from ..matching.effects import Memory
from ..matching.expressions import found_in
from ..matching.pattern import is_call
from .modules import functions_of, with_functions

CALL_TIR = ir.Op.get("relax.call_tir")


@tvm.transform.module_pass(opt_level=0, name="ReturnReshapedViews")
class ReturnReshapedViews:
    """Give a reshaped result a name inside its dataflow block, where TVM makes a view of it.

    rewrite::

        y = R.call_tir(matmul, ...)            y = R.call_tir(matmul, ...)
        z = R.call_tir(reshape, (y,), ...)  -> v = R.call_tir(reshape, (y,), ...)
        R.output(z)                            z = v
                                               R.output(z)

    `RewriteDataflowReshape`, which follows, leaves outputs of a block alone, as they might share
    memory with an argument; so each reshaped result would be copied.

    declines when: y is no fresh result of a ``call_tir`` in the same block, or is used twice.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with views in place."""
        functions = functions_of(mod, relax.Function)
        return with_functions(mod, {gvar: _rewrite(func) for gvar, func in functions.items()})


@tvm.transform.module_pass(opt_level=0, name="RewriteReshapes")
class RewriteReshapes:
    """TVM's RewriteDataflowReshape, without views of memory that is overwritten while they live.

    rewrite: ``b = R.call_tir(reshape, (a,), ...)`` -> ``b = R.reshape(a, ...)``

    TVM takes every PrimFunc that stores what it loads for a reshape, ``x * 1`` too.  Where a later
    call writes either tensor in place, and the view is still read, the two have to be two.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
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
        of_constant = isinstance(source, ir.GenericConst) and self.memory.is_exposed(var)
        return of_constant or self.memory.changes_in_use(var, var)


def _rewrite(func: relax.Function) -> relax.Function:
    if not isinstance(func.body, relax.SeqExpr):
        return func
    blocks = [
        _rewrite_block(b) if isinstance(b, relax.DataflowBlock) else b for b in func.body.blocks
    ]
    if all(new.same_as(old) for new, old in zip(blocks, func.body.blocks, strict=True)):
        return func
    body = relax.BlockBuilder().normalize(relax.SeqExpr(blocks, func.body.body))
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _rewrite_block(block: relax.DataflowBlock) -> relax.DataflowBlock:
    uses = Counter(var for b in block.bindings for var in found_in(b.value, ir.Var))
    items = Counter(_item(b) for b in block.bindings if isinstance(b.value, relax.TupleGetItem))
    fresh: set[relax.Var] = set()
    for binding in block.bindings:
        if isinstance(binding.var, relax.DataflowVar) and isinstance(binding, relax.VarBinding):
            value = binding.value
            one_of_many = isinstance(value, relax.TupleGetItem) and value.tuple_value in fresh
            if _is_call_tir(value) or (one_of_many and items[_item(binding)] == 1):
                fresh.add(binding.var)
    bindings = []
    for binding in block.bindings:
        if _copies_result(binding, fresh) and uses[binding.value.args[1].fields[0]] == 1:
            view = relax.DataflowVar(f"{binding.var.name}_view", binding.var.ty)
            bindings.append(relax.VarBinding(view, binding.value))
            bindings.append(relax.VarBinding(binding.var, view))
        else:
            bindings.append(binding)
    return relax.DataflowBlock(bindings) if len(bindings) > len(block.bindings) else block


def _copies_result(binding: relax.Binding, fresh: set[relax.Var]) -> bool:
    """Tell whether an output of a block has one tensor argument, a fresh one."""
    if not isinstance(binding, relax.VarBinding) or isinstance(binding.var, relax.DataflowVar):
        return False
    if not _is_call_tir(binding.value):
        return False
    args = binding.value.args[1].fields
    return len(args) == 1 and args[0] in fresh


def _item(binding: relax.Binding) -> tuple[relax.Expr, int]:
    return binding.value.tuple_value, int(binding.value.index)


def _is_call_tir(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and value.op.same_as(CALL_TIR)
