"""Block graphs as PrimFuncs: what a fused function is until its kernels are made.

Each statement is one block over its axes, with no tiles; the body runs anywhere, slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import ir, te, tirx

from ..estimator.tile_plan import PLAN_ATTR, PlanTable
from ..matching.expressions import int64
from ..tvm_ir import IRBuilder, T
from ..workload import ACTIVATIONS, INTEGER_DTYPES, Dim, DynamicDim, Graph, Operand, Workload
from ..workload.graph import Block
from ..workload.json import WORKLOAD_ATTR, to_json
from ..workload.values import At, Axis, AxisValue, Const, Expr, Lookup, Op, Read, Size
from .activations import ACCUMULATE, activate
from .packed import unpacked
from .stages import as_stored


def build_prim_func(work: Workload, table: PlanTable) -> tirx.PrimFunc:
    """Return a function ``main`` that computes `work`, with it and its plans as attributes.

    Its parameters are the operands of ``work.graph``, its blocks the statements.
    """
    attrs: dict[str, Any] = {PLAN_ATTR: table.to_attr(), WORKLOAD_ATTR: to_json(work)}
    attrs |= {"global_symbol": "main", "op_pattern": 8}
    return reference_prim_func(work.graph).with_attrs(attrs)


def declare(graph: Graph) -> list[tirx.Var]:
    """Declare the operands of a graph as parameters of the function that is being built."""
    sizes = {name: tirx.Var(name, "int64") for name in graph.dims}
    told = {slot.name: slot.dim for slot in graph.slots if slot.role == "scalar"}

    def declared(operand: Operand) -> tirx.Var:
        if operand.shape is not None:
            shape = [int64(d) if isinstance(d, int) else sizes[d.name] for d in operand.shape]
            return T.arg(operand.name, T.buffer(shape, operand.dtype))
        dim = told[operand.name]
        number = sizes[dim.name] if isinstance(dim, DynamicDim) else tirx.Var(operand.name, "int64")
        T.arg(number.name, number)
        return number

    return [declared(o) for o in (*graph.inputs, *graph.outputs)]


def dims_of(graph: Graph, params: Sequence[tirx.Var]) -> dict[str, tirx.Expr]:
    """Return the values of a graph's dynamic dimensions, as the parameters of a function have them.

    The parameters are the operands, in the graph's order.
    """
    found: dict[str, tirx.Expr] = {}
    told = {slot.name: slot.dim for slot in graph.slots if slot.role == "scalar"}
    for operand, param in zip((*graph.inputs, *graph.outputs), params, strict=True):
        is_size = operand.shape is None
        values = [param] if is_size else param.ty.shape
        sizes = [told[operand.name]] if is_size else [*(operand.shape or ())]
        for dim, value in zip(sizes, values, strict=True):
            if isinstance(dim, DynamicDim):
                found.setdefault(dim.name, value)
    return found


def within(bounds: Mapping[str, int], dims: Mapping[str, tirx.Expr]) -> tirx.Expr:
    """Return the condition that dynamic dimensions are within bounds, of which there are some."""
    return tirx.all(*(dims[name] <= int64(upper) for name, upper in bounds.items()))


def reference_prim_func(graph: Graph) -> tirx.PrimFunc:
    """Return the function that executes the statements of `graph` one after the other."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"tirx.noalias": True})
        params = declare(graph)
        operands = (*graph.inputs, *graph.outputs)
        buffers = {o.name: p for o, p in zip(operands, params, strict=True)}
        writer = Writer(graph, buffers, dims_of(graph, params))
        for block in graph.blocks:
            writer.write(block)
    return builder.get()


def _ratio(x: tirx.Expr, y: tirx.Expr) -> tirx.Expr:
    none = y == tirx.const(0.0, ACCUMULATE)
    return tirx.Select(none, y, x / tirx.Select(none, tirx.const(1.0, ACCUMULATE), y))


