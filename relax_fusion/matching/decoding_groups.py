"""The bindings that decode a weight, and perhaps what reads it, as a function of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax, tirx

from .dequantized import tensors_of
from .modules import module_of
from .pattern import BlockView, is_call
from .shapes import has_computed_sizes, shape_of

ARITHMETIC = {
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power"),
        *("minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift"),
        *("right_shift", "dequantize"),
    )
}
"""Operators whose constant numbers TVM writes into their formulas."""


@dataclass(frozen=True)
class Group:
    """A function of a reader and what decodes its weights, and what it is called with."""

    func: relax.Function
    args: tuple[relax.Expr, ...]
    sizes: tuple[tirx.Var, ...]
    """Symbolic sizes that no argument has."""
    called: Mapping[ir.GlobalVar, tirx.PrimFunc]

    def lowered(self) -> tirx.PrimFunc | None:
        """Return it as one PrimFunc, None where TVM's legaliser leaves an operator."""
        builder = relax.BlockBuilder(module_of(self.called))
        gvar = builder.add_func(self.func, "group")
        params = [relax.Var(p.name, p.ty) for p in self.func.params]
        with builder.function("main", params):
            with builder.dataflow():
                out = builder.emit_output(relax.Call(gvar, params))
            builder.emit_func_output(out)
        mod = relax.transform.LegalizeOps()(builder.get())
        values = [b.value for block in mod["group"].body.blocks for b in block.bindings]
        if not all(is_call(v, "relax.call_tir") or isinstance(v, relax.Var) for v in values):
            return None
        mod = relax.transform.FuseTIR()(mod)
        return mod[mod["main"].body.blocks[0].bindings[0].value.args[0]]


def group_of(
    view: BlockView, reader: relax.Var, steps: Sequence[relax.Var], *, numbers: bool = False
) -> Group | None:
    """Return the function of a reader and what decodes its weights, None if it cannot be one.

    Parameters
    ----------
    view : BlockView
        The block of both.
    reader : relax.Var
        Binding of the reader.
    steps : sequence of relax.Var
        Bindings of the decoding, in order.
    numbers : bool
        Whether constant numbers are arguments, too, where TVM would write them into formulas.
    """
    inside = [*steps, reader]
    values = [view.defs[var] for var in (reader, *steps)]
    given = (t for v in values for t in _read(v, numbers) if t not in inside)
    args = tuple(dict.fromkeys(given))
    if any(shape_of(a) is None for a in args) or not _on_one_device([reader, *args]):
        return None
    if has_computed_sizes(*inside, *args):
        return None
    types = [relax.TensorType(a.ty.shape, a.ty.dtype) for a in args]  # on no virtual device
    known: dict[relax.Expr, relax.Expr] = {
        arg: relax.Var(f"p{i}", ty) for i, (arg, ty) in enumerate(zip(args, types, strict=True))
    }
    called = {v.args[0]: view.mod[v.args[0]] for v in values if is_call(v, "relax.call_tir")}
    builder = relax.BlockBuilder(module_of(called))
    params = list(known.values())
    with builder.function("group", params, {"Primitive": True}):
        with builder.dataflow():
            for var in inside:
                value = _with(view.defs[var], known)
                emit = builder.emit_output if var is reader else builder.emit
                known[var] = emit(value)
        builder.emit_func_output(known[reader])
    func = builder.get()["group"]
    sizes = tuple(relax.analysis.free_symbolic_vars(func))
    if sizes:
        shape = relax.Var("sizes", relax.ShapeType(sizes))
        func = relax.Function([*func.params, shape], func.body, func.ret_ty, attrs=func.attrs)
    return Group(func, args, sizes, called)


def _read(value: relax.Expr, numbers: bool) -> list[relax.Expr]:
    """Return the tensors that a step reads, without the numbers that TVM writes into its formula.

    It does so where they meet a tensor in arithmetic, and fuses no other constants.  With
    `numbers`, those are returned, too.
    """
    if not isinstance(value, relax.Call):
        return [value]
    read = list(tensors_of(value))
    if read and is_call(value, *ARITHMETIC) and not numbers:
        return read
    fields = (e for a in value.args for e in (a.fields if isinstance(a, relax.Tuple) else (a,)))
    return [e for e in fields if isinstance(e.ty, relax.TensorType)]


def _on_one_device(exprs: Sequence[relax.Expr]) -> bool:
    return len({str(expr.ty.vdevice) for expr in exprs if expr.ty.vdevice}) <= 1


def _with(value: relax.Expr, known: dict[relax.Expr, relax.Expr]) -> relax.Expr:
    """Return a bound value with what it reads replaced."""
    if isinstance(value, relax.Call):
        args = [_with(arg, known) for arg in value.args]
        return relax.Call(value.op, args, value.attrs, value.ty_args)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([_with(field, known) for field in value.fields])
    return known.get(value, value)
