"""Constants stay as they are: who overwrites one, or gives one to the caller, has a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm import ir, relax, tirx, topi

from ..matching.effects import Memory
from ..matching.pattern import is_call
from ..matching.shapes import shape_of
from ..transforms.modules import functions_of, module_pass, rewritten, with_functions
from ..tvm_ir import GenericConst

CALL_TIR = ir.Op.get("relax.call_tir")
PACKED = ir.Op.get("relax.call_dps_packed")


@module_pass
class CopyConstants:
    """Copy constants that are overwritten in place, or returned, whenever they are evaluated.

    rewrite: ``k = const; y = R.call_tir_inplace(f, (k,))`` ->
    ``k = R.call_tir(copy, (const,)); y = R.call_tir_inplace(f, (k,))``

    There is one tensor of a constant for all calls of a function: what the function, or its caller,
    writes there would be the constant of the next call.  Empty constants are computed as well: TVM
    0.27 exports them, and cannot load the library.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return rewritten(mod, _Copy(mod), memory=True)


@relax.expr_functor.mutator
class _Copy(relax.PyExprMutator):
    memory: Memory

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, value = binding.var, binding.value
        if _is_constant(value) and (self.memory.is_exposed(var) or _is_empty(value)):
            binding = relax.VarBinding(var, self._copy(value))
        elif isinstance(value, relax.Tuple):
            binding = relax.VarBinding(var, self._owned(value, self._is_copied))
        super().visit_var_binding_(binding)

    def visit_seq_expr_(self, body: relax.SeqExpr) -> relax.Expr:
        named = {
            c: relax.Var("constant", c.ty) for c in _constants(body.body) if self._is_copied(c)
        }
        if named:
            copies = [relax.VarBinding(v, self._copy(c)) for c, v in named.items()]
            blocks = [*body.blocks, relax.BindingBlock(copies)]
            body = relax.SeqExpr(blocks, _with(body.body, named))
        return super().visit_seq_expr_(body)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        # A PrimFunc that is not called in place writes and returns none of its arguments.
        exposed = _is_empty if is_call(call, "relax.call_tir") else self._is_copied
        args = [self._owned(a, exposed) for a in call.args]
        if not all(map(relax.Expr.same_as, args, call.args)):
            call = relax.Call(call.op, args, call.attrs, call.ty_args)
        return super().visit_call_(call)

    def _owned(self, expr: relax.Expr, is_copied: Callable[[relax.Expr], bool]) -> relax.Expr:
        """Return `expr` with copies in the place of constants that are to stay as they are."""
        copies = {c: self.builder_.emit(self._copy(c)) for c in _constants(expr) if is_copied(c)}
        return _with(expr, copies) if copies else expr

    def _is_copied(self, constant: relax.Expr) -> bool:
        return self.memory.is_exposed(constant) or _is_empty(constant)

    def _copy(self, constant: relax.Expr) -> relax.Call:
        if _is_empty(constant):
            ty = constant.ty
            return self.builder_.call_te(
                topi.full, ty.shape, ty.dtype, 0, primfunc_name_hint="full"
            )
        return self.builder_.call_te(topi.identity, constant, primfunc_name_hint="copy")


@module_pass
class FoldConstants:
    """TVM's FoldConstant, but for tensors that are overwritten in place, returned, or empty.

    Those are computed in each call.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Fold the other constants of `mod`."""
        hidden: dict[str, ir.GlobalVar] = {}
        functions = {
            gvar: _Hide(Memory(func, mod), hidden).visit_expr(func)
            for gvar, func in functions_of(mod, relax.Function).items()
        }
        folded = relax.transform.FoldConstant()(with_functions(mod, functions))
        shown = {gvar: _Show(hidden).visit_expr(folded[gvar]) for gvar in functions}
        return with_functions(folded, shown)


@relax.expr_functor.mutator
class _Hide(relax.PyExprMutator):
    """Writes calls of PrimFuncs as calls of packed functions, which TVM does not fold."""

    def __init__(self, memory: Memory, hidden: dict[str, ir.GlobalVar]):
        super().__init__()
        self.memory, self.hidden = memory, hidden

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, call = binding.var, binding.value
        if is_call(call, "relax.call_tir") and (self.memory.is_exposed(var) or _is_empty(var)):
            func, *args = call.args
            name = f"relax_fusion.{func.name_hint}"
            self.hidden[name] = func
            packed = relax.Call(PACKED, [relax.ExternFunc(name), *args], call.attrs, call.ty_args)
            binding = relax.VarBinding(var, packed)
        super().visit_var_binding_(binding)


@relax.expr_functor.mutator
class _Show(relax.PyExprMutator):
    """Writes them as they were."""

    def __init__(self, hidden: dict[str, ir.GlobalVar]):
        super().__init__()
        self.hidden = hidden

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = str(call.args[0].global_symbol) if is_call(call, "relax.call_dps_packed") else ""
        if name not in self.hidden:
            return call
        _, *args = call.args
        return relax.Call(CALL_TIR, [self.hidden[name], *args], call.attrs, call.ty_args)


def _is_empty(tensor: relax.Expr) -> bool:
    return any(isinstance(d, tirx.IntImm) and int(d) == 0 for d in shape_of(tensor) or ())


def _is_constant(expr: relax.Expr) -> bool:
    """Tell whether `expr` is a constant tensor; a dtype is a constant too, but has no memory."""
    return isinstance(expr, GenericConst) and isinstance(expr.ty, relax.TensorType)


def _constants(expr: relax.Expr) -> Iterator[relax.Expr]:
    """Yield the constants in a tensor or a tuple."""
    if _is_constant(expr):
        yield expr
    elif isinstance(expr, relax.Tuple):
        for field in expr.fields:
            yield from _constants(field)


def _with(expr: relax.Expr, known: dict[relax.Expr, relax.Expr]) -> relax.Expr:
    """Return a tensor or a tuple with constants replaced."""
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_with(field, known) for field in expr.fields])
    return known.get(expr, expr)
