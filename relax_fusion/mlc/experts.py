"""Layers of experts as MLC-LLM writes them, as operators, with rows in the order of the tokens.

MLC-LLM routes tokens, sorts rows by expert and multiplies them in functions of its own.  As its own
passes do, this one knows them by their names and parameters; how a weight is stored is read off the
function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tvm import ir, relax, tirx

from ..estimator.families.experts import FAMILY
from ..estimator.registry import candidates
from ..hardware.target import device_of, is_gpu
from ..matching.operators import named
from ..matching.pattern import BlockView, is_call
from ..matching.shapes import dtype_of, product, same_shape, shape_of
from ..options import PipelineOptions
from ..transforms.modules import module_pass, rewritten
from ..workload import DynamicDim, ExpertMatmul, Packed
from .expert_weights import adds_pairs, decoded, is_read_plainly, read_format

GROUPS = ("group_gemm", "dequantize_group_gemm")
SINGLE = ("moe_gemv", "moe_dequantize_gemv")
"""Names of products of rows that are sorted by expert, and of those of a single token."""

_ROUTING = re.compile(r"top\d+(_softmax\d*)?")
_OF_ROWS = named("arithmetic", "function", "cast", "choice", "split")
"""Operators that leave rows where they are: of elements, or of parts of rows."""


@module_pass
class ReadExperts:
    """Multiply each row of a token by the weight of its expert, in place of sorted groups of rows.

    rewrite::

        both = R.call_tir(top2_softmax, (logits,)); share = both[0]; ids = both[1]
        c = R.cumsum(R.reshape(R.permute_dims(R.call_tir(expert_mask, (ids,)))))
        places = R.call_tir(get_indices, (c, ids)); ranges = R.call_tir(indptr, (c, n))
        y = R.call_tir(group_gemm, (R.take(x, places[1], axis=0), W, ranges))
        z = R.call_tir(scatter_output, (f(y), places[0]))
            ->
        best = R.topk(logits, 2); share = R.nn.softmax(best[0]); ids = best[1]
        y = R.matmul(R.take(W, R.reshape(ids, (2 * n,)), axis=0), x of each pair)
        z = f(y)

    The products of a single token, ``moe_gemv``, become the same.  `RouteExperts` and `FuseExperts`
    take it from there.

    declines when:
        rows are moved, or read, by anything else between; weights are stored in another way than in
        words with a scale for each group; on a GPU, no kernel of ours multiplies on tensor cores,
        without which MLC-LLM's takes less time.

    Parameters
    ----------
    options : PipelineOptions
        The target and the back end, and whether `FuseExperts` runs, without which nothing is done.
    """

    options: PipelineOptions

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function of `mod`; `mod` itself if it has no experts."""
        has_experts = any(_base(gvar) in (*GROUPS, *SINGLE) for gvar in mod.functions)
        if not has_experts or "FuseExperts" in self.options.disable:
            return mod
        return relax.transform.DeadCodeElimination()(rewritten(mod, _Rewrite(mod, self.options)))


def _dims(expr: relax.Expr) -> list[Any]:
    return shape_of(expr) or []


def _base(gvar: ir.GlobalVar) -> str:
    return str(gvar.name_hint).rstrip("0123456789")


def _arguments(view: BlockView, expr: relax.Expr, *names: str) -> list[relax.Expr]:
    """Return the tensors of a call of one of MLC-LLM's functions; none of any other value."""
    call = view.call(expr, "relax.call_tir")
    return list(call.args[1].fields) if call is not None and _base(call.args[0]) in names else []


