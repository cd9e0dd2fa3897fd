"""Which experts each row goes to, and their shares: one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import tvm
from tvm import ir, relax, te, tirx
from tvm.target import Target

from ..compute.routing import scheduled
from ..matching.effects import Memory
from ..matching.pattern import BlockView, is_call, operator_of
from ..matching.shapes import dtype_of, elsewhere, product, same_shape, shape_of
from ..tvm_ir import GenericConst
from .expert_values import ARITHMETIC, FUNCTIONS, MOVES, Formula, Place, moved_place, sizes
from .modules import rewritten

MOST_EXPERTS = 1024
"""The most elements of a row: each is compared with every other."""

_STAGES = ("relax.nn.softmax", "relax.sum", "relax.gather_elements", "relax.scatter_elements")
_ELEMENTS = (
    *(*ARITHMETIC, *FUNCTIONS, *MOVES, "relax.astype", "relax.where"),
    *("relax.bitwise_not", "relax.logical_not", "relax.full_like"),
)


@tvm.transform.module_pass(opt_level=0, name="RouteExperts")
@dataclass(frozen=True)
class RouteExperts:
    """Choose experts, and compute their shares, in one kernel.

    rewrite::

        p = R.nn.softmax(logits); best = R.topk(p, k, ret_type="both")
        share = R.divide(best[0], R.sum(best[0], axis=[-1], keepdims=True)); ids = best[1]
            ->
        both = R.call_tir(routing, (logits,)); share = both[0]; ids = both[1]

    Functions of elements, softmax, sums of rows, further choices (of groups of experts), and
    elements that are looked up or marked by what was chosen are taken along.  Of equal elements the
    first is chosen, as by TVM's ``topk``, and NaN counts as infinity.

    declines when:
        there are more than 1024 elements, or a size but that of rows is only known at run time; the
        smallest are chosen; what is read between is computed of what is chosen elsewhere.

    Parameters
    ----------
    target : Target
        What the kernel is scheduled for.
    """

    target: Target

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        rewriter = _Rewrite(mod, self.target)
        new = rewritten(mod, rewriter, memory=True)
        if not rewriter.made:
            return mod
        for gvar, func in new.functions_items():
            if isinstance(func, relax.Function):
                new.update_func(gvar, relax.analysis.remove_all_unused(func))
        for gvar in rewriter.made:
            new.update_func(gvar, scheduled(new[gvar], self.target))
        return new


def _is_step(view: BlockView, var: relax.Var) -> bool:
    """Tell whether a binding may be part of a routing."""
    value = view.defs[var]
    if var in view.casts or view.escapes(var):
        return False
    if isinstance(value, relax.TupleGetItem):
        return view.call(value.tuple_value, "relax.topk") is not None
    name = operator_of(value)
    if name == "relax.topk":
        return _is_choice(value)
    shape = shape_of(var) if isinstance(var.ty, relax.TensorType) else None
    if not shape or not _is_small(shape) or name not in (*_STAGES, *_ELEMENTS):
        return False
    rank = len(shape)
    if name in MOVES:
        rows = tuple(tirx.Var("i", "int64") for _ in shape)
        return shape_of(value.args[0]) is not None and moved_place(value, rows) is not None
    if name == "relax.nn.softmax":
        return int(value.attrs.axis) % rank == rank - 1
    if name == "relax.sum":
        return _sums_rows(value) and "float" in dtype_of(var)
    if name == "relax.gather_elements":
        return int(value.attrs.axis) % rank == rank - 1
    if name == "relax.scatter_elements":
        return _marks(view, value)
    return all(shape_of(a) is not None for a in value.args if isinstance(a.ty, relax.TensorType))


def _is_small(shape: list[Any]) -> bool:
    return isinstance(shape[-1], tirx.IntImm) and int(shape[-1]) <= MOST_EXPERTS


def _is_choice(call: relax.Call) -> bool:
    shape, attrs = shape_of(call.args[0]), call.attrs
    if shape is None or len(shape) < 2 or not _is_small(shape):
        return False
    last = int(attrs.axis) % len(shape) == len(shape) - 1
    k = int(attrs.k)
    floats = dtype_of(call.args[0]).startswith(("float", "bfloat"))
    return (
        last
        and floats
        and attrs.ret_type == "both"
        and bool(attrs.largest)
        and 0 < k <= int(shape[-1])
    )


def _sums_rows(call: relax.Call) -> bool:
    rank = len(sizes(call.args[0]))
    return call.attrs.axis is not None and [int(a) % rank for a in call.attrs.axis] == [rank - 1]


def _marks(view: BlockView, call: relax.Call) -> bool:
    """Tell whether a scatter writes one number to elements of rows."""
    rank = len(sizes(call.args[0]))
    last = int(call.attrs.axis) % rank == rank - 1 and str(call.attrs.reduction) == "update"
    return last and _number(view, call.args[2]) is not None


def _number(view: BlockView, expr: relax.Expr) -> GenericConst | None:
    """Return the number that all elements of a tensor are."""
    value = view.definition(expr)
    while is_call(value, *MOVES, "relax.full", "relax.full_like"):
        place = 1 if is_call(value, "relax.full", "relax.full_like") else 0
        value = view.definition(value.args[place])
    return value if isinstance(value, GenericConst) and not value.ty.shape else None


class _Region:
    """The steps around a choice, what they read, and what of them is read."""

    def __init__(self, view: BlockView, seed: relax.Var):
        self.view = view
        self.inside: dict[relax.Var, None] = {}
        self._grow(seed)
        self._trim()
        self.outputs = [v for v in self.inside if self._readers(v)]
        choices = [v for v in self.inside if is_call(view.defs[v], "relax.topk")]
        last = max(choices, key=view.index.__getitem__, default=None)
        source = [] if last is None else sizes(view.defs[last].args[0])
        self.rows = product(source[:-1]) if source else None

    def _grow(self, seed: relax.Var) -> None:
        waiting, view = [seed], self.view
        while waiting:
            var = waiting.pop()
            if var in self.inside or not _is_step(view, var):
                continue
            outside = [r for r in view.reads[var] if r in view.index and r not in self.inside]
            late = any(view.index[r] > view.index[seed] and not self._follows(r) for r in outside)
            if var is not seed and late:
                continue
            self.inside[var] = None
            waiting += [r for r in view.reads[var] if r in view.index]
            waiting += [u for u in view.uses(var) if view.index[u] > view.index[var]]

    def _follows(self, var: relax.Var) -> bool:
        """Tell whether a value is computed of the region, and of nothing else that comes late."""
        return _is_step(self.view, var)

    def _readers(self, var: relax.Var) -> list[relax.Var]:
        return [u for u in self.view.uses(var) if u not in self.inside]

    def _trim(self) -> None:
        """Leave movements at the end to what reads them."""
        found = True
        while found:
            found = False
            for var in [*self.inside]:
                moves = is_call(self.view.defs[var], *MOVES, "relax.full_like")
                if moves and (self._readers(var) or not self.view.uses(var)):
                    del self.inside[var]
                    found = True

    @property
    def reads(self) -> list[relax.Expr]:
        """What is read from elsewhere."""
        view = self.view
        found = {hash(r): r for v in self.inside for r in view.reads[v] if r not in self.inside}
        return [*found.values()]

    @property
    def place(self) -> int:
        """In front of which binding the kernel has to be."""
        return min(self.view.index[u] for v in self.outputs for u in self._readers(v))

    def is_whole(self) -> bool:
        """Tell whether one kernel can take the place of the region."""
        view = self.view
        if self.rows is None or not self.outputs:
            return False
        tensors = all(isinstance(v.ty, relax.TensorType) for v in self.outputs)
        before = all(
            view.index.get(r, -1) < self.place for r in self.reads if isinstance(r, relax.Var)
        )
        shapes = [sizes(v) for v in self.inside if isinstance(v.ty, relax.TensorType)]
        counted = all(self.lead(shape) is not None for shape in shapes)
        return tensors and before and counted and all(map(view.memory.is_constant, self.reads))

    def lead(self, shape: list[Any]) -> int | None:
        """Return how many dimensions in front are the rows."""
        counts = range(1, len(shape) + 1)
        return next((n for n in counts if same_shape([product(shape[:n])], [self.rows])), None)


class _Kernel:
    """The tensor expressions of a region."""

    def __init__(self, region: _Region):
        self.region, self.view = region, region.view
        elements = [v for v in region.inside if not self._is_stage(v)]
        self.formula = Formula(self.view, elements, self._leaf)
        self.operands: dict[int, relax.Expr] = {}
        self.given: dict[int, te.Tensor] = {}
        self.stages: dict[tuple[int, str], te.Tensor] = {}

    def _is_stage(self, var: relax.Var) -> bool:
        value = self.view.defs[var]
        return isinstance(value, relax.TupleGetItem) or is_call(value, *_STAGES, "relax.topk")

    def find_operands(self) -> list[relax.Expr]:
        """Return what the kernel reads, in order."""
        self.compute()
        return [*self.operands.values()]

    def compute(self, *given: te.Tensor) -> list[te.Tensor]:
        """Return the outputs."""
        self.given = dict(zip(self.operands, given, strict=bool(given)))
        self.stages = {}
        return [self._tensor(var) for var in self.region.outputs]

    def _tensor(self, var: relax.Var) -> te.Tensor:
        if self._is_stage(var):
            return self._made(var)
        return self._stage(var, "value", sizes(var), lambda *at: self.formula.at(var, at))

    def _leaf(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        if isinstance(expr, relax.Var) and expr in self.region.inside:
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
            lead = self.region.lead(shape)
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

        def reduced(made: Any, value: Callable[[Any, Any], Any]) -> Callable[..., Any]:
            def element(*at: tirx.Var) -> tirx.Expr:
                axis, x = self._row(source, at)
                return made(value(x, at), axis)

            return element

        top = self._stage(var, "top", shape[:-1], reduced(te.max, lambda x, _: x))
        total = self._stage(
            var, "total", shape[:-1], reduced(te.sum, lambda x, at: te.exp(x - top(*at)))
        )

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
        infinite, int64 = tirx.const(inf, "float32"), tirx.const(0, "int64")

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

        def found(*at: tirx.Var) -> tirx.Expr:
            axis = te.reduce_axis((0, sizes(source)[-1]), "e")
            here = ranks(*at[:-1], axis.var) == at[-1].astype("int32")
            return te.max(tirx.Select(here, axis.var, int64), axis)

        places = self._stage(call, "place", sizes(var), found)
        if item:
            return self._stage(var, "ids", sizes(var), lambda *at: places(*at).astype(dtype))
        return self._stage(
            var, "largest", sizes(var), lambda *at: self.formula.at(source, (*at[:-1], places(*at)))
        )

    def _gather_elements(self, var: relax.Var, call: relax.Call) -> te.Tensor:
        data, ids = call.args

        def element(*at: tirx.Var) -> tirx.Expr:
            index = self.formula.at(ids, at).astype("int64")
            return self.formula.at(data, (*at[:-1], index))

        return self._stage(var, "gathered", sizes(var), element)

    def _scatter_elements(self, var: relax.Var, call: relax.Call) -> te.Tensor:
        data, ids, updates = call.args
        number = _number(self.view, updates)
        assert number is not None, "refused by `_marks`"
        one, none = tirx.const(1, "int32"), tirx.const(0, "int32")

        def marked(*at: tirx.Var) -> tirx.Expr:
            axis, index = self._row(ids, at[:-1], "int64")
            return te.max(tirx.Select(index == at[-1].astype("int64"), one, none), axis)

        marks = self._stage(var, "marked", sizes(var), marked)
        written = tirx.const(number.value.numpy().item(), dtype_of(var))

        def element(*at: tirx.Var) -> tirx.Expr:
            return tirx.Select(marks(*at) == one, written, self.formula.at(data, at))

        return self._stage(var, "scattered", sizes(var), element)


@relax.expr_functor.mutator
class _Rewrite(relax.PyExprMutator):
    memory: Memory

    def __init__(self, mod: ir.IRModule, target: Target):
        super().__init__(mod)
        self.mod, self.target = mod, target
        self.regions: dict[relax.Var, list[_Region]] = {}
        self.made: dict[ir.GlobalVar, None] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        view = BlockView(block, self.mod, memory=self.memory)
        taken, self.regions = set[relax.Var](), {}
        for var, value in view.defs.items():
            if var in taken or not is_call(value, "relax.topk") or not _is_choice(value):
                continue
            region = _Region(view, var)
            taken.update(region.inside)
            at_home = elsewhere([*region.reads, *region.inside], self.target) is None
            if at_home and region.is_whole():
                first = view.bindings[region.place].var
                self.regions.setdefault(first, []).append(region)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        for region in self.regions.pop(binding.var, ()):
            kernel = _Kernel(region)
            reads = [self.visit_expr(read) for read in kernel.find_operands()]
            call = self.builder_.call_te(kernel.compute, *reads, primfunc_name_hint="routing")
            self.made[call.args[0]] = None
            made = self.builder_.emit(call)
            several = len(region.outputs) > 1
            for index, var in enumerate(region.outputs):
                item = self.builder_.emit(relax.TupleGetItem(made, index)) if several else made
                self.set_var_remap(var, item)
        super().visit_var_binding_(binding)
