"""Matmuls that read their right factor as it is stored, where TVM's pass for them fails."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm import ir, relax, te, tirx

from ..matching.effects import Memory
from ..matching.expressions import is_number
from ..matching.pattern import is_call
from ..matching.shapes import shape_of
from ..transforms.modules import module_pass, rewritten


@module_pass
class FuseTransposeMatmul:
    """Make one PrimFunc of a matmul and the transpose of its right factor.

    rewrite: ``t = R.permute_dims(w); y = R.matmul(x, t)`` -> ``y = R.call_tir(NT_matmul, (x, w))``

    TVM's pass of that name raises an AttributeError where anything else reads the transpose, an
    InternalError where a second matmul does, and an IndexError of ``matmul(x, permute_dims(x))``.

    declines when:
        the transpose moves other axes than the last two, or is made outside of the dataflow block;
        ``w`` is overwritten in place in front of the matmul; ``x`` is a vector; a shape is not
        known.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function; transposes may be left without a reader."""
        return rewritten(mod, _Fuse(mod), memory=True)


@relax.expr_functor.mutator
class _Fuse(relax.PyExprMutator):
    memory: Memory

    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.transposed: dict[relax.Expr, relax.Expr] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        values = {b.var: b.value for b in block.bindings}
        self.transposed = {v: e.args[0] for v, e in values.items() if _swaps_the_last(e)}
        made = super().visit_dataflow_block_(block)
        self.transposed = {}
        return made

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, call = binding.var, binding.value
        if is_call(call, "relax.matmul") and call.args[1] in self.transposed:
            stored, (x, right) = self.transposed[call.args[1]], call.args
            known = shape_of(var) is not None and len(shape_of(x) or []) > 1
            if known and not any(self.memory.changes(e, right, var) for e in (stored, right)):
                compute = partial(_product, dtype=str(call.ty.dtype))
                args = [self.visit_expr(x), self.visit_expr(stored)]
                call = self.builder_.call_te(compute, *args, primfunc_name_hint="NT_matmul")
                binding = relax.VarBinding(var, call)
        super().visit_var_binding_(binding)


def _swaps_the_last(value: relax.Expr) -> bool:
    """Tell whether a value is a transpose of the last two axes, and of no others."""
    shape = shape_of(value.args[0]) if is_call(value, "relax.permute_dims") else None
    if shape is None or len(shape) < 2:
        return False
    axes, rank = value.attrs.axes, len(shape)
    return list(axes or range(rank)[::-1]) == [*range(rank - 2), rank - 1, rank - 2]


def _product(x: te.Tensor, w: te.Tensor, dtype: str) -> te.Tensor:
    """Multiply ``[..., m, k]`` by ``[..., n, k]``, whose batches broadcast."""
    *batch, n, depth = w.shape
    factors = relax.TensorType(x.shape, dtype), relax.TensorType([*batch, depth, n], dtype)
    product = relax.op.matmul(*(relax.Var("factor", ty) for ty in factors))
    shape = shape_of(relax.BlockBuilder().normalize(product))
    k = te.reduce_axis((0, x.shape[-1]), "k")

    def factor(tensor: te.Tensor, batch: Sequence[tirx.Expr], row: tirx.Expr) -> tirx.Expr:
        own = batch[len(batch) - len(tensor.shape) + 2 :]
        places = [0 if is_number(d, 1) else i for i, d in zip(own, tensor.shape, strict=False)]
        return tensor(*places, row, k).astype(dtype)

    def element(*at: tirx.Expr) -> tirx.Expr:
        *batch, i, j = at
        return te.sum(factor(x, batch, i) * factor(w, batch, j), axis=k)

    return te.compute(shape, element, "NT_matmul")
