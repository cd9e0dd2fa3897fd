"""Legalisations that TVM lacks: attention of strongly negative scores, bfloat16 LayerNorm.

TVM 0.27's attention writes 0 over masked scores and subtracts the maximum of the row *including*
those zeros. Where every visible score of a row is below about -17 (float16) or -104 (float32),
each exponential underflows to 0, and the row becomes 0 / 0. The first token of a prompt, which
sees only itself, is the usual victim; its NaN then reaches every later token. TVM also keeps
scores and sums in float16. Here they are float32, and a masked score is minus infinity.
Its LayerNorm refuses bfloat16, and ignores ``scale`` and ``center``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, relax, te, tirx, topi
from tvm.relax.op.op_attrs import LayerNormAttrs

from .pattern import is_call
from .rebuild import overwritten_by
from .shapes import same_shape, shape_of


def attention(
    q: te.Tensor, k: te.Tensor, v: te.Tensor, scale: float | None, causal_mask: str | None
) -> te.Tensor:
    """Attention in float32 on ``[batch, seq, heads, dim]`` tensors, rounded once at the end.

    A `scale` of None stands for ``dim ** -0.5``, which may be dynamic.
    """
    batch, seq_len, heads, dim = q.shape
    context, width = v.shape[1], v.shape[3]
    offset = context - seq_len if causal_mask == "BottomRight" else tirx.IntImm("int64", 0)
    lane = te.reduce_axis((0, dim), name="lane")
    one = tirx.FloatImm("float32", 1.0)
    factor = one / tirx.sqrt(dim.astype("float32")) if scale is None else one * scale

    def score(b, h, i, j):
        product = q[b, i, h, lane].astype("float32") * k[b, j, h, lane].astype("float32")
        return te.sum(product, axis=lane)

    scores = te.compute((batch, heads, seq_len, context), score, name="scores")

    def visible(b, h, i, j):
        value = scores[b, h, i, j] * factor
        if causal_mask is None:
            return value
        return tirx.if_then_else(j <= i + offset, value, tirx.min_value("float32"))

    masked = te.compute(scores.shape, visible, name="masked")
    weights = topi.nn.softmax(masked, axis=-1)
    row = te.reduce_axis((0, context), name="row")

    def mix(b, i, h, d):
        weight = weights[b, h, i, row]
        if causal_mask is not None:  # a row that sees no key is zero, as in the fused kernel
            weight = tirx.if_then_else(row <= i + offset, weight, tirx.const(0.0, "float32"))
        return te.sum(weight * v[b, row, h, d].astype("float32"), axis=row)

    mixed = te.compute((batch, seq_len, heads, width), mix, name="mixed")
    if q.dtype == "float32":
        return mixed
    return te.compute(mixed.shape, lambda *i: mixed(*i).astype(q.dtype), name="rounded")


def _attention(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    q, k, v = call.args
    attrs = call.attrs
    if attrs.window_size is not None:
        return call  # TVM has no legalisation of a window either; a library must take the call
    dim = q.ty.shape[-1]
    scale = None if attrs.scale is None else float(attrs.scale)
    if scale is None and isinstance(dim, tirx.IntImm):
        scale = int(dim) ** -0.5
    return bb.call_te(attention, q, k, v, scale, attrs.causal_mask, primfunc_name_hint="attention")


def layer_norm(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor, attrs: LayerNormAttrs) -> te.Tensor:
    """Layer normalisation in float32, rounded once at the end."""
    wide = [topi.cast(t, "float32") for t in (x, gamma, beta)]
    if not attrs.scale:
        wide[1] = topi.full_like(wide[1], 1.0)
    if not attrs.center:
        wide[2] = topi.full_like(wide[2], 0.0)
    made = topi.nn.layer_norm(*wide, axis=attrs.axes, epsilon=attrs.epsilon)
    return topi.cast(made, x.dtype)


def _layer_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    if str(call.args[0].ty.dtype) != "bfloat16" and attrs.scale and attrs.center:
        return ir.Op.get("relax.nn.layer_norm").get_attr("FLegalize")(bb, call)
    return bb.call_te(layer_norm, *call.args, attrs, primfunc_name_hint="layer_norm")


LEGALIZE_MAP: Mapping[str, Callable] = {
    "relax.nn.attention": _attention,
    "relax.nn.layer_norm": _layer_norm,
}
"""For ``relax.transform.LegalizeOps(LEGALIZE_MAP)``."""


@tvm.transform.module_pass(opt_level=0, name="UnshareTransposes")
@dataclass(frozen=True)
class UnshareTransposes:
    """Give every matmul a transpose of its own.

    rewrite: ``wt = R.permute_dims(w); a = R.matmul(x, wt); b = R.matmul(y, wt)`` ->
    ``t1 = R.permute_dims(w); t2 = R.permute_dims(w); a = R.matmul(x, t1); b = R.matmul(y, t2)``

    TVM 0.27's FuseTransposeMatmul raises an AttributeError where anything else reads the transpose.
    The copies stand where the original does: between there and its readers, the tensor may be
    overwritten in place.
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
    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.readers: Counter[relax.Expr] = Counter()
        self.copies: dict[relax.Expr, list[relax.Var]] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        made = {b.var for b in block.bindings}
        rights = [b.value.args[1] for b in block.bindings if is_call(b.value, "relax.matmul")]
        self.readers = Counter(r for r in rights if r in made)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        if is_call(binding.value, "relax.permute_dims"):
            source = self.visit_expr(binding.value.args[0])
            # TVM tells values apart by object: each copy is a call of its own.
            self.copies[binding.var] = [
                self.builder_.emit(relax.op.permute_dims(source, binding.value.attrs.axes))
                for _ in range(self.readers[binding.var])
            ]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        new = super().visit_call_(call)
        if is_call(call, "relax.matmul") and self.copies.get(call.args[1]):
            right = self.copies[call.args[1]].pop(0)
            return relax.op.matmul(new.args[0], right, call.attrs.out_dtype)
        return new


