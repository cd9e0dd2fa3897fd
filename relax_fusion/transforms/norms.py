"""Norms that no pass took: one kernel each, with the casts and the sum that belong to them."""

from __future__ import annotations

from functools import partial

from tvm import ir, relax, te, topi

from ..matching.effects import Memory
from ..matching.norms import Normed, normalisation
from ..matching.pattern import BlockView, Refused
from ..matching.shapes import dtype_of, same_shape, shape_of
from ..workload import FLOAT_BYTES, Norm
from .modules import module_pass, rewritten


@module_pass
class LegalizeNorms:
    """Make one PrimFunc of a norm that is more than an operator.

    rewrite::

        g1 = R.add(R.astype(g, "float32"), R.const(1.0))
        h  = R.nn.rms_norm(R.astype(x, "float32"), g1, axes=[-1], epsilon=eps)
        y  = R.astype(h, "float16")
            ->
        y = R.call_tir(rms_norm, (x, g))      # the rest stays where anything else reads it

    declines when:
        the norm is not over the last axis; it is an operator alone, which `LegalizeOps` takes;
        something writes to a tensor in between.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function; bindings may be left without a reader."""
        return rewritten(mod, _Legalize(mod), memory=True)


def rows_normalised(
    norm: Norm, dtype: str, x: te.Tensor, gamma: te.Tensor, beta: te.Tensor | None = None
) -> te.Tensor:
    """Normalise the last axis in float32, rounded once, to `dtype`."""
    wide, factor = _cast(x, "float32"), _cast(gamma, "float32")
    if norm.unit_offset:
        weight = factor
        factor = te.compute(weight.shape, lambda k: weight(k) + 1.0, "factor")
    axes = [len(x.shape) - 1]
    if norm.kind == "rms":
        made = topi.nn.rms_norm(wide, factor, axes, norm.eps)
    else:
        made = topi.nn.layer_norm(wide, factor, _cast(beta, "float32"), axes, norm.eps)
    return _cast(made, dtype)


def _cast(tensor: te.Tensor, dtype: str) -> te.Tensor:
    return tensor if tensor.dtype == dtype else topi.cast(tensor, dtype)


@relax.expr_functor.mutator
class _Legalize(relax.PyExprMutator):
    memory: Memory

    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.mod = mod
        self.norms: dict[relax.Var, tuple[Norm, list[relax.Expr]]] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        view = BlockView(block, self.mod, memory=self.memory)
        self.norms, inside = {}, set[relax.Var]()
        for binding in reversed(block.bindings):
            normed = None if binding.var in inside else _more_than_an_operator(view, binding.var)
            if normed is not None:
                self.norms[binding.var] = normed.norm, _operands(view, normed)
                inside.update(normed.covers)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.norms:
            norm, operands = self.norms[binding.var]
            compute = partial(rows_normalised, norm, dtype_of(binding.var))
            hint = f"{norm.kind}_norm"
            call = self.builder_.call_te(compute, *operands, primfunc_name_hint=hint)
            binding = relax.VarBinding(binding.var, call)
        super().visit_var_binding_(binding)


def _more_than_an_operator(view: BlockView, var: relax.Var) -> Normed | None:
    """Return the norm that defines `var`, None if there is none to be told."""
    try:
        normed = normalisation(view, var)
    except Refused:
        return None
    if normed is None or dtype_of(var) not in ("float16", "bfloat16", "float32"):
        return None
    operands, shape = _operands(view, normed), shape_of(normed.source) or []
    width = shape[-1:]
    if len(shape) == 1:  # TVM's RMSNorm takes rows only
        return None
    if not all(same_shape(shape_of(e), width) for e in operands[1:]):
        return None
    if not all(map(view.memory.is_constant, operands)):
        return None
    casts = any(dtype_of(e) != "float32" for e in operands[1:]) and dtype_of(var) == "float32"
    return normed if normed.norm.unit_offset or casts or len(normed.covers) > 1 else None


def _operands(view: BlockView, normed: Normed) -> list[relax.Expr]:
    """Return the rows, gamma and beta, the parameters without a cast from another float."""
    parameters = [normed.gamma] if normed.beta is None else [normed.gamma, normed.beta]
    casts = [view.call(e, "relax.astype") for e in parameters]
    plain = [
        e if cast is None or dtype_of(cast.args[0]) not in FLOAT_BYTES else cast.args[0]
        for e, cast in zip(parameters, casts, strict=True)
    ]
    return [normed.source, *plain]
