"""Parts of tensors that lie together: kernels read them where they are."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from tvm import DataType, ir, relax, tirx, topi

from ..matching.effects import Memory
from ..matching.expressions import found_in, variables_of
from ..matching.pattern import is_call
from ..matching.shapes import shape_of
from ..tvm_ir import TensorLoad, TensorRegion, structural_map
from .modules import OPAQUE, functions_of, module_pass, rewritten

PART_ATTR = "relax_fusion.part"
"""PrimFunc attribute: where along the first axis of its operand the rows begin that it copies."""

_DATA = ir.Op.get("tirx.buffer_data")


@module_pass
class NameParts:
    """Mark slices of rows that kernels read, so that `ReadParts` finds them behind all others.

    rewrite: ``w0 = R.strided_slice(w, [0], [64], [96])`` -> ``w0 = R.call_tir(part, (w,))``

    declines when:
        the slice is along another axis, or of another step; a size is symbolic; something else
        than calls of PrimFuncs reads it; something writes to the tensor; it is on a virtual device.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return rewritten(mod, _Name(mod), memory=True)


@relax.expr_functor.mutator
class _Name(relax.PyExprMutator):
    memory: Memory

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        self.others = {
            var
            for binding in block.bindings
            if not is_call(binding.value, "relax.call_tir")
            for var in found_in(binding.value, ir.Var)
        }
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, call = binding.var, binding.value
        first = _first(call) if isinstance(var, relax.DataflowVar) else None
        if first is not None and var not in self.others and self.memory.is_constant(call.args[0]):
            end, shape = first + int(var.ty.shape.values[0]), shape_of(call.args[0]) or []
            begins, ends = [first, *[0] * (len(shape) - 1)], [end, *map(int, shape[1:])]
            strides, hint = [1] * len(shape), "part"
            made = self.builder_.call_te(
                topi.strided_slice, call.args[0], begins, ends, strides, primfunc_name_hint=hint
            )
            func = self.builder_.get()[made.args[0]]
            marked = func.with_attrs({"op_pattern": OPAQUE, PART_ATTR: first})
            self.builder_.update_func(made.args[0], marked)
            binding = relax.VarBinding(var, made)
        super().visit_var_binding_(binding)


def _first(call: relax.Expr) -> int | None:
    """Return where the rows of a slice along the first axis begin, None if it is no such slice."""
    if not is_call(call, "relax.strided_slice") or not bool(call.attrs.assume_inbound):
        return None
    if call.ty.vdevice is not None:
        return None
    shapes = [*(shape_of(call.args[0]) or [None]), *(shape_of(call) or [None])]
    axes, begins, _, *strides = ([*arg.fields] for arg in call.args[1:])
    static = all(isinstance(size, tirx.IntImm) for size in (*shapes, *begins))
    plain = (
        len(axes) == 1 and int(axes[0]) == 0 and not any(int(s) != 1 for g in strides for s in g)
    )
    return int(begins[0]) if static and plain else None


@module_pass
class ReadParts:
    """Let kernels read parts of tensors that `NameParts` marked where they lie.

    rewrite::

        p = R.call_tir(part, (w,))           # rows 64 to 96
        y = R.call_tir(f, (x, p))            # p[i, k], p.data
            ->
        y = R.call_tir(f_of_part, (x, w))    # w[i + 64, k], w.data + 64 * bytes of a row
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function of `mod`; what nothing calls any more goes."""
        reader = _Read(mod)
        made = rewritten(mod, reader)
        return relax.transform.DeadCodeElimination()(made) if reader.kernels else mod


