"""Weights that a graph decodes, from fewer bytes, just before it reads them.

What quantises a model writes such a weight as a call of a PrimFunc, or as operators: shifts and
masks, casts, products with scales, lookups in a codebook, a transposition.  They are told by what
they compute, not by their names: each element by itself, of tensors that nothing here computes and
that take fewer bytes together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import tvm
from tvm import ir, relax, tirx

from ..errors import Reason
from ..tvm_ir import Analyzer, GenericConst, structural_map
from .pattern import BlockView, Refused, is_call
from .shapes import dtype_of, product, shape_of, shape_text
from .stages import read_stages

ELEMENT_BY_ELEMENT = {
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power"),
        *("minimum", "maximum", "clip", "abs", "negative", "round", "floor", "exp", "where"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "left_shift", "right_shift"),
        *("astype", "dequantize", "take", "concat", "stack", "repeat", "tile", "broadcast_to"),
        *("permute_dims", "reshape", "flatten", "expand_dims", "squeeze", "strided_slice", "flip"),
    )
}
"""Operators each of whose elements is computed by itself."""

SIZE = 1024
"""What a symbolic size is taken for, to compare bytes."""


@dataclass(frozen=True)
class Dequantized:
    """A weight and what it is decoded from.

    Parameters
    ----------
    steps : tuple of relax.Var
        The bindings that decode it, in order.
    packed_bytes, whole_bytes : float
        What it is decoded from, and what it is itself, for each of its elements.
    """

    steps: tuple[relax.Var, ...]
    packed_bytes: float
    whole_bytes: float


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
