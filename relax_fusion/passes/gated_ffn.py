"""FuseGatedFFN: gate, up and their product become one kernel; so does a plain MLP's first half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax

from ..errors import Reason
from ..matching.activations import activation
from ..matching.constants import binary
from ..matching.epilogue import epilogue
from ..matching.linear import Linear, linear
from ..matching.movements import Cut, cut_of, ungrouped
from ..matching.norms import normalisation
from ..matching.pattern import BlockView, KernelArg, KernelOut, Match, check_inner, guard
from ..matching.post_norms import built, prologues, sum_prologues
from ..matching.projections import Prologue, made_by, norm_matmul, plain_prologue, readers_of
from ..matching.roundings import refuse_kept_roundings
from ..matching.shapes import (
    as_dim,
    check_dtype,
    check_operands,
    dtype_of,
    same_shape,
    shape_of,
    static,
)
from ..transforms.modules import module_pass
from ..workload import ACTIVATIONS, GatedFFN
from .driver import FusingPass


@dataclass(frozen=True)
class _Half:
    """One operand of the product: a projection, or one part of a merged one."""

    linear: Linear
    part: int | None
    bias: relax.Expr | None
    covers: tuple[relax.Var, ...]


@module_pass
class FuseGatedFFN(FusingPass):
    """Fuse the first half of a feed-forward block, with the norm in front of it.

    rewrite::

        h = R.nn.rms_norm(x, g)                                 # optional
        a = R.split(R.matmul(h, R.permute_dims(W)), 2, axis=-1) # or two matmuls; biases optional
        y = R.multiply(R.nn.silu(a[0]), a[1])                   # either order; gelu, tanh, relu
            ->
        y = R.call_tir(fuse_gated_ffn_..., (x, g, W))

        y = R.nn.gelu(R.add(R.matmul(R.nn.layer_norm(x, g, s), W), b))   # plain MLP
            ->
        y = R.call_tir(fuse_gated_ffn_..., (x, g, s, W, b))

    A sum of a norm and a residual, in front of that norm or instead of it, is taken along as by
    `FuseRMSNormMatmul` and `FuseProjections`.

    Reshapes of the rows, as PyTorch's exporter writes them around each matmul, may stand anywhere
    between the norm and the product; so may casts around a gate's activation to float32 and back.

    declines when:
        gate or up is read elsewhere; their weights differ in layout or size, or have a dynamic one;
        their rows are reshaped differently; the split is not into two halves of the last axis; the
        gate is rounded to fewer bits and widened again; and as `FuseRMSNormMatmul`.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Sequence[Match] | None:
        """Match the product, or the activated projection, that `var` is."""
        return self._product(view, var) or self._plain(view, var)

    def _product(self, view: BlockView, var: relax.Var) -> Sequence[Match] | None:
        """Match the product of an activated gate and its other half, in either order."""
        if activation(view, var) is not None:  # ``x * sigmoid(x)``
            return None
        for gate, up in binary(view, var, "relax.multiply"):
            found = self._gated(view, var, gate, up)
            if found is not None:
                return found
        return None

    def _gated(
        self, view: BlockView, var: relax.Var, gate: relax.Expr, up: relax.Expr
    ) -> Sequence[Match] | None:
        active, behind = _uncast(view, gate)
        act = activation(view, active)
        if act is None:
            return None
        source, between = _uncast(view, act.source)
        g, u = _half(view, source), _half(view, up)
        if g is None or u is None:
            return None
        merged = g.part is not None
        x, reshapes = _input(view, g.linear, u.linear)
        if x is None or (u.part is not None) != merged:
            return None
        if not _keeps_precision(view, (*between, *behind), dtype_of(x)):
            return None
        if merged and not _two_halves(g, u):
            return None
        for half in (gate, up):
            fits = same_shape((shape_of(half) or [])[:-1], (shape_of(var) or [])[:-1])
            detail = f"rows of shape {shape_of(half)} become a product of shape {shape_of(var)}"
            guard(fits, Reason.SHAPE, detail)
        covers = (*reshapes, *g.covers, *u.covers, *between, *act.covers, *behind, var)
        found = _prologues(view, x, {g.linear.var, u.linear.var, *reshapes})
        return built(
            found, lambda before: [self._build(view, var, (g, u), act.name, (before, covers))]
        )

    def _build(
        self,
        view: BlockView,
        var: relax.Var,
        halves: tuple[_Half, _Half],
        act: str,
        around: tuple[Prologue, tuple[relax.Var, ...]],
    ) -> Match:
        """Check sizes, dtypes and leaks, and describe the kernel."""
        (g, u), (before, covers) = halves, around
        merged = g.part is not None
        guard(
            g.linear.layout == u.linear.layout,
            Reason.LAYOUT,
            f"gate is {g.linear.layout} and up {u.linear.layout}",
        )
        widths = [static(half.linear.n, "the weight's output features") for half in halves]
        n = widths[0] // 2 if merged else widths[0]
        guard(merged or widths[1] == n, Reason.SHAPE, f"gate has {n} features, up {widths[1]}")
        guard((g.bias is None) == (u.bias is None), Reason.ATTRIBUTE, "only one half has a bias")
        weights = [g] if merged else [g, u]
        guard(
            g.linear.form == u.linear.form,
            Reason.LAYOUT,
            "the weights of gate and up are stored in different formats",
        )
        args = dict(before.args)
        for p, half in enumerate(weights):
            if half.bias is not None:
                args[f"bias{p}"] = KernelArg(half.bias)
        dtype = dtype_of(before.source.expr)
        check_operands(
            [*(a.expr for a in args.values()), *(h.linear.weight for h in weights)], dtype
        )
        for p, half in enumerate(weights):
            args |= half.linear.weights(f"w{p}")
        work = GatedFFN(
            as_dim(before.source.rows, self.options.bounds),
            before.source.k,
            n,
            g.linear.layout,
            merged,
            not merged or g.part == 0,
            act,
            before.norm,
            dtype,
            check_dtype(dtype_of(var), "the result"),
            g.bias is not None,
            packed=g.linear.form,
        )
        outs = {**before.outs, "out0": KernelOut(var, (before.source.rows, n), work.out_dtype)}
        everything = tuple(dict.fromkeys((*before.covers, *covers)))
        check_inner(view, everything, {o.var for o in outs.values()})
        refuse_kept_roundings(view, everything)
        packed = " packed" * (work.packed is not None)
        spelling = f"{before.spelling} {'merged' if merged else 'separate'}{packed} {act}"
        return Match.of(spelling, everything, (args, outs), work)

    def _plain(self, view: BlockView, var: relax.Var) -> Sequence[Match] | None:
        """Match ``act(norm(x) @ W + b)`` where no other matmul reads the norm."""
        lin = linear(view, var)
        if lin is None:
            return None
        normed = normalisation(view, lin.x)
        chain = epilogue(view, lin, made_by(view, normed) if normed is not None else set())
        if not set(chain.projection.epilogue) & set(ACTIVATIONS):
            return None
        if normed is not None and len(readers_of(view, normed.var)) > 1:
            return None  # FuseRMSNormMatmul takes all readers of a norm together
        found = _prologues(view, lin.x, {lin.var})
        matches = built(found, lambda before: [self._projected(view, lin, before)])
        return [replace(m, spelling=f"plain MLP: {m.spelling}") for m in matches]

    def _projected(self, view: BlockView, lin: Linear, before: Prologue) -> Match:
        chain = epilogue(view, lin, {*before.covers})
        return norm_matmul(view, before, [chain], self.options.bounds)


