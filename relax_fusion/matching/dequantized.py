"""Weights that a graph decodes, from fewer bytes, just before it reads them.

What quantises a model writes such a weight as a call of a PrimFunc, or as operators: shifts and
masks, casts, products with scales, lookups in a codebook, a transposition.  They are told by what
they compute, not by their names: each element by itself, of tensors that nothing here computes and
that take fewer bytes together.  The bindings that decode one can be a function of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import ir, relax, tirx

from ..errors import Reason
from ..transforms.modules import module_of
from ..tvm_ir import Analyzer, GenericConst, structural_map
from .operators import MOVEMENTS, named
from .pattern import BlockView, Refused, is_call
from .shapes import dtype_of, has_computed_sizes, product, shape_of, shape_text
from .stages import read_stages

ELEMENT_BY_ELEMENT = (
    *named("arithmetic", "rounding", "bits", "choice", "cast", "decoding", "join", "lookup"),
    *("relax.abs", "relax.exp", "relax.negative"),
    *MOVEMENTS,
)
"""Operators each of whose elements is computed by itself."""

SIZE = 1024
"""A symbolic size is taken for so many elements, to compare bytes."""


@dataclass(frozen=True)
class Dequantized:
    """A weight and what it is decoded from."""

    steps: tuple[relax.Var, ...]
    """The bindings that decode it, in order."""
    packed_bytes: float
    whole_bytes: float
    """What it is decoded from, and what it is itself, for each of its elements."""


def refuse_dequantized(view: BlockView, weight: relax.Expr) -> None:
    """Refuse a chain whose kernel would read a weight that is decoded, and so be made whole."""
    found = dequantized(view, weight)
    if found is not None:
        bytes_each = f"{found.packed_bytes:.2f} bytes an element to {found.whole_bytes:.2f}"
        detail = f"a weight of {shape_text(shape_of(weight) or [])} is decoded from {bytes_each}"
        raise Refused(Reason.MATERIALISED, f"{detail}; this kernel would have it in memory")


def dequantized(view: BlockView, weight: relax.Expr) -> Dequantized | None:
    """Return how `weight` is decoded, None if it is not.

    Nothing in the block may compute what it is decoded from, nor overwrite it: activations that
    are cast are no weights.  The largest of these tensors is of another dtype: broadcasting takes
    fewer bytes, too.
    """
    reader = _Reader(view)
    if not reader.reads(weight) or not reader.steps or not reader.sources:
        return None
    largest = max(reader.sources, key=_bytes_of)
    packed, whole = sum(map(_bytes_of, reader.sources)), _bytes_of(weight)
    if dtype_of(largest) == dtype_of(weight) or packed >= whole:
        return None
    if not all(map(view.memory.is_constant, (*reader.sources, *reader.steps))):
        return None
    each = _bits_of(weight) / 8
    return Dequantized(tuple(reader.steps), packed / whole * each, each)


@dataclass
class _Reader:
    """Follows a tensor back to what it is made of: `steps` in order, and `sources`."""

    view: BlockView
    steps: dict[relax.Var, None] = field(default_factory=dict)
    sources: dict[relax.Expr, None] = field(default_factory=dict)

    def reads(self, expr: relax.Expr) -> bool:
        """Note how `expr` is made; tell whether it is of known size and element by element.

        Without recursion: a block may be deeper than Python's stack.
        """
        inputs: dict[relax.Expr, list[relax.Expr]] = {}
        stack = [expr]
        while stack:
            tensor = stack[-1]
            found = inputs.get(tensor)
            if found is None:
                found = self._inputs(tensor)
                if found is None:
                    return False
                inputs[tensor] = found
                stack += reversed([t for t in found if t not in inputs])
            else:
                stack.pop()
                if tensor not in self.sources:
                    self.steps[tensor] = None
        return True

    def _inputs(self, expr: relax.Expr) -> list[relax.Expr] | None:
        """Return what `expr` is computed from, and note sources; None if it is not readable so."""
        if not isinstance(expr.ty, relax.TensorType) or shape_of(expr) is None:
            return None
        if not isinstance(expr, relax.Var) or self._is_given(expr):
            self.sources[expr] = None
            return []
        value = self.view.defs[expr]
        if isinstance(value, relax.Var | GenericConst):
            return [value]
        return list(tensors_of(value)) if self._is_element_by_element(value) else None

    def _is_given(self, var: relax.Expr) -> bool:
        """Tell whether nothing in the block computes a tensor: a parameter, or one of a tuple."""
        while (value := self.view.defs.get(var)) is not None:
            if var in self.view.casts and isinstance(value, relax.Var):
                var = value
            elif var not in self.view.casts and isinstance(value, relax.TupleGetItem):
                var = value.tuple_value
            else:
                return False
        return True

    def _is_element_by_element(self, value: relax.Expr) -> bool:
        if is_call(value, "relax.call_tir"):
            func = self.view.mod[value.args[0]]
            stages = read_stages(func) if isinstance(func, tirx.PrimFunc) else None
            return stages is not None and not any(stage.reduced for stage in stages)
        return is_call(value, *ELEMENT_BY_ELEMENT)


def tensors_of(call: relax.Call) -> Iterator[relax.Expr]:
    """Yield the tensors that a call reads, but for numbers, and tuples that come whole."""
    for arg in call.args:
        for expr in arg.fields if isinstance(arg, relax.Tuple) else (arg,):
            if isinstance(expr.ty, relax.TensorType | relax.TupleType) and not _is_number(expr):
                yield expr


def _is_number(expr: relax.Expr) -> bool:
    return isinstance(expr, GenericConst) and shape_of(expr) == []


def _bits_of(expr: relax.Expr) -> int:
    return tvm.DataType(dtype_of(expr)).bits


def _bytes_of(expr: relax.Expr) -> float:
    """Return the bytes of a tensor, its symbolic sizes taken for `SIZE`."""
    size = product(shape_of(expr) or ())
    if not isinstance(size, int):
        known = tirx.IntImm(str(size.ty.dtype), SIZE)
        size = int(Analyzer().simplify(structural_map(size, (ir.Var, lambda _: known))))
    return size * _bits_of(expr) / 8


ARITHMETIC = named("arithmetic", "bits", "decoding")
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

    `view`: the block of both.
    `reader`: binding of the reader.
    `steps`: bindings of the decoding, in order.
    `numbers`: whether constant numbers are arguments, too, where TVM would write them into
    formulas.
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
