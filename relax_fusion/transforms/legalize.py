"""Legalisations that TVM lacks: attention of strongly negative scores, bfloat16 norms, GroupNorm.

TVM 0.27's attention writes 0 over masked scores and subtracts the maximum of the row *including*
those zeros. Where every visible score of a row is below about -17 (float16) or -104 (float32),
each exponential underflows to 0, and the row becomes 0 / 0. The first token of a prompt, which
sees only itself, is the usual victim; its NaN then reaches every later token. TVM also keeps
scores and sums in float16. Here they are float32, and a masked score is minus infinity. It has no
windows at all.
Its LayerNorm refuses bfloat16, and ignores ``scale`` and ``center``, as its GroupNorm does, whose
reshapes hide what a row is.  A tensor full of infinity, as masks are, ends in a TypeError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import tvm
from tvm import ir, relax, te, tirx, topi
from tvm.relax.op.op_attrs import AttentionAttrs, LayerNormAttrs

from ..compute.activations import activate
from ..matching.effects import Memory, free_vars
from ..matching.pattern import is_call
from ..matching.shapes import same_shape, shape_of
from .modules import functions_of, rewritten
from .norms import group_norm


def attention(
    q: te.Tensor, k: te.Tensor, v: te.Tensor, bias: te.Tensor | None, attrs: AttentionAttrs
) -> te.Tensor:
    """Attention in float32 on ``[batch, seq, heads, dim]`` tensors, rounded once at the end.

    A row that sees no key is zero, as in the fused kernel.  A scale of None stands for
    ``dim ** -0.5``, which may be dynamic.
    """
    batch, seq_len, heads, dim = q.shape
    context, width = v.shape[1], v.shape[3]
    offset = context - seq_len if attrs.causal_mask == "BottomRight" else tirx.IntImm("int64", 0)
    lane = te.reduce_axis((0, dim), name="lane")
    lowest = tirx.const(float("-inf"), "float32")

    def score(b: Any, h: Any, i: Any, j: Any) -> Any:
        product = q[b, i, h, lane].astype("float32") * k[b, j, h, lane].astype("float32")
        return te.sum(product, axis=lane)

    scores = te.compute((batch, heads, seq_len, context), score, name="scores")
    scores = topi.multiply(scores, _scale(attrs, dim))
    if bias is not None:
        scores = topi.add(scores, topi.cast(bias, "float32"))

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        value = scores[b, h, i, j]
        if attrs.causal_mask is None:
            return value
        seen = j <= i + offset
        if attrs.window_size is not None:
            seen = tirx.all(seen, j > i + offset - attrs.window_size)
        return tirx.if_then_else(seen, value, lowest)

    masked = te.compute(scores.shape, visible, name="masked")
    least, none = tirx.min_value("float32"), tirx.const(0.0, "float32")

    def unless_hidden(value: te.Tensor, otherwise: tirx.PrimExpr) -> te.Tensor:
        """Return `value` where a key is hidden neither by position nor by the bias."""
        return te.compute(
            masked.shape,
            lambda *at: tirx.if_then_else(masked(*at) == lowest, otherwise, value(*at)),
            name="unless_hidden",
        )

    weights = unless_hidden(topi.nn.softmax(unless_hidden(masked, least), axis=-1), none)
    row = te.reduce_axis((0, context), name="row")

    def mix(b: Any, i: Any, h: Any, d: Any) -> Any:
        return te.sum(weights[b, h, i, row] * v[b, row, h, d].astype("float32"), axis=row)

    mixed = te.compute((batch, seq_len, heads, width), mix, name="mixed")
    if q.dtype == "float32":
        return mixed
    return te.compute(mixed.shape, lambda *i: mixed(*i).astype(q.dtype), name="rounded")


def _scale(attrs: AttentionAttrs, dim: tirx.PrimExpr) -> tirx.PrimExpr:
    one = tirx.FloatImm("float32", 1.0)
    if attrs.scale is not None:
        return one * float(attrs.scale)
    if isinstance(dim, tirx.IntImm):
        return one * int(dim) ** -0.5
    return one / tirx.sqrt(dim.astype("float32"))


def _attention(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    if attrs.window_size is not None and attrs.causal_mask is None:
        return call  # a library may know what is meant
    q, k, v, *bias = call.args
    args = (q, k, v, bias[0] if bias else None, attrs)
    return bb.call_te(attention, *args, primfunc_name_hint="attention")


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


def _group_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(group_norm, *call.args, call.attrs, primfunc_name_hint="group_norm")


def _full(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Fill a tensor; of a number that is not finite TVM's own looks for text in a dtype."""
    like, value = call.args
    shape = like if isinstance(like, relax.ShapeExpr) else like.ty.shape
    number = value.value.numpy().item() if isinstance(value, ir.GenericConst) else 0
    if isfinite(number) or not isinstance(shape, relax.ShapeExpr):
        return ir.Op.get(call.op.name).get_attr("FLegalize")(bb, call)
    made = (shape.values, call.ty.dtype, number)
    return bb.call_te(topi.cpp.full, *made, primfunc_name_hint="full")