@relax.expr_functor.mutator
class _Read(relax.PyExprMutator):
    """Calls kernels of whole tensors, each made once."""

    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.mod, self.marked = mod, marked_parts(mod)
        self.kernels: dict[tuple[Any, ...], ir.GlobalVar | None] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not is_call(call, "relax.call_tir") or not isinstance(call.args[1], relax.Tuple):
            return call
        args, parts = list(call.args[1].fields), dict[int, tuple[int, int]]()
        for i, arg in enumerate(args):
            made = self.lookup_binding(arg) if isinstance(arg, relax.Var) else None
            part = part_of(self.marked, made)
            if part is not None:
                args[i] = part[0]
                parts[i] = part[1], int((shape_of(part[0]) or [])[0])
        if not parts:
            return call
        gvar, rest = self._kernel(call.args[0], parts), [relax.Tuple(args), *call.args[2:]]
        return (
            call if gvar is None else relax.Call(call.op, [gvar, *rest], call.attrs, call.ty_args)
        )

    def _kernel(
        self, callee: ir.GlobalVar, parts: Mapping[int, tuple[int, int]]
    ) -> ir.GlobalVar | None:
        """Return a kernel that reads parts of its arguments, None if there can be none."""
        key = (callee.name_hint, *parts.items())
        if key not in self.kernels:
            func = of_parts(self.mod[callee], parts)
            name = f"{callee.name_hint}_of_parts"
            self.kernels[key] = None if func is None else self.builder_.add_func(func, name)
        return self.kernels[key]


def of_parts(func: tirx.PrimFunc, parts: Mapping[int, tuple[int, int]]) -> tirx.PrimFunc | None:
    """Return a PrimFunc that reads rows of larger tensors as some of its arguments.

    None where an argument is read in another way than by loads and addresses.

    `func`: it stores nothing in these arguments.
    `parts`: by the number of an argument, the first of its rows, and how many the tensor has.
    """
    whole: dict[tirx.Var, tuple[tirx.Var, int]] = {}
    for i, (first, rows) in parts.items():
        old = func.params[i]
        shape = [tirx.IntImm("int64", rows), *old.ty.shape[1:]]
        new = tirx.decl_buffer(shape, str(old.ty.dtype), old.name)
        whole[old] = new, first
    if any(old.ty.strides for old in whole) or _declared(func.body) & {*whole}:
        return None
    body = func.body
    for rewrite in (_load(whole), _region(whole), _address(whole)):
        body = structural_map(body, rewrite, order="post")
    if variables_of(body) & {*whole}:
        return None
    params = [whole[p][0] if p in whole else p for p in func.params]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs).without_attr("global_symbol")


def _declared(body: Any) -> set[tirx.Var]:
    """Return the buffers in whose memory others are declared."""
    return {var for made in found_in(body, tirx.DeclBuffer) for var in variables_of(made.data)}


def _load(whole: Mapping[tirx.Var, tuple[tirx.Var, int]]) -> tuple[type, Any]:
    def loaded(load: TensorLoad) -> tirx.Expr:
        if load.source not in whole:
            return load
        (buffer, first), (row, *rest) = whole[load.source], load.indices
        return tirx.BufferLoad(buffer, [row + first, *rest])

    return TensorLoad, loaded


def _region(whole: Mapping[tirx.Var, tuple[tirx.Var, int]]) -> tuple[type, Any]:
    def moved(region: TensorRegion) -> TensorRegion:
        if region.source not in whole:
            return region
        (buffer, first), (rows, *rest) = whole[region.source], region.region
        rows = ir.Range.from_min_extent(rows.min + first, rows.extent)
        return tirx.BufferRegion(buffer, [rows, *rest])

    return TensorRegion, moved


def _address(whole: Mapping[tirx.Var, tuple[tirx.Var, int]]) -> tuple[type, Any]:
    def at(call: ir.Call) -> tirx.Expr:
        if not call.op.same_as(_DATA) or call.args[0] not in whole:
            return call
        buffer, first = whole[call.args[0]]
        row = prod(map(int, buffer.ty.shape[1:])) * DataType(str(buffer.ty.dtype)).itemsize
        return tirx.handle_add_byte_offset(buffer.data, first * row) if first else buffer.data

    return ir.Call, at


def marked_parts(mod: ir.IRModule) -> dict[ir.GlobalVar, int]:
    """Return the PrimFuncs that `NameParts` marked, and where their parts begin."""
    marks = {g: (f.attrs or {}).get(PART_ATTR) for g, f in functions_of(mod, tirx.PrimFunc).items()}
    return {gvar: int(first) for gvar, first in marks.items() if first is not None}


def part_of(
    marked: Mapping[ir.GlobalVar, int], value: relax.Expr | None
) -> tuple[relax.Expr, int] | None:
    """Return the tensor of which a value is a part, and where it begins; None for another."""
    if not is_call(value, "relax.call_tir") or value.args[0] not in marked:
        return None
    return value.args[1].fields[0], marked[value.args[0]]