def _prologues(view: BlockView, x: relax.Expr, readers: set[relax.Var]) -> list[Prologue]:
    """Take the norm along if this chain is all that projects its result."""
    normed = normalisation(view, x)
    if normed is None:
        return sum_prologues(view, x, readers)
    others = [lin for lin in readers_of(view, normed.var) if lin.var not in readers]
    return [plain_prologue(x)] if others else prologues(view, normed, readers)


def _half(view: BlockView, expr: relax.Expr) -> _Half | None:
    """Read one operand of the product: ``[split part of] x @ W [+ bias]``, reshapes between."""
    if not isinstance(expr, relax.Var):
        return None
    part: int | None = None
    inner, covers = ungrouped(view, expr)
    item = view.defs.get(inner)
    if isinstance(item, relax.TupleGetItem):
        cut = cut_of(view, inner)
        if cut is None or not _is_half(cut):
            return None
        part, covers = int(cut.start > 0), (item.tuple_value, inner, *covers)
        inner, reshapes = ungrouped(view, cut.source)
        covers = (*reshapes, *covers)
    bias = None
    for data, other in binary(view, inner, "relax.add"):
        product, reshapes = ungrouped(view, data)
        lin = linear(view, product)
        if lin is not None and _is_bias(other, lin):
            bias, covers, inner = other, (*reshapes, inner, *covers), product
            break
    lin = linear(view, inner)
    return _Half(lin, part, bias, (*lin.covers, *covers)) if lin is not None else None


def _input(
    view: BlockView, gate: Linear, up: Linear
) -> tuple[relax.Expr | None, tuple[relax.Var, ...]]:
    """Return what gate and up both project, and the reshapes of it that nothing else reads."""
    (x, to_gate), (other, to_up) = ungrouped(view, gate.x), ungrouped(view, up.x)
    only: tuple[relax.Var, ...] = ()
    for reshape in dict.fromkeys((*reversed(to_gate), *reversed(to_up))):
        if set(view.uses(reshape)) <= {gate.var, up.var, *only} and not view.escapes(reshape):
            only = (reshape, *only)
    return x if x.same_as(other) else None, only


def _uncast(view: BlockView, expr: relax.Expr) -> tuple[relax.Expr, tuple[relax.Var, ...]]:
    """Look through reshapes of the rows and casts; return those too, `expr` the last."""
    expr, path = ungrouped(view, expr)
    while (cast := view.call(expr, "relax.astype")) is not None and isinstance(expr, relax.Var):
        path = (expr, *path)
        expr, reshapes = ungrouped(view, cast.args[0])
        path = (*reshapes, *path)
    return expr, path


def _keeps_precision(view: BlockView, path: tuple[relax.Var, ...], dtype: str) -> bool:
    """Tell whether casts are to float32 or to the input's dtype: the kernel computes in float32."""
    casts = [v for v in path if view.call(v, "relax.astype") is not None]
    return all(dtype_of(v) in ("float32", dtype) for v in casts)


def _two_halves(g: _Half, u: _Half) -> bool:
    """Tell whether two parts are the different halves of the same biased projection."""
    same_bias = g.bias is u.bias or (u.bias is not None and u.bias.same_as(g.bias))
    return g.linear.var.same_as(u.linear.var) and same_bias and g.part != u.part


def _is_bias(expr: relax.Expr, lin: Linear) -> bool:
    shape = shape_of(expr)
    return shape is not None and len(shape) == 1 and same_shape(shape, (lin.n,))


def _is_half(cut: Cut) -> bool:
    """Tell whether a cut leaves one of two equal parts of the last axis."""
    last, size = len(shape_of(cut.source) or ()) - 1, cut.stop - cut.start
    return cut.axis == last and cut.extent == 2 * size and cut.start in (0, size)