def _finite(x: tirx.Expr) -> tirx.Expr:
    lowest = tirx.const(float("-inf"), ACCUMULATE)
    return tirx.Select(x == lowest, tirx.const(0.0, ACCUMULATE), x)


def larger(x: tirx.Expr, y: tirx.Expr) -> tirx.Expr:
    """Return the larger of two numbers; NaN where one is NaN, which `tirx.max` may lose."""
    return tirx.Select(x < y, y, tirx.Select(x >= y, x, x + y))


def _smaller(x: tirx.Expr, y: tirx.Expr) -> tirx.Expr:
    return tirx.Select(x > y, y, tirx.Select(x <= y, x, x + y))


FUNCTIONS: Mapping[str, Callable[..., tirx.Expr]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "ratio": _ratio,
    "minimum": _smaller,
    "maximum": larger,
    "sqrt": te.sqrt,
    "log": te.log,
    "finite": _finite,
    "exp": te.exp,
    "rsqrt": te.rsqrt,
    **{name: lambda x, name=name: activate(name, x) for name in ACTIVATIONS},
}
"""What each of the operators of a graph computes that is no formula of others, in float32."""


@contextmanager
def statement(name: str, sizes: Mapping[str, Any], kinds: str) -> Iterator[list[tirx.Var]]:
    """Open a block called `name` within loops over `sizes`; its axes are of `kinds`."""
    with T.grid(*sizes.values()) as loops:
        loops = [loops] if isinstance(loops, ir.Var) else list(loops)
        IRBuilder.name_many(list(sizes), loops)
        with T.sblock(name):
            places = T.axis.remap(kinds, loops)
            places = [places] if isinstance(places, ir.Var) else list(places)
            IRBuilder.name_many([f"v_{each}" for each in sizes], places)
            yield places