@tvm.transform.module_pass(opt_level=0, name="FuseTransposeMatmul")
@dataclass(frozen=True)
class FuseTransposeMatmul:
    """TVM's pass of that name, kept away from two modules that it does not take.

    ``matmul(x, permute_dims(x))`` has one input where that pass reads two, which ends in an
    IndexError (seen with TVM 0.27).  And where a tensor is overwritten in place between its
    transpose and the matmul, the fused kernel would read the new values.  A module that has either
    is left to the legalisation.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite `mod`, unless it has a product that TVM's pass cannot take."""
        for func in mod.functions.values():
            if isinstance(func, relax.Function):
                bindings = [b for block in func.body.blocks for b in block.bindings]
                if _multiplies_itself(bindings) or _overwrites_a_factor(bindings):
                    return mod
        return relax.transform.FuseTransposeMatmul()(mod)


def _multiplies_itself(bindings: Sequence[relax.Binding]) -> bool:
    """Tell whether a tensor is multiplied by its own transpose."""
    values = {b.var: b.value for b in bindings}
    for product in values.values():
        if is_call(product, "relax.matmul"):
            right = values.get(product.args[1])
            if is_call(right, "relax.permute_dims") and right.args[0].same_as(product.args[0]):
                return True
    return False


def _overwrites_a_factor(bindings: Sequence[relax.Binding]) -> bool:
    """Tell whether a tensor is overwritten between its transpose and a matmul that reads that."""
    sources: dict[relax.Var, relax.Expr] = {}
    stale: set[relax.Expr] = set()
    for binding in bindings:
        value = binding.value
        if is_call(value, "relax.permute_dims"):
            sources[binding.var] = value.args[0]
        elif is_call(value, "relax.matmul") and value.args[1] in stale:
            return True
        overwritten = set(overwritten_by(value))
        stale.update(t for t, source in sources.items() if source in overwritten)
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
