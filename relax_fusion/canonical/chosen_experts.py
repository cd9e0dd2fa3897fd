"""Experts that a graph gives all rows to, though a row has scores for a few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import numpy as np
from tvm import ir, relax, tirx
from tvm.relax import op

from ..matching.constants import filled
from ..matching.operators import MOVEMENTS, OPERATORS, named
from ..matching.pattern import is_call
from ..matching.places import IN_ORDER, MOVES, origins, place_of
from ..matching.shapes import dtype_of, is_one, permutation, product, same_shape, shape_of
from ..transforms.modules import module_pass
from ..tvm_ir import Analyzer, GenericConst, structural_map
from .rewriter import Rewriter, canonicalise

_ARITHMETIC, _FUNCTIONS = named("arithmetic"), named("function")
_FLOATS = ("float32", "float16", "bfloat16")
_MOVED = (*MOVES, "relax.permute_dims", "relax.tile")


@module_pass
class ChooseExperts:
    """Give each row to the experts that it has scores for, where a graph gives it to all.

    rewrite::

        s = R.scatter_elements(R.zeros([rows, experts]), ids, shares, axis=1)     # ids: of R.topk
        y = f(R.matmul(R.broadcast_to(x, [experts, rows, k]), W), R.permute_dims(s))
        z = R.sum(y, axis=[0])
            ->
        v = R.take(W, R.reshape(ids, [rows * chosen]), axis=0)
        y = f(R.matmul(repeated x, v), R.reshape(shares, [rows * chosen, 1]))
        z = R.sum(R.reshape(y, [rows, chosen, n]), axis=[1])

    f has matmuls by the weights of experts, their biases, functions of elements and parts of
    columns.  The scores multiply what experts make, or, where that makes zero of zero, what they
    are given, as in Llama 4.  They may be a sigmoid or a softmax of what is scattered on -inf.
    Experts without a score for a row are taken to make finite numbers of it.

    declines when:
        scores are of no ``topk``; sizes of weights are only known at run time, or they are
        computed, for then a kernel may have to write those of each row; anything else depends on
        the expert, or computes a row of others.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, {"relax.sum": _sum_of_the_chosen})