@dataclass
class _Layer:
    """Rows that are sorted by expert, from where they are gathered to where they are put back."""

    view: BlockView
    cumsum: relax.Expr
    ids: relax.Expr
    """``[tokens, chosen]``"""
    rows: list[relax.Var] = field(default_factory=list)
    """Where the rows of tokens are gathered."""
    sorted: dict[relax.Var, None] = field(default_factory=dict)
    """All that is in the order of experts."""
    restored: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    """What is in the order of tokens again, and of what it is made."""

    @staticmethod
    def of(view: BlockView, var: relax.Var) -> _Layer | None:
        """Return the layer whose order a binding makes; None if something else reads its rows."""
        given = _arguments(view, var, "get_indices")
        items = [(view.defs[user], user) for user in view.uses(var)]
        if not given or view.escapes(var) or not _counts(view, *given):
            return None
        if not all(isinstance(item, relax.TupleGetItem) for item, _ in items):
            return None
        back, order = ([user for item, user in items if item.index == n] for n in range(2))
        found = _Layer(view, *given)
        return found if found._follow(order, back) else None

    def _follow(self, order: Sequence[relax.Var], back: Sequence[relax.Var]) -> bool:
        """Find what is in the order of experts; False if that is read by what minds."""
        view, tokens = self.view, _dims(self.ids)[:1]
        for var in (user for place in order for user in view.uses(place)):
            take = view.call(var, "relax.take")
            shape = shape_of(take.args[0]) if take is not None else None
            if take is None or take.args[1] not in order or take.attrs.axis != 0:
                return False
            if shape is None or len(shape) != 2 or not same_shape(shape[:1], tokens):
                return False
            self.rows.append(var)
        waiting, self.sorted = [*self.rows], dict.fromkeys(self.rows)
        while waiting:
            for user in view.uses(waiting.pop()):
                given = _arguments(view, user, "scatter_output")
                if given and given[0] in self.sorted and given[1] in back:
                    self.restored[user] = given[0]
                elif user not in self.sorted:
                    self.sorted[user] = None
                    waiting.append(user)
        made = [var for var in self.sorted if var not in self.rows]
        whole = all(map(self._keeps_rows, made)) and not any(map(view.escapes, self.sorted))
        read = [user for place in back for user in view.uses(place)]
        inside = not any(map(view.escapes, (*order, *back, *self.restored)))
        return whole and inside and bool(read) and set(read) == set(self.restored)

    def _keeps_rows(self, var: relax.Var) -> bool:
        """Tell whether row s of a binding is computed of row s of what is sorted."""
        value = self.view.defs[var]
        if isinstance(value, relax.TupleGetItem):
            return True
        given = _arguments(self.view, var, *GROUPS)
        if given:
            ranges = _arguments(self.view, given[-1], "get_expert_instance_indptr")
            same = bool(ranges) and ranges[0].same_as(self.cumsum)
            return same and given[0] in self.sorted and not set(given[1:]) & set(self.sorted)
        if not is_call(value, *_OF_ROWS):
            return False
        if is_call(value, "relax.split"):
            return int(value.attrs.axis) % 2 == 1
        tensors = [a for a in value.args if isinstance(a.ty, relax.TensorType)]
        ranks = [(len(shape_of(a) or ()), a in self.sorted) for a in tensors]
        return all(rank == (2 if is_sorted else 0) for rank, is_sorted in ranks)

    @property
    def products(self) -> list[relax.Var]:
        """The products of groups of rows."""
        return [var for var in self.sorted if _arguments(self.view, var, *GROUPS)]


def _counts(view: BlockView, cumsum: relax.Expr, ids: relax.Expr) -> bool:
    """Tell whether a sum counts the rows of each expert, of one token after the other."""
    call = view.call(cumsum, "relax.cumsum")
    flat = view.call(call.args[0], "relax.reshape") if call is not None else None
    turned = view.call(flat.args[0], "relax.permute_dims") if flat is not None else None
    given = _arguments(view, turned.args[0], "expert_mask") if turned is not None else []
    inclusive = call is not None and not bool(call.attrs.exclusive)
    return inclusive and bool(given) and given[0].same_as(ids)


