"""A legalisation of ``relax.nn.attention`` that survives strongly negative scores.

TVM 0.27's own one writes 0 over masked scores and subtracts the maximum of the row *including*
those zeros. Where every visible score of a row is below about -17 (float16) or -104 (float32),
each exponential underflows to 0, and the row becomes 0 / 0. The first token of a prompt, which
sees only itself, is the usual victim; its NaN then reaches every later token. TVM also keeps
scores and sums in float16. Here they are float32, and a masked score is minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm import ir, relax, te, tirx, topi

from .pattern import is_call, same_shape, shape_of


def attention(
    q: te.Tensor, k: te.Tensor, v: te.Tensor, scale: float, causal_mask: str | None
) -> te.Tensor:
    """Attention in float32 on ``[batch, seq, heads, dim]`` tensors, rounded once at the end."""
    batch, seq_len, heads, dim = q.shape
    context, width = v.shape[1], v.shape[3]
    offset = context - seq_len if causal_mask == "BottomRight" else tirx.IntImm("int64", 0)
    lane = te.reduce_axis((0, dim), name="lane")

    def score(b, h, i, j):
        product = q[b, i, h, lane].astype("float32") * k[b, j, h, lane].astype("float32")
        return te.sum(product, axis=lane)

    scores = te.compute((batch, heads, seq_len, context), score, name="scores")

    def visible(b, h, i, j):
        value = scores[b, h, i, j] * tirx.FloatImm("float32", scale)
        if causal_mask is None:
            return value
        return tirx.if_then_else(j <= i + offset, value, tirx.min_value("float32"))

    masked = te.compute(scores.shape, visible, name="masked")
    weights = topi.nn.softmax(masked, axis=-1)
    row = te.reduce_axis((0, context), name="row")

    def mix(b, i, h, d):
        return te.sum(weights[b, h, i, row] * v[b, row, h, d].astype("float32"), axis=row)

    mixed = te.compute((batch, seq_len, heads, width), mix, name="mixed")
    if q.dtype == "float32":
        return mixed
    return te.compute(mixed.shape, lambda *i: mixed(*i).astype(q.dtype), name="rounded")


def _attention(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    q, k, v = call.args
    attrs = call.attrs
    if attrs.window_size is not None:
        return call  # TVM has no legalisation of a window either; a library must take the call
    scale = int(q.ty.shape[-1]) ** -0.5 if attrs.scale is None else float(attrs.scale)
    return bb.call_te(attention, q, k, v, scale, attrs.causal_mask, primfunc_name_hint="attention")


LEGALIZE_MAP: Mapping[str, Callable] = {"relax.nn.attention": _attention}
"""For ``relax.transform.LegalizeOps(LEGALIZE_MAP)``."""


@tvm.transform.module_pass(opt_level=0, name="UnshareTransposes")
class UnshareTransposes:
    """Give every matmul a transpose of its own.

    rewrite: ``wt = R.permute_dims(w); a = R.matmul(x, wt); b = R.matmul(y, wt)`` ->
    ``wt = R.permute_dims(w); a = R.matmul(x, wt); wt1 = R.permute_dims(w); b = R.matmul(y, wt1)``

    TVM 0.27's FuseTransposeMatmul raises an AttributeError where anything else reads the transpose.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Copy the transposes, and drop those that are left without a reader."""
        mutator = _Unshare(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                mutator.builder_.update_func(gvar, mutator.visit_expr(func))
        return relax.transform.DeadCodeElimination()(mutator.builder_.get())


@relax.expr_functor.mutator
class _Unshare(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, ir.Op) or call.op.name != "relax.matmul":
            return call
        right = call.args[1]
        value = self.lookup_binding(right) if isinstance(right, relax.Var) else None
        is_op = isinstance(value, relax.Call) and isinstance(value.op, ir.Op)
        if value is None or not is_op or value.op.name != "relax.permute_dims":
            return call
        return relax.op.matmul(call.args[0], self.builder_.emit(value), call.attrs.out_dtype)


@tvm.transform.module_pass(opt_level=0, name="FuseTransposeMatmul")
@dataclass(frozen=True)
class FuseTransposeMatmul:
    """TVM's pass of that name, kept away from a product of a tensor with its own transpose.

    ``matmul(x, permute_dims(x))`` has one input where that pass reads two, which ends in an
    IndexError (seen with TVM 0.27).  A module that has one is left to the legalisation.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite `mod`, unless it has a product that TVM's pass cannot take."""
        if any(_multiplies_itself(f) for f in mod.functions.values()):
            return mod
        return relax.transform.FuseTransposeMatmul()(mod)


def _multiplies_itself(func: ir.BaseFunc) -> bool:
    """Tell whether a function multiplies a tensor by its own transpose."""
    if not isinstance(func, relax.Function):
        return False
    values = {b.var: b.value for block in func.body.blocks for b in block.bindings}
    for product in values.values():
        if is_call(product, "relax.matmul"):
            right = values.get(product.args[1])
            if is_call(right, "relax.permute_dims") and right.args[0].same_as(product.args[0]):
                return True
    return False


@tvm.transform.module_pass(opt_level=0, name="FoldReshapes")
@dataclass(frozen=True)
class FoldReshapes:
    """Make one reshape of two in a row, and none where the shape comes out as it was.

    rewrite: ``b = R.reshape(a, s); c = R.reshape(b, t)`` -> ``c = R.reshape(a, t)``

    One reshape becomes a view of its input; two fused into one PrimFunc would be a copy.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function, and drop the reshapes that are left without a reader."""
        mutator = _Fold(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                mutator.builder_.update_func(gvar, mutator.visit_expr(func))
        return relax.transform.DeadCodeElimination()(mutator.builder_.get())


@relax.expr_functor.mutator
class _Fold(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not is_call(call, "relax.reshape") or not isinstance(call.args[0], relax.Var):
            return call
        inner = self.lookup_binding(call.args[0])
        if not is_call(inner, "relax.reshape"):
            return call
        source, shape = inner.args[0], call.args[1]
        if isinstance(shape, relax.ShapeExpr) and same_shape(shape_of(source), list(shape.values)):
            return source
        return relax.op.reshape(source, shape)
