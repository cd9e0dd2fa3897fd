"""Reshapes as views: two in a row as one, and those of results on their way out."""

from __future__ import annotations

from collections import Counter

from tvm import ir, relax

from ..matching.effects import Memory
from ..matching.expressions import found_in
from ..matching.pattern import is_call
from ..matching.shapes import same_shape, shape_of
from .modules import functions_of, module_pass, rewritten, with_functions


@module_pass
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

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with views in place."""
        functions = functions_of(mod, relax.Function)
        return with_functions(mod, {gvar: _rewrite(func) for gvar, func in functions.items()})


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
            if is_call(value, "relax.call_tir") or (one_of_many and items[_item(binding)] == 1):
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
    if not is_call(binding.value, "relax.call_tir"):
        return False
    args = binding.value.args[1].fields
    return len(args) == 1 and args[0] in fresh


def _item(binding: relax.Binding) -> tuple[relax.Expr, int]:
    return binding.value.tuple_value, int(binding.value.index)


@module_pass
class FoldReshapes:
    """Make one reshape of two in a row, and none where the shape comes out as it was.

    rewrite: ``b = R.reshape(a, s); c = R.reshape(b, t)`` -> ``c = R.reshape(a, t)``

    One reshape becomes a view of its input; two fused into one PrimFunc would be a copy.  Nothing
    is folded where the memory is overwritten while one of them holds it, and no argument of the
    function takes the place of a result.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function; reshapes may be left without a reader."""
        return rewritten(mod, _Fold(mod), memory=True)


@relax.expr_functor.mutator
class _Fold(relax.PyExprMutator):
    memory: Memory
    var: relax.Var

    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.first: dict[relax.Expr, relax.Var] = {}
        self.local: set[relax.Var] = set()

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        self.local = {b.var for b in block.bindings}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.var = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        var, before = self.var, call.args[0] if call.args else None
        call = super().visit_call_(call)
        if not is_call(call, "relax.reshape") or not isinstance(call.args[0], relax.Var):
            return call
        inner = self.lookup_binding(call.args[0])
        first = self.first.get(before, before)
        if not is_call(inner, "relax.reshape") or self.memory.changes(var, first, var):
            return call
        source, shape = inner.args[0], call.args[1]
        if isinstance(source, relax.DataflowVar) and source not in self.local:
            return call
        self.first[var] = first
        same = isinstance(shape, relax.ShapeExpr) and same_shape(shape_of(source), shape.values)
        if same and self._is_private(var):
            return source
        return relax.op.reshape(source, shape)

    def _is_private(self, var: relax.Var) -> bool:
        """Tell whether nobody can tell `var` from another name of what it was made of."""
        returned = not self.memory.of(var).isdisjoint(self.memory.returned)
        return not returned and not self.memory.changes_in_use(var, self.first[var])