def _sum_of_the_chosen(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    shape = shape_of(call.args[0])
    if shape is None or len(shape) < 3 or call.attrs.axis is None or call.attrs.keepdims:
        return None
    experts, *rows, columns = shape
    first = [int(a) % len(shape) for a in call.attrs.axis] == [0]
    if not first or not isinstance(experts, tirx.IntImm) or int(experts) < 2:
        return None
    dense = _Dense(rewriter, int(experts), product(rows))
    made = dense.made(call.args[0])
    if made is None or made.others != 0:
        return None
    apart = rewriter.emit(op.reshape(made.value, [dense.rows, dense.chosen, columns]))
    total = op.sum(apart, axis=[1])
    return total if len(rows) == 1 else op.reshape(rewriter.emit(total), [*rows, columns])


class _Made(NamedTuple):
    """What there is for each pair of a row and an expert that it has a score for."""

    value: relax.Expr
    """``[pairs, columns]``, pair ``row * chosen + place``."""
    others: float | None
    """What all other experts have there, where that is one number."""


class _Dense:
    """What is computed for all experts and rows, and the same for pairs that are chosen."""

    def __init__(self, rewriter: Rewriter, experts: int, rows: Any):
        self.rewriter, self.experts, self.rows = rewriter, experts, rows
        self.ids: relax.Expr | None = None
        self.chosen = 0
        self.e, self.t, self.k = (tirx.Var(n, "int64") for n in ("e", "t", "k"))

    def made(self, expr: relax.Expr) -> _Made | None:
        """Return the pairs of a tensor whose elements are in the order of experts and rows."""
        expr = self._unmoved(expr)
        value, last = self.rewriter.definition(expr), (shape_of(expr) or [0])[-1]
        if isinstance(value, relax.TupleGetItem):
            return self._part(value)
        if is_call(value, "relax.matmul"):
            return self._product(value)
        if is_call(value, *IN_ORDER) and same_shape((shape_of(value.args[0]) or [])[-1:], [last]):
            inner = self.made(value.args[0])
            if inner is not None:
                return inner
        if is_call(value, *_FUNCTIONS, "relax.astype", "relax.clip"):
            return self._function(value)
        if is_call(value, *_ARITHMETIC):
            return self._combined(value)
        if is_call(value, "relax.strided_slice"):
            return self._slice(value)
        return self._repeated(expr)

    def _unmoved(self, expr: relax.Expr) -> relax.Expr:
        """Return what movements to the same shape are of."""
        while (call := self.rewriter.call(expr, *MOVES)) is not None:
            if not same_shape(shape_of(call.args[0]), shape_of(expr)):
                break
            expr = call.args[0]
        return expr

    def _part(self, item: relax.TupleGetItem) -> _Made | None:
        call = self.rewriter.call(item.tuple_value, "relax.split")
        rank = len(shape_of(call.args[0]) or ()) if call is not None else 0
        if call is None or int(call.attrs.axis) % rank != rank - 1:
            return None
        whole, parts = self.made(call.args[0]), call.attrs.indices_or_sections
        if whole is None:
            return None
        parts = int(parts) if isinstance(parts, int | tirx.IntImm) else [int(p) for p in parts]
        split = self.rewriter.emit(op.split(whole.value, parts, axis=1))
        return self._kept(relax.TupleGetItem(split, item.index), whole.others)

    def _slice(self, call: relax.Call) -> _Made | None:
        """Return a part of the columns."""
        rank, axes = len(shape_of(call.args[0]) or ()), call.args[1]
        last = isinstance(axes, relax.Tuple) and [int(a.value) % rank for a in axes.fields]
        whole = self.made(call.args[0]) if last == [rank - 1] else None
        if whole is None:
            return None
        args = [whole.value, relax.Tuple([relax.prim_value(1)]), *call.args[2:]]
        return self._kept(relax.Call(call.op, args, call.attrs), whole.others)

    def _function(self, call: relax.Call) -> _Made | None:
        inner = self.made(call.args[0])
        if inner is None:
            return None
        ends = [getattr(end, "value", nan) for end in call.args[1:]]
        new = relax.Call(call.op, [inner.value, *call.args[1:]], call.attrs, call.ty_args)
        return self._kept(new, _of_numbers(call, inner.others, *ends))

    def _combined(self, call: relax.Call) -> _Made | None:
        """Return what arithmetic makes of pairs, numbers, biases and scores."""
        if is_call(call, "relax.multiply"):
            for scores, data in (call.args, reversed(call.args)):
                share = self._share(scores)
                if share is not None:
                    inner = self.made(data)
                    return inner and self._kept(op.multiply(inner.value, share), 0.0)
        shape = shape_of(call) or [0]
        if not same_shape([product(shape[:-1])], [self.experts * self.rows]):
            return None
        found = [
            self._number(arg) or self.made(arg) or self._bias(arg, len(shape)) for arg in call.args
        ]
        sides = [side for side in found if side is not None]
        if len(sides) < len(found):
            return None
        others = [side.others for side in sides]
        zero = is_call(call, "relax.multiply") and 0 in others
        zero |= is_call(call, "relax.divide") and others == [0, None]
        new = relax.Call(call.op, [side.value for side in sides], call.attrs)
        return self._kept(new, 0.0 if zero else _of_numbers(call, *others))

    def _number(self, expr: relax.Expr) -> _Made | None:
        value = self.rewriter.definition(expr)
        if not isinstance(value, GenericConst) or value.ty.shape:
            return None
        return _Made(expr, float(value.value.numpy()))

    def _bias(self, expr: relax.Expr, rank: int) -> _Made | None:
        """Return the columns of each pair of what has a row for each expert, ``[e, 1, n]``."""
        shape = shape_of(expr) or []
        rows = shape[1:-1]
        table = 2 < len(shape) == rank and same_shape(shape[:1], [self.experts])
        table = table and all(map(is_one, rows))
        if not table or self.ids is None:
            return None
        flat = self.rewriter.emit(op.reshape(expr, [shape[0], shape[-1]]))
        return self._kept(op.take(flat, self.ids, axis=0), None)

    def _product(self, call: relax.Call) -> _Made | None:
        """Return the rows of pairs times the weights of their experts."""
        rows, weight = (self._unmoved(arg) for arg in call.args)
        sizes, given, alike = shape_of(weight) or [], shape_of(rows) or [], dtype_of(rows)
        known = len(sizes) == 3 and all(isinstance(d, tirx.IntImm) for d in sizes)
        if not known or int(sizes[0]) != self.experts or alike not in _FLOATS:
            return None
        once = any(same_shape(given[:-1], lead) for lead in ([self.rows], [1, self.rows]))
        each = same_shape(given[:-1], [self.experts, self.rows])
        inner = self._of_rows(rows) if once else self.made(rows) if each else None
        stored = self._is_stored(weight) and dtype_of(weight) == alike
        if inner is None or self.ids is None or not stored:
            return None
        value, emit = inner.value, self.rewriter.emit
        swap = self.rewriter.call(weight, "relax.permute_dims")
        if swap is not None and permutation(swap, 3) == [0, 2, 1]:
            taken = emit(op.take(swap.args[0], self.ids, axis=0))
            operands, one = (taken, emit(op.expand_dims(value, -1))), -1
        else:
            taken = emit(op.take(weight, self.ids, axis=0))
            operands, one = (emit(op.expand_dims(value, 1)), taken), 1
        made = emit(relax.Call(call.op, operands, call.attrs))
        return self._kept(op.squeeze(made, [one]), 0.0 if inner.others == 0 else None)

    def _is_stored(self, weight: relax.Expr) -> bool:
        """Tell whether a weight is a parameter or a constant, moved or in another dtype."""
        while (call := self.rewriter.call(weight, *MOVEMENTS, "relax.astype")) is not None:
            weight = call.args[0]
        return not isinstance(self.rewriter.definition(weight), relax.Call)

    def _repeated(self, expr: relax.Expr) -> _Made | None:
        """Return the rows of what is the same for all experts."""
        last = (shape_of(expr) or [0])[-1]

        def of_rows(shape: list[Any]) -> list[Any] | None:
            whole = same_shape([product(shape)], [self.rows * last])
            plain = whole and len(shape) > 1 and same_shape(shape[-1:], [last])
            return place_of(self.t * last + self.k, shape) if plain else None

        source = next(self._origins(expr, last, of_rows), None)
        return None if source is None else self._of_rows(source)

    def _of_rows(self, expr: relax.Expr) -> _Made | None:
        """Return rows, each as often as it has experts."""
        if self.ids is None:
            return None
        last, emit = (shape_of(expr) or [0])[-1], self.rewriter.emit
        rows = emit(op.reshape(expr, [self.rows, 1, last]))
        wide = emit(op.broadcast_to(rows, [self.rows, self.chosen, last]))
        return self._kept(op.reshape(wide, [self.rows * self.chosen, last]), None)

    def _share(self, expr: relax.Expr) -> relax.Expr | None:
        """Return the scores of pairs, ``[pairs, 1]``, of a tensor that has those of all experts."""
        if not is_one((shape_of(expr) or [0])[-1]):
            return None
        table, at = [self.rows, self.experts], (self.t, self.e)
        for source in self._origins(
            expr, 1, lambda sizes: at if same_shape(sizes, table) else None
        ):
            share = self._of_the_chosen(source)
            if share is not None:
                return self.rewriter.emit(op.reshape(share, [self.rows * self.chosen, 1]))
        return None

    def _of_the_chosen(self, scores: relax.Expr) -> relax.Expr | None:
        """Return scores of the experts of each row, where those of all others are zero."""
        value, behind = self.rewriter.definition(scores), list[relax.Call]()
        while is_call(value, "relax.astype", "relax.sigmoid", "relax.nn.softmax"):
            behind.append(value)
            value = self.rewriter.definition(value.args[0])
        if not is_call(value, "relax.scatter_elements") or str(value.attrs.reduction) != "update":
            return None
        functions = [call for call in behind if not is_call(call, "relax.astype")]
        empty, (data, ids, share) = -inf if functions else 0.0, value.args
        axes = [value, *(call for call in functions if is_call(call, "relax.nn.softmax"))]
        plain = len(functions) < 2 and all(int(call.attrs.axis) in (-1, 1) for call in axes)
        if not plain or filled(self.rewriter, data) != empty or not self._is_choice(ids):
            return None
        for call in reversed(behind):
            share = self.rewriter.emit(relax.Call(call.op, [share], call.attrs))
        return share if same_shape(shape_of(share), shape_of(ids)) else None

    def _is_choice(self, ids: relax.Expr) -> bool:
        """Tell whether these are the experts of each row; keep those that were found first."""
        chosen = self._topk(ids)
        if not chosen or not same_shape(shape_of(ids), [self.rows, chosen]):
            return False
        flat = self.rewriter.emit(op.reshape(ids, [self.rows * chosen]))
        if self.ids is None:
            self.ids, self.chosen = flat, chosen
        return self.ids.same_as(flat)

    def _topk(self, ids: relax.Expr) -> int:
        """Return how many experts are chosen, each once and fewer than there are; else 0."""
        value = self.rewriter.definition(ids)
        while is_call(value, "relax.astype") and dtype_of(value) in ("int32", "int64"):
            value = self.rewriter.definition(value.args[0])
        if not isinstance(value, relax.TupleGetItem) or value.index != 1:
            return 0
        call = self.rewriter.call(value.tuple_value, "relax.topk")
        if call is None or call.attrs.ret_type != "both":
            return 0
        among = shape_of(call.args[0]) or []
        last = len(among) == 2 and int(call.attrs.axis) in (-1, 1)
        chosen, known = int(call.attrs.k), same_shape(among[-1:], [self.experts])
        return chosen if last and known and 0 < chosen < self.experts else 0

    def _origins(
        self, expr: relax.Expr, last: Any, place_in: Callable[[list[Any]], Sequence[Any] | None]
    ) -> Iterator[relax.Expr]:
        """Yield what movements made a tensor of, if `place_in` its sizes is where elements were."""
        shape, analyzer = shape_of(expr) or [], Analyzer()
        for var, size in ((self.e, self.experts), (self.t, self.rows), (self.k, last)):
            analyzer.bind(var, ir.Range(0, size))
        if not same_shape([product(shape)], [self.experts * self.rows * last]):
            return
        apart = same_shape(shape, [self.experts, self.rows, last])
        flat = (self.e * self.rows + self.t) * last + self.k
        place = [self.e, self.t, self.k] if apart else place_of(flat, shape)
        simple = partial(self._simple, analyzer)
        for source, at in origins(self.rewriter, expr, place, _MOVED, simple):
            own = place_in(shape_of(source) or [])
            if own is not None and all(map(analyzer.can_prove_equal, at, own)):
                yield source

    def _simple(self, analyzer: Analyzer, place: Any) -> Any:
        """Return a place made simple, where an unknown number of rows divides it, too."""

        def divided(node: tirx.FloorDiv | tirx.FloorMod) -> tirx.Expr:
            of_rows = same_shape([node.b], [self.rows])
            if of_rows and analyzer.can_prove_equal(node.a, self.e * self.rows + self.t):
                return self.e if isinstance(node, tirx.FloorDiv) else self.t
            return node

        kinds = [(tirx.FloorDiv, divided), (tirx.FloorMod, divided)]
        return analyzer.simplify(structural_map(tirx.convert(place), kinds, order="post"))

    def _kept(self, value: relax.Expr, others: float | None) -> _Made | None:
        """Return what is made of pairs, unless all others have what is no finite number."""
        if others is not None and not isfinite(others):
            return None
        return _Made(self.rewriter.emit(value), others)


def _of_numbers(call: relax.Call, *numbers: float | None) -> float | None:
    """Return what an operator makes of numbers, where all are known."""
    known: Any = OPERATORS[call.op.name.removeprefix("relax.")].numpy
    known = np.divide if is_call(call, "relax.divide") else known
    if known is None or None in numbers:
        return None
    with np.errstate(all="ignore"):
        return float(known(*map(np.float64, numbers)))