class Writer:
    """The buffers so far; `write` adds a statement to the function that is being built."""

    def __init__(self, graph: Graph, buffers: dict[str, tirx.Var], dims: Mapping[str, tirx.Expr]):
        self.graph, self.buffers, self.dims = graph, buffers, dims
        self.axes: dict[str, tirx.Var] = {}
        self.dtype = ACCUMULATE

    def write(self, block: Block) -> None:
        """Add the loops of a statement, and its block."""
        tensor = self.graph[block.out]
        if block.out not in self.buffers:
            shape = [self._size(d) for d in tensor.shape]
            self.buffers[block.out] = T.sblock_alloc_buffer(shape, tensor.dtype)
        out = self.buffers[block.out]
        IRBuilder.name(block.out, out)
        self.dtype = "int32" if block.combine and tensor.dtype in INTEGER_DTYPES else ACCUMULATE
        at = block.at
        whole = all(isinstance(a.size, int) and a.size > 0 for a in block.reduced)
        if block.combine and not whole:
            # TVM starts a sum in its first iteration, and there may be none
            with self._statement(f"{block.out}_start", block.axes, ()):
                start = self._start(block).astype(tensor.dtype)
                T.buffer_store(out, start, [self._index(c) for c in at])
        with self._statement(block.out, block.axes, block.reduced):
            self._store(block, out, [self._index(c) for c in at], starts=whole)

    @contextmanager
    def _statement(
        self, name: str, axes: tuple[Axis, ...], reduced: tuple[Axis, ...]
    ) -> Iterator[None]:
        """Open a block called `name` within its loops."""
        sizes = {a.name: self._size(a.size) for a in (*axes, *reduced)}
        with statement(name, sizes, "S" * len(axes) + "R" * len(reduced)) as places:
            self.axes = dict(zip(sizes, places, strict=True))
            yield

    def _nothing(self, block: Block) -> tirx.Expr:
        """Return what combining nothing gives."""
        none = 0.0 if block.combine == "sum" else float("-inf")
        return tirx.const(none if self.dtype == ACCUMULATE else 0, self.dtype)

    def _start(self, block: Block) -> tirx.Expr:
        return self._nothing(block) if block.start is None else self._value(block.start)

    def _store(self, block: Block, out: tirx.Var, at: list[tirx.Expr], *, starts: bool) -> None:
        dtype = str(out.ty.dtype)
        if not block.combine:
            value = self._value(block.value)
            rounds = self.graph[block.out].rounds and self.dtype == ACCUMULATE
            value = as_stored(value, dtype) if rounds else value
            T.buffer_store(out, value.astype(dtype), at)
            return
        if starts:
            with T.init():
                T.buffer_store(out, self._start(block).astype(dtype), at)
        value, seen = self._value(block.value), self._seen(block)
        if seen is not None:
            value = tirx.if_then_else(seen, value, self._nothing(block))
        total = out[tuple(at)].astype(self.dtype)
        total = total + value if block.combine == "sum" else tirx.max(total, value)
        T.buffer_store(out, total.astype(dtype), at)

    def _seen(self, block: Block) -> tirx.Expr | None:
        """Return the condition under which an element is combined; None if all are."""
        found: list[tirx.Expr] = []
        if block.band is not None:
            distance = self.axes[block.band.column] - self.axes[block.band.row]
            if block.band.least is not None:
                found.append(distance >= self._limit(block.band.least))
            if block.band.most is not None:
                found.append(distance <= self._limit(block.band.most))
        if block.where is not None:
            found.append(self._value(block.where) != tirx.const(0, self.dtype))
        return tirx.all(*found) if found else None

    def _limit(self, value: Expr) -> tirx.Expr:
        """Return a sum of sizes, whole numbers and elements of tensors of them."""
        if isinstance(value, Read):
            return self._read(value).astype("int64")
        if isinstance(value, Op):
            return FUNCTIONS[value.name](*map(self._limit, value.args))
        assert isinstance(value, Size | Const)
        return self._size(value.dim) if isinstance(value, Size) else int64(int(value.value))

    def _value(self, value: Expr) -> tirx.Expr:
        """Return a value in the dtype of the statement."""
        if isinstance(value, Read):
            return self._read(value)
        if isinstance(value, AxisValue):
            return self.axes[value.axis].astype(self.dtype)
        if isinstance(value, Size):
            return self._size(value.dim).astype(self.dtype)
        if isinstance(value, Const):
            return tirx.const(value.value, self.dtype)
        assert isinstance(value, Op)
        if value.formula is not None:
            return self._value(value.formula)
        return FUNCTIONS[value.name](*map(self._value, value.args))

    def _read(self, read: Read) -> tirx.Expr:
        """Return an element, unpacked where its tensor is packed."""
        at = [self._index(c) for c in read.at]
        form = self.graph[read.tensor].format
        if form is None:
            return self.buffers[read.tensor][tuple(at)].astype(self.dtype)
        stored = [self.buffers[o.name] for o in self.graph[read.tensor].operands()]
        loads = [lambda *place, b=buffer: b[place] for buffer in stored]
        return unpacked(form, loads, at, self.dtype)

    def _index(self, at: At) -> tirx.Expr:
        """Return a coordinate."""
        terms = [self.axes[a] if s == 1 else self.axes[a] * int64(s) for a, s in at.terms]
        terms += [int64(at.start)] if at.start or not terms else []
        found = terms[0]
        for term in terms[1:]:
            found = found + term
        if isinstance(at, Lookup):
            assert at.number is not None, "a builder gives one"
            numbers = self.buffers[at.number.tensor]
            part = numbers[tuple(map(self._index, at.number.at))].astype("int64")
            part = tirx.max(int64(0), tirx.min(part, int64(at.count - 1)))
            return found + part * int64(at.stride)
        found = found // int64(at.div) if at.div != 1 else found
        return found if at.mod is None else found % self._size(at.mod)

    def _size(self, dim: Dim) -> tirx.Expr:
        return int64(dim) if isinstance(dim, int) else self.dims[dim.name]
