"""FuseExperts: rows by the weights of their experts, which are read where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, tirx

from ..errors import Reason
from ..matching.activations import activation
from ..matching.by_expert import Pairs, Product, in_order, moved_on, product_of
from ..matching.constants import binary, scalar
from ..matching.dequantized import refuse_dequantized
from ..matching.movements import cut_of
from ..matching.packed import packed_weight
from ..matching.pattern import BlockView, KernelArg, KernelOut, Match, check_inner, guard
from ..matching.roundings import refuse_kept_roundings
from ..matching.shapes import as_dim, dtype_of, product, same_shape, shape_of
from ..transforms.modules import module_pass
from ..workload import ExpertMatmul, Gate
from .driver import FusingPass

_WIDEST = 3.0e38
"""A bound beyond it bounds nothing that a kernel tells from infinity."""


@dataclass(frozen=True)
class _Columns:
    """What becomes of the product of a pair of a row and an expert."""

    product: Product
    n: int
    activation: str = ""
    gate: Gate | None = None


@module_pass
class FuseExperts(FusingPass):
    """Multiply each row by the weights of its experts, and take along what follows.

    rewrite::

        w = R.take(W, ids, axis=0)                     # [rows, n, k]: never written
        y = R.squeeze(R.matmul(w, R.expand_dims(x, -1)), -1)
        g, u = R.split(y, 2, axis=-1)
        h = R.multiply(R.nn.silu(g), u)
            ->
        h = R.call_tir(fuse_experts_..., (x, ids, W))

    Biases that are looked up by the same numbers, an activation or a gate (of halves, or of columns
    in turns, clipped or not), shares of the experts of a row with their sum, and a residual behind
    that are taken along.  Weights of few bits that the graph decodes are read as they are stored.

    declines when:
        weights are no float matrices of known sizes, or are decoded from what is no matrix; indices
        wrap around; a product is read by more than what one kernel makes.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the product, the gate or the sum that `var` is."""
        if in_order(view, var) is not var:
            return None  # it moves what another binding makes
        return self._summed(view, var) or self._apart(view, var)

    def _apart(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match what each pair of a row and an expert makes."""
        columns = _columns(view, var)
        if columns is None:
            return None
        ids = _source(view, columns.product.ids)
        *rows, last = shape_of(ids) or [1]
        chosen = int(last) if rows and isinstance(last, tirx.IntImm) else 1
        rows = [*rows] if chosen > 1 or rows else [last]
        pairs = Pairs(view, product(rows), chosen)
        return self._build(view, moved_on(view, var), columns, pairs, {})

    def _summed(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the sum of a row's experts, each times its share, and a residual behind it."""
        for total, residual in (*binary(view, var, "relax.add"), (var, None)):
            call = view.call(in_order(view, total), "relax.sum")
            shape = shape_of(call.args[0]) if call is not None else None
            if call is None or shape is None or len(shape) < 2 or call.attrs.keepdims:
                continue
            axes, chosen = call.attrs.axis, shape[-2]
            one = axes is not None and [int(a) % len(shape) for a in axes] == [len(shape) - 2]
            if not one or not isinstance(chosen, tirx.IntImm):
                continue
            if residual is not None and not same_shape(shape_of(residual), shape_of(var)):
                continue
            pairs = Pairs(view, product(shape[:-2]), int(chosen))
            for data, share in binary(view, in_order(view, call.args[0]), "relax.multiply"):
                columns, shares = _columns(view, data), pairs.operand(share, 1)
                if columns is None or shares is None or _last(data) != columns.n:
                    continue
                if _last(call.args[0]) == columns.n:
                    more = {"share": shares[0]}
                    more |= {"residual": residual} if residual is not None else {}
                    return self._build(view, moved_on(view, var), columns, pairs, more)
        return None

    def _build(
        self,
        view: BlockView,
        var: relax.Var,
        columns: _Columns,
        pairs: Pairs,
        more: dict[str, relax.Expr],
    ) -> Match | None:
        """Check sizes, dtypes and leaks, and describe the kernel."""
        made, rows, chosen = columns.product, pairs.rows, pairs.chosen
        x = pairs.operand(made.rows, made.k, ("pair", "row"))
        ids = pairs.operand(made.ids, 1)
        if x is None or ids is None:
            return None
        dtype, share, weights = dtype_of(made.rows), more.get("share"), _weights(view, made)
        work = ExpertMatmul(
            as_dim(rows, self.options.bounds),
            made.sizes[0],
            chosen,
            made.k,
            columns.n,
            made.layout,
            dtype,
            dtype_of(var),
            each=x[1] == "pair" and chosen > 1,
            ids_dtype=dtype_of(ids[0]),
            bias=made.bias is not None,
            activation=columns.activation,
            gate=columns.gate,
            share=dtype_of(share) if share is not None else "",
            residual="residual" in more,
            packed=weights[0],
            skew=self.options.skew(made.sizes[0], chosen),
        )
        lead = (rows, chosen) if work.each else (rows,)
        args = {"x": KernelArg(x[0], (*lead, made.k)), "ids": KernelArg(ids[0], (rows, chosen))}
        args |= weights[1]
        args |= {"bias0": KernelArg(made.bias)} if made.bias is not None else {}
        shapes: dict[str, tuple[Any, ...]] = {
            "share": (rows, chosen),
            "residual": (rows, columns.n),
        }
        args |= {name: KernelArg(expr, shapes[name]) for name, expr in more.items()}
        kept = (rows, columns.n) if work.share else (rows, chosen, columns.n)
        outs = {"out0": KernelOut(var, kept, work.out_dtype)}
        covers = _between(view, made.matmul, var)
        inside = set(covers)
        for name, arg in args.items():
            read = isinstance(arg.expr, relax.Var) and arg.expr in inside
            guard(not read, Reason.MULTI_USE, f"{name} is made by the chain itself")
        same = {dtype_of(arg.expr) for n, arg in args.items() if n in ("bias0", "residual")}
        guard(same <= {dtype}, Reason.DTYPE, f"operands are {', '.join(same)}, rows {dtype}")
        check_inner(view, covers, {var})
        refuse_kept_roundings(view, covers)
        return Match.of(_spelling(work), covers, (args, outs), work)


def _spelling(work: ExpertMatmul) -> str:
    gate = work.gate
    step = work.activation if gate is None else f"gate {gate.activation}"
    kinds = ("packed" * work.is_packed, "bias" * work.bias, step, "sum" * bool(work.share))
    return " ".join(["experts", *filter(None, kinds), *(["residual"] if work.residual else [])])


def _last(expr: relax.Expr) -> int | None:
    """Return the last size of a tensor, if it is known."""
    shape = shape_of(expr)
    return int(shape[-1]) if shape and isinstance(shape[-1], tirx.IntImm) else None


def _source(view: BlockView, ids: relax.Expr) -> relax.Expr:
    """Return the tensor of several dimensions that numbers of experts were read from in order."""
    while (call := view.call(ids, "relax.reshape", "relax.flatten", "relax.squeeze")) is not None:
        ids = call.args[0]
    return ids


def _weights(view: BlockView, made: Product) -> tuple[Any, dict[str, KernelArg]]:
    """Return how weights are stored, and what a kernel reads of them."""
    experts, first, last = made.sizes
    flat = view.call(made.table, "relax.reshape")
    if flat is not None and same_shape(shape_of(flat.args[0]), [experts * first, last]):
        packed = packed_weight(view, flat.args[0])
        if packed is not None and not packed.transposed:
            return packed.form, packed.args("w0")
    refuse_dequantized(view, made.table if flat is None else flat.args[0])
    return None, {"w0": KernelArg(made.table, (experts * first, last))}


def _between(view: BlockView, first: relax.Var, last: relax.Var) -> tuple[relax.Var, ...]:
    """Return the bindings that `last` is computed by of `first`, both among them."""
    order = list(view.defs)[view.index[first] : view.index[last] + 1]
    made = {first}
    for var in order[1:]:
        if not made.isdisjoint(view.reads[var]):
            made.add(var)
    needed = {last}
    for var in reversed(order):
        if var in needed:
            needed.update(made.intersection(view.reads[var]))
    return tuple(var for var in order if var in needed & made)


def _columns(view: BlockView, expr: relax.Expr) -> _Columns | None:
    """Return the product of pairs that a tensor is made of, and by which steps."""
    expr = in_order(view, expr)
    plain = product_of(view, expr)
    if plain is not None:
        return _Columns(plain, plain.columns)
    for gate, up in binary(view, expr, "relax.multiply"):
        found = _gated(view, gate, up)
        if found is not None:
            return found
    act = activation(view, expr)
    source = product_of(view, act.source) if act is not None else None
    if act is None or source is None:
        return None
    return _Columns(source, source.columns, act.name)


def _gated(view: BlockView, gate: relax.Expr, up: relax.Expr) -> _Columns | None:
    """Return the product whose columns are a gate and what it multiplies."""
    offset, up = _offset(view, in_order(view, up))
    up, up_bounds = _clipped(view, up)
    u = _part(view, up)
    if u is None:
        return None
    for form, source in _gates(view, in_order(view, gate)):
        source, bounds = _clipped(view, source)
        g = _part(view, source)
        if g is None or not g[0].is_same(u[0]):
            continue
        (made, start, step), (_, other, by) = g, u
        n = made.columns // 2
        if step != by or {start, other} != ({0, 1} if step == 2 else {0, n}):
            continue
        form = replace(form, interleaved=step == 2, gate_first=not start, gate_bounds=bounds)
        return _Columns(made, n, gate=replace(form, up_bounds=up_bounds, offset=offset))
    return None


def _gates(view: BlockView, expr: relax.Expr) -> Iterator[tuple[Gate, relax.Expr]]:
    """Yield in which ways a tensor is an activated gate, and of what."""
    act = activation(view, expr)
    if act is not None:
        yield Gate(act.name), in_order(view, act.source)
    for source, factor in binary(view, expr, "relax.multiply"):
        sigmoid = view.call(in_order(view, factor), "relax.sigmoid")
        inside = in_order(view, sigmoid.args[0]) if sigmoid is not None else None
        for data, number in binary(view, inside, "relax.multiply") if inside is not None else ():
            sharpness = scalar(view, number)
            if sharpness is not None and in_order(view, data).same_as(in_order(view, source)):
                yield Gate(sharpness=sharpness), in_order(view, source)


def _offset(view: BlockView, expr: relax.Expr) -> tuple[float, relax.Expr]:
    """Return a number that is added to a tensor, and the tensor."""
    for data, number in binary(view, expr, "relax.add"):
        value = scalar(view, number)
        if value is not None:
            return value, in_order(view, data)
    return 0.0, expr


def _clipped(view: BlockView, expr: relax.Expr) -> tuple[relax.Expr, tuple[float, float] | None]:
    """Return what is clipped, and to which bounds."""
    call = view.call(expr, "relax.clip")
    if call is None:
        return expr, None
    least, most = (float(bound.value) for bound in call.args[1:])
    bounds = max(least, -_WIDEST), min(most, _WIDEST)
    return in_order(view, call.args[0]), bounds


def _part(view: BlockView, expr: relax.Expr) -> tuple[Product, int, int] | None:
    """Return the product that a tensor has half of the columns of, the first one, and the step."""
    cut = cut_of(view, expr)
    if cut is None:
        return None
    made = product_of(view, cut.source)
    last = len(shape_of(cut.source) or ()) - 1
    if made is None or cut.axis != last or cut.extent != made.columns or made.columns % 2:
        return None
    whole = len(range(cut.start, cut.stop, cut.stride)) == made.columns // 2
    return (made, cut.start, cut.stride) if whole and cut.stride in (1, 2) else None
