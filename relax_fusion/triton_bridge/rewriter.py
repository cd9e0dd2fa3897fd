"""The calls of PrimFuncs that became launches of Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm import ir, relax

from ..launch.arguments import is_number
from ..launch.prim_func import ExternFunc
from ..matching.pattern import calls_kernel
from ..transforms.modules import with_functions
from .expert_order import PLACE_OF_IDS, ExpertSort
from .experts import ExpertOrder

if TYPE_CHECKING:
    from .emit import Fused


@relax.expr_functor.mutator
class Rewriter(relax.PyExprMutator):
    """Puts the new functions and calls in place of the old."""

    def __init__(
        self,
        mod: ir.IRModule,
        fused: dict[ir.GlobalVar, Fused],
        sorts: dict[Any, tuple[Any, ExpertSort]],
        made: dict[Any, ExternFunc],
    ):
        kept = with_functions(mod, {}, without=fused)
        super().__init__(kept)
        self.kept, self.fused, self.sorts, self.made = kept, fused, sorts, made
        self.orders: dict[Any, ExpertOrder] = {}  # those in scope
        # Functions of other signatures, so other variables, under the same names
        self.launchers = {
            key: self.builder_.add_func(extern.func, key.name_hint if key in fused else "order")
            for key, extern in made.items()
        }

    def run(self) -> ir.IRModule:
        """Return the module with every function visited."""
        for gvar, func in self.kept.functions_items():
            if isinstance(func, relax.Function):
                self.builder_.update_func(gvar, self.visit_expr(func))
        return self.builder_.get()

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        """Rewrite a block; what it has sorted is not known behind it."""
        before = dict(self.orders)
        made = super().visit_binding_block_(block)
        self.orders = before
        return made

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        """Rewrite a block as any other."""
        before = dict(self.orders)
        made = super().visit_dataflow_block_(block)
        self.orders = before
        return made

    def visit_call_(self, before: relax.Call) -> relax.Expr:
        """Rewrite the calls of the functions that were replaced."""
        call = super().visit_call_(before)
        if not calls_kernel(call) or call.args[0] not in self.fused:
            return call
        gvar, args = call.args[0], list(call.args[1].fields)
        fused = self.fused[gvar]
        out = call.ty_args[0]
        place = (out.fields[0] if isinstance(out, ir.TupleType) else out).vdevice
        tensors = dict(zip(fused.inputs, args, strict=True))
        if fused.sort is not None and fused.order is not None:
            key = fused.sort.key(before.args[1].fields[PLACE_OF_IDS])
            order = self._sorted(*self.sorts[key], args[PLACE_OF_IDS], place)
            tensors |= zip(fused.order, order, strict=True)
        return self._call(gvar, fused.inputs, args, tensors, place)

    def _sorted(
        self, source: Any, sort: ExpertSort, ids: relax.Expr, place: relax.VDevice | None
    ) -> ExpertOrder:
        """Return the order of pairs, from here on or from an earlier call."""
        if source not in self.orders:
            read = self.made[sort].inputs  # of the first of equal sorts
            tensors = dict(zip(read, [ids], strict=True))
            both = self.builder_.emit(self._call(sort, read, [ids], tensors, place))
            each = (self.builder_.emit(relax.TupleGetItem(both, n)) for n in (0, 1))
            self.orders[source] = ExpertOrder(*each)
        return self.orders[source]

    def _call(
        self, key: Any, inputs: Sequence[ir.Expr], args: Sequence[Any], tensors: Any, place: Any
    ) -> relax.Expr:
        """Return a call of a new function."""
        given = self.launchers[key], tensors, _symbols(inputs, args), place
        return self.made[key].call(self.builder_, *given)


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
