"""The tensor expressions of a choice of experts, and of functions of elements around it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any, TypeAlias

from tvm import relax, te, tirx

from ..compute.activations import ACCUMULATE, activate, clipped
from ..matching.constants import filled
from ..matching.movements import cut_of
from ..matching.pattern import BlockView, is_call
from ..matching.places import MOVES, Place, moved_place
from ..matching.shapes import dtype_of, is_one, product, same_shape, shape_of
from ..tvm_ir import GenericConst

STAGES = ("relax.nn.softmax", "relax.sum", "relax.gather_elements", "relax.scatter_elements")
"""Steps that look at whole rows, beside ``topk``."""

RUN = 16
"""So many elements are looked through one after the other for those that are chosen: the runs of a
row by threads of their own."""

Element: TypeAlias = Callable[[relax.Expr, Place], tirx.Expr]
"""Returns an element of a tensor that is not computed here."""

ARITHMETIC: dict[str, Callable[..., tirx.Expr]] = {
    "relax.add": lambda x, y: x + y,
    "relax.subtract": lambda x, y: x - y,
    "relax.multiply": lambda x, y: x * y,
    "relax.divide": tirx.div,
    "relax.maximum": tirx.max,
    "relax.minimum": tirx.min,
}
FUNCTIONS = {
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.relu": "relu",
}


def sizes(expr: relax.Expr) -> list[Any]:
    """Return the sizes of a tensor of known rank."""
    return list(shape_of(expr) or ())


class Formula:
    """The elements of what is computed of a tensor.

    `inside`: what is computed here.
    `leaf`: returns an element of anything else.
    """

    def __init__(self, view: BlockView, inside: Sequence[relax.Var], leaf: Element):
        self.view, self.inside, self.leaf = view, {hash(v) for v in inside}, leaf

    def at(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        """Return an element."""
        if isinstance(expr, GenericConst) and not expr.ty.shape:
            return tirx.const(expr.value.numpy().item(), dtype_of(expr))
        if hash(expr) not in self.inside:
            return self.leaf(expr, place)
        value = self.view.defs[expr]
        name, args = value.op.name, value.args
        if name in ARITHMETIC:
            return ARITHMETIC[name](*(self._broadcast(a, place) for a in args))
        if name in MOVES:
            moved = moved_place(value, place)
            assert moved is not None, "refused by `_is_step`"
            return self.at(args[0], moved)
        if name == "relax.strided_slice":
            cut = cut_of(self.view, expr)
            assert cut is not None, "refused by `_is_step`"
            return self.at(args[0], (*place[:-1], place[-1] * cut.stride + cut.start))
        if name == "relax.concat":
            return self._joined(args[0].fields, place)
        if name == "relax.where":
            chosen, this, other = (self._broadcast(a, place) for a in args)
            return tirx.Select(chosen, this, other)
        if name == "relax.full_like":
            return self.at(args[1], ())
        if name == "relax.clip":
            low, high = (float(end.value) for end in args[1:])
            return clipped(self.at(args[0], place), low, high)
        return _function(value, self.at(args[0], place))

    def _joined(self, parts: Sequence[relax.Expr], place: Place) -> tirx.Expr:
        """Return an element of tensors that lie one behind the other in rows."""
        first, *others = parts
        if not others:
            return self.at(first, place)
        end = sizes(first)[-1]
        behind = self._joined(others, (*place[:-1], place[-1] - end))
        return tirx.if_then_else(place[-1] < end, self.at(first, place), behind)

    def _broadcast(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        shape = sizes(expr)
        zero = tirx.IntImm("int64", 0)
        behind = place[len(place) - len(shape) :]
        at = tuple(zero if is_one(d) else p for d, p in zip(shape, behind, strict=True))
        return self.at(expr, at)


def _function(call: relax.Call, x: tirx.Expr) -> tirx.Expr:
    """Return a function of one element, in float32 if it is an activation."""
    name, dtype = call.op.name, dtype_of(call)
    if name in ("relax.bitwise_not", "relax.logical_not"):
        return tirx.Not(x)
    if name == "relax.astype":
        return x != tirx.const(0, str(x.ty.dtype)) if dtype == "bool" else x.astype(dtype)
    return activate(FUNCTIONS[name], x.astype(ACCUMULATE)).astype(dtype)


def _in_runs(count: int) -> tuple[int, int]:
    """Return how many equal runs so many elements are, and how long they are: at most `RUN`."""
    run = next(n for n in range(min(RUN, count), 0, -1) if count % n == 0)
    return count // run, run


def lead_of(shape: list[Any], rows: Any) -> int | None:
    """Return how many dimensions in front are the rows."""
    counts = range(1, len(shape) + 1)
    return next((n for n in counts if same_shape([product(shape[:n])], [rows])), None)


class RoutingKernel:
    """The tensor expressions of steps, of which some are `outputs`; `rows` are chosen for."""

    def __init__(
        self, view: BlockView, inside: Collection[relax.Var], outputs: list[relax.Var], rows: Any
    ):
        self.view, self.inside, self.outputs, self.rows = view, inside, outputs, rows
        elements = [v for v in inside if not self._is_stage(v)]
        self.formula = Formula(self.view, elements, self._leaf)
        self.operands: dict[int, relax.Expr] = {}
        self.given: dict[int, te.Tensor] = {}
        self.stages: dict[tuple[int, str], te.Tensor] = {}

    def _is_stage(self, var: relax.Var) -> bool:
        value = self.view.defs[var]
        return isinstance(value, relax.TupleGetItem) or is_call(value, *STAGES, "relax.topk")

    def find_operands(self) -> list[relax.Expr]:
        """Return what the kernel reads, in order."""
        self.compute()
        return [*self.operands.values()]

    def compute(self, *given: te.Tensor) -> list[te.Tensor]:
        """Return the outputs."""
        self.given = dict(zip(self.operands, given, strict=bool(given)))
        self.stages = {}
        return [self._tensor(var) for var in self.outputs]

    def _tensor(self, var: relax.Var) -> te.Tensor:
        if self._is_stage(var):
            return self._made(var)
        return self._stage(var, "value", sizes(var), lambda *at: self.formula.at(var, at))

    def _leaf(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        if isinstance(expr, relax.Var) and expr in self.inside:
            return self._made(expr)(*place)
        self.operands.setdefault(hash(expr), expr)
        if hash(expr) not in self.given:
            self.given[hash(expr)] = te.placeholder(sizes(expr), dtype_of(expr))
        return self.given[hash(expr)](*place)

    def _stage(
        self, var: relax.Var, kind: str, shape: list[Any], element: Callable[..., Any]
    ) -> te.Tensor:
        key = hash(var), kind
        if key not in self.stages:
            lead = lead_of(shape, self.rows)
            made = te.compute(shape, element, f"{kind}{len(self.stages)}_rows{lead}")
            self.stages[key] = made
        return self.stages[key]

    def _made(self, var: relax.Var) -> te.Tensor:
        """Return the tensor of a step that looks at whole rows."""
        value = self.view.defs[var]
        if isinstance(value, relax.TupleGetItem):
            return self._chosen(var, self.view.defs[value.tuple_value], value.index)
        name = value.op.name.removeprefix("relax.").removeprefix("nn.")
        return getattr(self, f"_{name}")(var, value)

    def _row(self, source: relax.Expr, at: tuple[Any, ...], dtype: str = "float32") -> Any:
        """Return a loop over a row of a tensor, and the element that it is at."""
        axis = te.reduce_axis((0, sizes(source)[-1]), "e")
        return axis, self.formula.at(source, (*at, axis.var)).astype(dtype)

    def _softmax(self, var: relax.Var, call: relax.Call) -> te.Tensor:
        source, shape = call.args[0], sizes(var)

        def largest(*at: tirx.Var) -> tirx.Expr:
            axis, x = self._row(source, at)
            return te.max(x, axis)

        top = self._stage(var, "top", shape[:-1], largest)

        def summed(*at: tirx.Var) -> tirx.Expr:
            axis, x = self._row(source, at)
            return te.sum(te.exp(x - top(*at)), axis)

        total = self._stage(var, "total", shape[:-1], summed)

        def share(*at: tirx.Var) -> tirx.Expr:
            x = self.formula.at(source, at).astype("float32")
            return (te.exp(x - top(*at[:-1])) / total(*at[:-1])).astype(dtype_of(var))

        return self._stage(var, "softmax", shape, share)

    def _sum(self, var: relax.Var, call: relax.Call) -> te.Tensor:
        rank = len(sizes(call.args[0])) - 1

        def total(*at: tirx.Var) -> tirx.Expr:
            axis, x = self._row(call.args[0], at)
            return te.sum(x, axis)

        wide = self._stage(var, "sum", sizes(call.args[0])[:-1], total)
        dtype = dtype_of(var)
        if dtype == "float32" and len(sizes(var)) == rank:
            return wide
        return self._stage(var, "whole", sizes(var), lambda *at: wide(*at[:rank]).astype(dtype))

    def _chosen(self, var: relax.Var, call: relax.Call, item: int) -> te.Tensor:
        """Return the largest elements, or where they are: those with so many in front of them."""
        source = call.args[0]
        infinite, first = tirx.const(inf, "float32"), tirx.const(0, "int32")

        def key(*at: tirx.Var) -> tirx.Expr:
            x = self.formula.at(source, at).astype("float32")
            return tirx.Select(tirx.isnan(x), infinite, x)

        keys = self._stage(call, "key", sizes(source), key)

        def rank(*at: tirx.Var) -> tirx.Expr:
            axis = te.reduce_axis((0, sizes(source)[-1]), "e")
            mine, other = keys(*at), keys(*at[:-1], axis.var)
            front = tirx.any(other > mine, tirx.all(other == mine, axis.var < at[-1]))
            return te.sum(tirx.Select(front, tirx.const(1, "int32"), tirx.const(0, "int32")), axis)

        ranks = self._stage(call, "rank", sizes(source), rank)
        dtype = dtype_of(var)

        parts, run = _in_runs(int(sizes(source)[-1]))

        def among(*at: tirx.Var) -> tirx.Expr:
            axis = te.reduce_axis((0, run), "e")
            here = ranks(*at[:-2], at[-1] * run + axis.var) == at[-2].astype("int32")
            number = (at[-1] * run + axis.var).astype("int32")
            return te.max(tirx.Select(here, number, first), axis)

        some = self._stage(call, "some", [*sizes(var), parts], among)

        def found(*at: tirx.Var) -> tirx.Expr:
            axis = te.reduce_axis((0, parts), "e")
            return te.max(some(*at, axis.var), axis)

        places = self._stage(call, "place", sizes(var), found)
        if item:
            return self._stage(var, "ids", sizes(var), lambda *at: places(*at).astype(dtype))
        return self._stage(
            *(var, "largest", sizes(var)),
            lambda *at: self.formula.at(source, (*at[:-1], places(*at).astype("int64"))),
        )

    def _gather_elements(self, var: relax.Var, call: relax.Call) -> te.Tensor:
        data, ids = call.args

        def element(*at: tirx.Var) -> tirx.Expr:
            index = self.formula.at(ids, at).astype("int64")
            return self.formula.at(data, (*at[:-1], index))

        return self._stage(var, "gathered", sizes(var), element)

    def _scatter_elements(self, var: relax.Var, call: relax.Call) -> te.Tensor:
        data, ids, updates = call.args
        number = filled(self.view, updates)
        assert number is not None, "refused by `_marks`"
        one, none = tirx.const(1, "int32"), tirx.const(0, "int32")

        def marked(*at: tirx.Var) -> tirx.Expr:
            axis, index = self._row(ids, at[:-1], "int64")
            place = at[-1].astype("int64")  # which counts from the end, too
            here = tirx.any(index == place, index == place - sizes(var)[-1])
            return te.max(tirx.Select(here, one, none), axis)

        marks = self._stage(var, "marked", sizes(var), marked)
        written = tirx.const(number, dtype_of(var))

        def element(*at: tirx.Var) -> tirx.Expr:
            return tirx.Select(marks(*at) == one, written, self.formula.at(data, at))

        return self._stage(var, "scattered", sizes(var), element)