def _activation(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute an activation in float32, and round it once; TVM has float64 for its own."""
    dtype, name = str(call.args[0].ty.dtype), call.op.name.rsplit(".", 1)[-1]
    if dtype == "float64":
        return ir.Op.get(call.op.name).get_attr("FLegalize")(bb, call)
    function = te.erf if name == "erf" else partial(activate, name)

    def formula(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: function(x(*i).astype("float32")).astype(dtype), name)

    return bb.call_te(formula, call.args[0], primfunc_name_hint=name)


LEGALIZE_MAP: Mapping[str, Callable[..., Any]] = {
    "relax.full": _full,
    "relax.full_like": _full,
    **dict.fromkeys(
        ("relax.erf", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu"), _activation
    ),
    "relax.nn.attention": _attention,
    "relax.nn.attention_bias": _attention,
    "relax.nn.group_norm": _group_norm,
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
    overwritten in place.  A transpose that is itself overwritten is left as it is.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Copy the transposes in every function."""
        return rewritten(mod, _Unshare(mod), memory=True)


@relax.expr_functor.mutator
class _Unshare(relax.PyExprMutator):
    memory: Memory

    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.readers: Counter[relax.Expr] = Counter()
        self.kept: set[relax.Expr] = set()
        self.copies: dict[relax.Expr, list[relax.Var]] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        made = {b.var for b in block.bindings if is_call(b.value, "relax.permute_dims")}
        made = {v for v in made if self.memory.is_constant(v)}
        products = [b.value for b in block.bindings if is_call(b.value, "relax.matmul")]
        self.readers = Counter(p.args[1] for p in products if p.args[1] in made)
        others = [b.value for b in block.bindings if not is_call(b.value, "relax.matmul")]
        read = {v for value in (*others, *(p.args[0] for p in products)) for v in free_vars(value)}
        self.kept = {v for v in made if v in read or not isinstance(v, relax.DataflowVar)}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        count = self.readers[binding.var]
        if not count or binding.var in self.kept:
            super().visit_var_binding_(binding)
        if count:
            source = self.visit_expr(binding.value.args[0])
            # TVM tells values apart by object: each copy is a call of its own.
            self.copies[binding.var] = [
                self.builder_.emit(relax.op.permute_dims(source, binding.value.attrs.axes))
                for _ in range(count)
            ]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if is_call(call, "relax.matmul") and self.copies.get(call.args[1]):
            right = self.copies[call.args[1]].pop(0)
            return relax.op.matmul(self.visit_expr(call.args[0]), right, call.attrs.out_dtype)
        return super().visit_call_(call)


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
        for func in functions_of(mod, relax.Function).values():
            if not _takes_transposes(func, Memory(func, mod)):
                return mod
        return relax.transform.FuseTransposeMatmul()(mod)


def _takes_transposes(func: relax.Function, memory: Memory) -> bool:
    """Tell whether TVM's pass may let every matmul read the source of its transposed factor."""
    values = {b.var: b.value for block in func.body.blocks for b in block.bindings}
    for var, product in values.items():
        if not is_call(product, "relax.matmul"):
            continue
        right = product.args[1]
        transposed = values.get(right)
        if not is_call(transposed, "relax.permute_dims"):
            continue
        source = transposed.args[0]
        if source.same_as(product.args[0]):
            return False
        if any(memory.changes(expr, right, var) for expr in (source, right)):
            return False
    return True


@tvm.transform.module_pass(opt_level=0, name="FoldReshapes")
@dataclass(frozen=True)
class FoldReshapes:
    """Make one reshape of two in a row, and none where the shape comes out as it was.

    rewrite: ``b = R.reshape(a, s); c = R.reshape(b, t)`` -> ``c = R.reshape(a, t)``

    One reshape becomes a view of its input; two fused into one PrimFunc would be a copy.  Nothing
    is folded where the memory is overwritten while one of them holds it, and no argument of the
    function takes the place of a result.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
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
