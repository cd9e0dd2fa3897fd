"""RecordWork: what each function multiplies, kernel by kernel; RecordKernels: their code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tvm import ir, relax, tirx

from ..matching.pattern import PrimExpr, is_call
from ..matching.shapes import dtype_of, shape_of
from ..report import Report
from ..report.decision import Decision
from ..report.item import Array, Item, Product, kind_of, products_of, storage_of
from ..report.sizes import Extent, renamed
from ..transforms.modules import bindings_of, functions_of, module_pass
from ..tvm_ir import structural_hash
from ..workload.graph import Graph
from .operators import (
    COUNTED,
    arguments_of,
    arrays_of,
    extent,
    function_item,
    operator_item,
    results_of,
    tensors_of,
)
from .record_graph import KERNELS, OUTSIDE

COLLECTIVES = ("relax.ccl.allreduce", "relax.ccl.allgather")


@module_pass
class RecordWork:
    """Record what each function multiplies; the module stays as it is.

    Every fused chain is recorded, every matmul, convolution and attention that was left, whoever
    wrote it, sums and gathers of several workers, and every call of a function outside of the
    module, whose work nobody here knows.  It has to come behind the fusing passes and
    `ReportLeftovers`, whose reasons it takes over.
    """

    report: Report  # its decisions and leftovers are read, its `work` is added to

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        alive = relax.transform.DeadCodeElimination()(mod)
        functions = functions_of(alive, relax.Function)
        collector = _Collector(alive, self.report)
        called = {name for func in functions.values() for name in collector.called(func)}
        for gvar, func in functions.items():
            name = gvar.name_hint
            if name not in called or (func.attrs or {}).get("global_symbol"):
                self.report.work.extend(_counted(collector.items(name, name, func)))
        return mod


@module_pass
class RecordKernels:
    """Record a hash of each PrimFunc in `kernels`; the module stays as it is."""

    kernels: dict[str, str]

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            number = structural_hash(func, map_free_vars=True) & (2**64 - 1)
            self.kernels[gvar.name_hint] = f"{number:016x}"
        return mod


def _counted(items: Iterator[Item]) -> list[Item]:
    """Put equal work together."""
    first: dict[Item, Item] = {}
    count: dict[Item, int] = {}
    for item in items:
        first.setdefault(item.key, item)
        count[item.key] = count.get(item.key, 0) + item.count
    return [replace(item, count=count[key]) for key, item in first.items()]


class _Collector:
    """Reads the functions of one module."""

    def __init__(self, mod: ir.IRModule, report: Report):
        self.mod = mod
        self.decisions: dict[str, Decision] = {d.kernel: d for d in report.decisions if d.kernel}
        self.reasons = {(x.function, x.where): x.reason for x in report.leftovers}

    def called(self, func: relax.Function) -> Iterator[str]:
        """Yield the names of Relax functions that a function calls."""
        for binding, _ in bindings_of(func.body):
            value = binding.value
            if isinstance(value, relax.Function):
                yield from self.called(value)
            elif isinstance(value, relax.Call) and isinstance(value.op, ir.GlobalVar):
                yield value.op.name_hint

    def items(
        self,
        phase: str,
        name: str,
        func: relax.Function,
        inside: tuple[str, ...] = (),
        around: Mapping[relax.Var, relax.Function] | None = None,
    ) -> Iterator[Item]:
        """Yield what a function multiplies, and what the functions do that it calls, in its sizes.

        `phase` is the function that is called from outside, `inside` names those that call this
        one, so that recursion ends, and `around` has the local functions that it can call.
        """
        known = dict(around or {})
        for binding, _ in bindings_of(func.body):
            var, value = binding.var, binding.value
            if isinstance(value, relax.Function):
                known[var] = value
            if not isinstance(value, relax.Call):
                continue
            if isinstance(value.op, ir.GlobalVar | relax.Var):
                yield from self._of_callee(phase, name, value, inside, known)
                continue
            item = self._item(phase, var, value)
            if item is not None:
                why = self.reasons.get((name, item.where)) or self.reasons.get((name, name), "")
                yield replace(item, reason=why or item.reason) if item.status == "left" else item

    def _of_callee(
        self,
        phase: str,
        name: str,
        call: relax.Call,
        inside: tuple[str, ...],
        known: Mapping[relax.Var, relax.Function],
    ) -> Iterator[Item]:
        """Yield what the function does that `name` calls, one of the module or a local one."""
        if isinstance(call.op, ir.GlobalVar):
            callee, inside = call.op.name_hint, (*inside, name)
            func = self.mod[call.op] if callee not in inside else None
            known = {}
        else:
            callee, func = name, known.get(call.op)
            known = {var: f for var, f in known.items() if not var.same_as(call.op)}
        if isinstance(func, relax.Function):
            sizes = _sizes_in_call(func, call)
            for item in self.items(phase, callee, func, inside, known):
                yield _seen_from_caller(item, sizes)

    def _item(self, function: str, var: relax.Var, call: relax.Call) -> Item | None:
        if is_call(call, *COUNTED):
            return replace(operator_item(function, var, call), reason="no pass took it")
        if is_call(call, *KERNELS) and isinstance(call.args[0], ir.GlobalVar):
            decision = self.decisions.get(call.args[0].name_hint)
            if decision is not None and decision.workload is not None:
                return _fused(function, var, call, decision)
            func = self.mod[call.args[0]]
            if isinstance(func, tirx.PrimFunc):
                made = function_item(function, var, call, func)
                return replace(made, reason="a function of TIR") if made is not None else None
        if is_call(call, *COLLECTIVES):
            return _collective(function, var, call)
        if isinstance(call.op, relax.ExternFunc):
            return _outside(function, var, call.op, call.args)
        if is_call(call, *OUTSIDE) and isinstance(call.args[0], relax.ExternFunc):
            return _outside(function, var, call.args[0], call.args[1:])
        return None


def _fused(function: str, var: relax.Var, call: relax.Call, decision: Decision) -> Item:
    """Return the item of a kernel of ours."""
    work = decision.workload
    assert work is not None, "a fused chain has a workload"
    dims = _dims(work.graph, call)
    return Item(
        function,
        kind_of(work),
        f"{decision.pattern}: {decision.spelling}",
        "fused",
        work.dtype,
        storage=storage_of(work),
        products=products_of(work, dims),
        where=var.name,
        kernel=decision.kernel,
        dims=tuple(dims.items()),
        work=work,
    )


def _dims(graph: Graph, call: relax.Call) -> dict[str, Extent]:
    """Return what the dynamic dimensions of a graph are in the function, by its operands."""
    args = arguments_of(call)
    found: dict[str, Extent] = {}
    for operand, arg in zip(graph.inputs, args, strict=False):
        if operand.shape is not None:
            _bind(found, operand.shape, shape_of(arg) or ())
    scalars = [s.dim for s in graph.slots if s.role == "scalar" and s.dim is not None]
    numbers = [a for a in args if not isinstance(a.ty, relax.TensorType)]
    for dim, number in zip(scalars, numbers, strict=False):
        if not isinstance(dim, int):
            found[dim.name] = extent(getattr(number, "value", number))
    for operand, ty in zip(graph.outputs, results_of(call.ty_args), strict=False):
        if operand.shape is not None and isinstance(ty.shape, relax.ShapeExpr):
            _bind(found, operand.shape, ty.shape.values)
    return found


def _bind(found: dict[str, Extent], dims: Sequence[object], sizes: Sequence[ir.Expr]) -> None:
    for dim, size in zip(dims, sizes, strict=False):
        if not isinstance(dim, int):
            found.setdefault(getattr(dim, "name"), extent(size))  # noqa: B009


def _collective(function: str, var: relax.Var, call: relax.Call) -> Item:
    """Return the item of a collective between workers: the array that it receives."""
    kind = getattr(call.attrs, "op_type", "")
    what = f"{call.op.name.removeprefix('relax.')} {kind}".strip()
    told = {"arrays": arrays_of(var), "where": var.name, "reason": "it is between workers"}
    return Item(function, "collective", what, "outside", dtype_of(var), **told)


def _outside(
    function: str, var: relax.Var, callee: relax.ExternFunc, args: Sequence[relax.Expr]
) -> Item:
    """Return the item of a call that leaves the module."""
    arrays = arrays_of(*args, var)
    tensors = tensors_of(args)
    return Item(
        function,
        "call",
        str(callee.global_symbol),
        "outside",
        dtype_of(tensors[0]) if tensors else "",
        arrays=arrays,
        where=var.name,
        reason="it calls a function outside of the module, whose work is not known",
    )


def _sizes_in_call(func: relax.Function, call: relax.Call) -> dict[str, Extent]:
    """Return what the symbolic sizes of a function are where it is called, by their names."""
    found: dict[str, Extent] = {}
    for param, arg in zip(func.params, call.args, strict=False):
        for mine, theirs in _pairs(param.ty, arg.ty):
            if isinstance(mine, tirx.Var):
                found.setdefault(mine.name, extent(theirs))
    return found


def _pairs(mine: ir.Type, theirs: ir.Type) -> Iterator[tuple[PrimExpr, PrimExpr]]:
    """Yield the sizes of a parameter beside those of its argument."""
    if isinstance(mine, ir.TupleType) and isinstance(theirs, ir.TupleType):
        for one, other in zip(mine.fields, theirs.fields, strict=False):
            yield from _pairs(one, other)
    else:
        yield from zip(_sizes(mine), _sizes(theirs), strict=False)


def _sizes(ty: ir.Type) -> Sequence[PrimExpr]:
    known = ty.shape if isinstance(ty, relax.TensorType) else ty
    return list(known.values) if isinstance(known, relax.ShapeExpr | relax.ShapeType) else ()


def _seen_from_caller(item: Item, sizes: Mapping[str, Extent]) -> Item:
    """Return an item whose sizes are in the names of the caller's, by `_sizes_in_call`."""

    def own(size: Extent) -> Extent:
        return renamed(size, sizes)

    return replace(
        item,
        products=tuple(Product(*map(own, (p.m, p.n, p.k, p.batch))) for p in item.products),
        arrays=tuple(Array(tuple(map(own, a.shape)), a.dtype) for a in item.arrays),
        dims=tuple((name, own(size)) for name, size in item.dims),
    )
