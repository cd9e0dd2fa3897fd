"""Weights that are decoded from words of integers: in which format they are stored.

The format is read from the function that decodes them, and proved: at every position of a period
along k, that function and the format's own formula are the same expression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.sym import Analyzer

from ..compute.packed import unpacked
from ..errors import GraphError
from ..workload import Dim, Packed
from .expressions import found_in, loads_of, substitute
from .pattern import BlockView, KernelArg, PrimExpr
from .shapes import as_dim, dtype_of, same_shape, shape_of
from .stages import Stage, read_stages

MOST_POSITIONS = 256
"""Of a period along k, that of words and groups together, each of which is compared."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight and what it is stored as.

    Parameters
    ----------
    form : Packed
        Its format.
    operands : tuple of relax.Expr
        Words and scales.
    var : relax.Var
        The binding that decodes it.
    """

    form: Packed
    operands: tuple[relax.Expr, ...]
    var: relax.Var

    def args(self, name: str) -> dict[str, KernelArg]:
        """Return the arguments of a kernel that reads it under a name."""
        operands = self.form.operands(name, tuple(as_dim(d) for d in shape_of(self.var) or ()))
        return {o.name: KernelArg(e) for o, e in zip(operands, self.operands, strict=True)}


def packed_weight(view: BlockView, weight: relax.Expr) -> PackedWeight | None:
    """Return in which format a decoded weight is stored; None if it is not, or in none of ours."""
    call = view.call(weight, "relax.call_tir")
    if call is None or not isinstance(weight, relax.Var):
        return None
    func = view.mod[call.args[0]]
    found = packed_format(func) if isinstance(func, tirx.PrimFunc) else None
    if found is None:
        return None
    form, order = found
    args = call.args[1].fields if isinstance(call.args[1], relax.Tuple) else [call.args[1]]
    if len(call.args) > 2 or len(args) != len(order):
        return None
    operands = tuple(args[n] for n in order)
    shape = shape_of(weight)
    if shape is None or not isinstance(shape[form.axis], tirx.IntImm):
        return None
    dims = tuple(as_dim(size) for size in shape)
    sizes: dict[Dim, PrimExpr] = dict(zip(dims, shape, strict=True))
    wanted = form.operands("w", dims)
    fits = (
        same_shape(shape_of(e), [sizes.get(d, d) for d in o.shape or ()]) and dtype_of(e) == o.dtype
        for e, o in zip(operands, wanted, strict=True)
    )
    return PackedWeight(form, operands, weight) if all(fits) else None


@lru_cache(maxsize=256)
def packed_format(func: tirx.PrimFunc) -> tuple[Packed, tuple[int, ...]] | None:
    """Return the format that a function decodes, and which parameters are words and scales.

    None if it does anything else.
    """
    stages = read_stages(func)
    if not stages or any(stage.reduced for stage in stages) or len(func.params) != 3:
        return None
    element = _inlined(stages)
    loads = loads_of(element.value)
    if len(element.spatial) != 2 or {load.source for load in loads} != set(func.params[:2]):
        return None
    words, scales = sorted(loads, key=lambda load: str(load.ty.dtype).startswith("float"))[:2]
    for axis in (-1, -2):
        form = _candidate(element, words, scales, axis)
        if form is not None and _is_of_format(element, (words, scales), form):
            order = (words.source, scales.source)
            return form, tuple(list(func.params).index(buffer) for buffer in order)
    return None


def _inlined(stages: list[Stage]) -> Stage:
    """Return the last stage as a formula of the parameters alone."""
    made: dict[tirx.Var, Stage] = {}
    for stage in stages:

        def own(load: ir.TensorLoad, made: Mapping[tirx.Var, Stage] = made) -> tirx.Expr:
            source = made.get(load.source)
            if source is None:
                return load
            return substitute(source.value, dict(zip(source.spatial, load.indices, strict=True)))

        value = tvm_ffi.structural_map(stage.value, (ir.TensorLoad, own))
        fields = (stage.spatial, stage.reduced, stage.extents)
        made[stage.buffer] = Stage(stage.name, stage.buffer, *fields, value, stage.init)
    return made[stages[-1].buffer]


def _candidate(
    element: Stage, words: ir.TensorLoad, scales: ir.TensorLoad, axis: int
) -> Packed | None:
    """Return the format that the numbers in a formula say, None where one is missing."""
    k = element.spatial[axis]
    divisors = [_divisor(load.indices[axis], k) for load in (words, scales)]
    masks = [int(a.b) for a in found_in(element.value, tirx.BitwiseAnd) if _is_int(a.b)]
    zeros = [s.b.value for s in found_in(element.value, tirx.Sub) if isinstance(s.b, tirx.FloatImm)]
    if None in divisors or len(masks) != 1 or len(zeros) > 1:
        return None
    dtypes = (str(words.ty.dtype), str(scales.ty.dtype))
    bits, zero = masks[0].bit_length(), float(zeros[0]) if zeros else 0.0
    if 2**bits - 1 != masks[0] or not zero.is_integer():
        return None
    try:
        form = Packed(bits, divisors[1] or 1, int(zero), *dtypes, axis)
    except GraphError:
        return None
    return form if form.fields == divisors[0] else None


def _divisor(index: tirx.Expr, k: tirx.Var) -> int | None:
    """Return by what an index along k is divided, 1 for k itself; None if it is another one."""
    if index.same_as(k):
        return 1
    if isinstance(index, tirx.FloorDiv) and index.a.same_as(k) and _is_int(index.b):
        return int(index.b)
    return None


def _is_int(value: tirx.Expr) -> bool:
    return isinstance(value, tirx.IntImm)


def _is_of_format(element: Stage, loads: tuple[ir.TensorLoad, ir.TensorLoad], form: Packed) -> bool:
    """Prove that a formula is that of a format, at each position of a period."""
    dtype, k = str(element.buffer.ty.dtype), element.spatial[form.axis]
    period = math.lcm(form.fields, form.group)
    if period > MOST_POSITIONS:
        return False
    stored = [lambda *at, b=load.source: tirx.BufferLoad(b, list(at)) for load in loads]
    wanted = unpacked(form, stored, element.spatial, dtype)
    analyzer, turn = Analyzer(), tirx.Var("turn", "int64")
    extent = element.extents[k]
    analyzer.bind(turn, ir.Range.from_min_extent(tirx.IntImm("int64", 0), extent))
    for position in range(period):
        at = {k: turn * tirx.IntImm("int64", period) + tirx.IntImm("int64", position)}
        ours, theirs = (
            _ordered(analyzer.simplify(substitute(value, at))) for value in (wanted, element.value)
        )
        if not tvm_ffi.structural_equal(ours, theirs):
            return False
    return True


def _ordered(value: tirx.Expr) -> tirx.Expr:
    """Return a product with its load last."""
    if isinstance(value, tirx.Mul) and isinstance(value.a, ir.TensorLoad):
        return tirx.Mul(value.b, value.a)
    return value