@dataclass(frozen=True)
class _Product:
    """Rows by the weights of experts."""

    rows: relax.Expr
    """``[pairs, k]``, or the one row of a single token."""
    weights: Sequence[relax.Expr]
    """Those of all experts, or words and scales."""
    ids: relax.Expr
    """``[tokens, chosen]``"""
    form: Packed | None
    sizes: tuple[int, int, int]
    """Experts, columns and k."""

    @staticmethod
    def of(view: BlockView, var: relax.Var, ids: relax.Expr) -> _Product | None:
        """Return the product of one of MLC-LLM's functions, if its weights are of a known form."""
        call = view.defs[var]
        func = view.mod[call.args[0]]
        rows, *weights, _ = call.args[1].fields
        stored = _dims(weights[0])
        known = (*stored[:1], *_dims(var)[-1:], *_dims(rows)[-1:])
        static = all(isinstance(size, tirx.IntImm) for size in (*known, *stored))
        if not static or len(known) != 3 or len(stored) != 3:
            return None
        experts, n, k = map(int, known)
        sizes = experts, n, k
        if len(weights) == 1:
            alike = same_shape(stored, sizes) and dtype_of(weights[0]) == dtype_of(rows)
            plain = alike and is_read_plainly(func)
            return _Product(rows, weights, ids, None, sizes) if plain else None
        form = read_format(func, sizes) if len(weights) == 2 else None
        return _Product(rows, weights, ids, form, sizes) if form is not None else None

    def work(self) -> ExpertMatmul:
        """Describe the product for any number of rows."""
        experts, n, k = self.sizes
        chosen, dtype = int(_dims(self.ids)[-1]), dtype_of(self.rows)
        rows = DynamicDim("rows")
        return ExpertMatmul(rows, experts, chosen, k, n, "nk", dtype, dtype, packed=self.form)


@relax.expr_functor.mutator
class _Rewrite(relax.PyExprMutator):
    """Puts operators in the places of MLC-LLM's functions."""

    def __init__(self, mod: ir.IRModule, options: PipelineOptions):
        super().__init__(mod)
        self.mod, self.options = mod, options
        self.made: dict[relax.Var, Callable[[], relax.Expr]] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        self.made = dict(self._plan(BlockView(block, self.mod)))
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        make = self.made.get(binding.var)
        if make is None:
            super().visit_var_binding_(binding)
        else:
            self.set_var_remap(binding.var, self.builder_.emit(make()))

    def _plan(self, view: BlockView) -> Iterator[tuple[relax.Var, Callable[[], relax.Expr]]]:
        """Yield which bindings of a block are made anew, and how."""
        chosen: list[relax.Expr] = []
        for var in view.defs:
            layer = _Layer.of(view, var)
            single = _arguments(view, var, *SINGLE)
            ids = layer.ids if layer is not None else single[-1] if single else None
            if ids is None or (single and view.escapes(var)):
                continue
            places = layer.products if layer is not None else [var]
            products = [_Product.of(view, place, ids) for place in places]
            ours = [made for made in products if made is not None and self._is_ours(made)]
            if not ours or len(ours) < len(products):
                continue
            chosen.append(ids)
            for place, made in zip(places, ours, strict=True):
                yield place, partial(self._multiplied, made)
            for place in layer.rows if layer is not None else ():
                yield place, partial(self._spread, view.defs[place].args[0], ids)
            for place, source in layer.restored.items() if layer is not None else ():
                yield place, partial(self.visit_expr, source)
        for ids in chosen:
            yield from self._routing(view, ids)
        for var in view.defs if chosen else ():
            pairs = _arguments(view, var, "sum")
            if len(pairs) == 1 and adds_pairs(view.mod[view.defs[var].args[0]]):
                yield var, partial(self._sum, pairs[0])

    def _is_ours(self, made: _Product) -> bool:
        """Tell whether a device has kernels for a product: of GPUs, on tensor cores."""
        if not is_gpu(self.options.target):
            return True
        plans = candidates(made.work(), device_of(self.options.target), "auto")
        return self.options.uses_triton and any(plan.family != FAMILY for plan in plans)

    def _spread(self, x: relax.Expr, ids: relax.Expr) -> relax.Expr:
        """Return the row of each pair's token, ``[tokens * chosen, k]``."""
        tokens, chosen = _dims(ids)
        k = _dims(x)[-1]
        wide = relax.op.expand_dims(self.visit_expr(x), 1)
        wide = self.builder_.emit(relax.op.broadcast_to(wide, [tokens, chosen, k]))
        return relax.op.reshape(wide, [tokens * chosen, k])

    def _multiplied(self, made: _Product) -> relax.Expr:
        """Multiply the row of each pair by the weight of its expert."""
        emit, (experts, n, k) = self.builder_.emit, made.sizes
        pairs = product(_dims(made.ids))
        weights = [self.visit_expr(weight) for weight in made.weights]
        if made.form is not None:
            rows = [(experts * n, _dims(weight)[-1]) for weight in weights]
            flat = [emit(relax.op.reshape(w, s)) for w, s in zip(weights, rows, strict=True)]
            how = partial(decoded, made.form, dtype_of(made.rows), k)
            whole = self.builder_.emit_te(how, *flat, primfunc_name_hint="dequantize")
            weights = [emit(relax.op.reshape(whole, [experts, n, k]))]
        numbers = emit(relax.op.reshape(self.visit_expr(made.ids), [pairs]))
        weight = emit(relax.op.take(weights[0], numbers, axis=0, mode="fast"))
        x = self.visit_expr(made.rows)
        if not same_shape(shape_of(x), [pairs, k]):  # one row, of a single token
            x = emit(relax.op.broadcast_to(x, [pairs, k]))
        column = emit(relax.op.reshape(x, [pairs, k, 1]))
        return relax.op.reshape(emit(relax.op.matmul(weight, column)), [pairs, n])

    def _routing(
        self, view: BlockView, ids: relax.Expr
    ) -> Iterator[tuple[relax.Var, Callable[[], relax.Expr]]]:
        """Yield how a choice of experts, and their shares, are made anew."""
        item = view.definition(ids)
        call = view.call(item.tuple_value, "relax.call_tir") if _is_item(item) else None
        if call is None or not _ROUTING.fullmatch(call.args[0].name_hint):
            return
        (logits,), whole = call.args[1].fields, item.tuple_value
        both: list[relax.Expr] = []

        def chosen() -> relax.Expr:
            best, dtype = self.visit_expr(logits), dtype_of(logits)
            softmax = "softmax" in call.args[0].name_hint
            if softmax and dtype != "float32":
                best = self.builder_.emit(relax.op.astype(best, "float32"))
            k = int(_dims(ids)[-1])
            best = relax.op.topk(best, k, axis=-1, ret_type="both", largest=True, dtype="int32")
            best = self.builder_.emit(best)
            share, number = (self.builder_.emit(relax.TupleGetItem(best, n)) for n in range(2))
            if softmax:
                share = self.builder_.emit(relax.op.nn.softmax(share, axis=-1))
                share = share if dtype == "float32" else relax.op.astype(share, dtype)
            both.extend((self.builder_.emit(share), number))
            return relax.Tuple(both)

        items = [user for user in view.uses(whole) if _is_item(view.defs[user])]
        if len(items) == len(view.uses(whole)) and not any(map(view.escapes, (whole, *items))):
            yield whole, chosen
            for user in items:
                yield user, partial(both.__getitem__, int(view.defs[user].index))

    def _sum(self, pairs: relax.Expr) -> relax.Expr:
        return relax.op.sum(self.visit_expr(pairs), axis=[1])


def _is_item(value: relax.Expr) -> bool:
    return isinstance(value, relax.TupleGetItem)
