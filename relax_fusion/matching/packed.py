"""Weights that are decoded from words of integers: in which format they are stored.

The format is read from the function that decodes them, and proved: at every position in a word,
that function and the format's own formula are the same expression.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product

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
"""In a word, or in a word and one of zeros that follows the other dimension: all are compared."""

TURNS = (1, 2, 4)
"""Orders of the fields in a word that are looked for (see `Packed`)."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight and what it is stored as.

    Parameters
    ----------
    form : Packed
        Its format.
    operands : tuple of relax.Expr
        Words and scales, and zeros if there are such.
    var : relax.Var
        The binding that decodes it.
    turned : bool
        Whether the format is that of the transposed weight.
    """

    form: Packed
    operands: tuple[relax.Expr, ...]
    var: relax.Var
    turned: bool

    def args(self, name: str) -> dict[str, KernelArg]:
        """Return the arguments of a kernel that reads it under a name."""
        operands = self.form.operands(name, _stored_dims(self.var, self.turned))
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
    args = call.args[1].fields if isinstance(call.args[1], relax.Tuple) else [call.args[1]]
    if len(call.args) > 2 or len(args) != len(found.order):
        return None
    operands = tuple(args[n] for n in found.order)
    shape, dims, form = shape_of(weight), _stored_dims(weight, found.turned), found.form
    if shape is None or not all(isinstance(dims[a], int) for a in (form.axis, form.word_axis)):
        return None
    sizes = dict(zip(dims, _turned(shape, found.turned), strict=True))
    wanted = form.operands("w", dims)
    fits = (
        same_shape(shape_of(e), [sizes.get(d, d) for d in o.shape or ()]) and dtype_of(e) == o.dtype
        for e, o in zip(operands, wanted, strict=True)
    )
    return PackedWeight(form, operands, weight, found.turned) if all(fits) else None


def _turned(shape: Sequence[PrimExpr], turned: bool) -> Sequence[PrimExpr]:
    return shape[::-1] if turned else shape


def _stored_dims(weight: relax.Var, turned: bool) -> tuple[Dim, ...]:
    """Return the sizes of the matrix that is decoded, as it is stored."""
    return tuple(as_dim(d) for d in _turned(shape_of(weight) or (), turned))


@dataclass(frozen=True)
class Decoding:
    """What a function decodes: a format, of the transposed matrix if `turned`.

    `order` says which parameters are words, scales and zeros.
    """

    form: Packed
    order: tuple[int, ...]
    turned: bool


@lru_cache(maxsize=256)
def packed_format(func: tirx.PrimFunc) -> Decoding | None:
    """Return what a function decodes; None if it does anything else."""
    stages = read_stages(func)
    if not stages or any(stage.reduced for stage in stages):
        return None
    element, params = _inlined(stages), list(func.params)
    loads = {load.source: load for load in loads_of(element.value)}
    if len(element.spatial) != 2 or set(loads) != set(params[:-1]):
        return None
    scales, packed = (
        [load for load in loads.values() if ("float" in str(load.ty.dtype)) == is_scale]
        for is_scale in (True, False)
    )
    if len(scales) != 1 or len(packed) not in (1, 2):
        return None
    for words, *zeros in permutations(packed):
        stored = (words, scales[0], *zeros)
        for form, turned in _candidates(element, stored):
            if _is_of_format(element, stored, form, turned):
                return Decoding(form, tuple(params.index(load.source) for load in stored), turned)
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


def _candidates(element: Stage, stored: Sequence[ir.TensorLoad]) -> Iterator[tuple[Packed, bool]]:
    """Yield the formats that the numbers in a formula say, of the matrix or of the turned one."""
    words, scales, *zeros = stored
    masks = {int(a.b) for a in found_in(element.value, tirx.BitwiseAnd) if _is_int(a.b)}
    minus = [s.b.value for s in found_in(element.value, tirx.Sub) if isinstance(s.b, tirx.FloatImm)]
    if len(masks) != 1 or len(minus) > 1:
        return
    (mask,), zero = masks, float(minus[0]) if minus else 0.0
    if 2 ** mask.bit_length() - 1 != mask or not zero.is_integer():
        return
    numbers = (mask.bit_length(), None if zeros else int(zero))
    dtypes = (str(words.ty.dtype), str(scales.ty.dtype))
    for turned, axis, across, turns in product((False, True), (-1, -2), (False, True), TURNS):
        at = element.spatial[::-1] if turned else element.spatial
        group = _divisor(scales.indices[axis], at[axis])
        try:
            form = Packed(numbers[0], group or 0, numbers[1], *dtypes, axis, across, turns)
        except GraphError:
            continue
        place = form.word_axis
        if _divisor(words.indices[place], at[place]) == form.fields:
            yield form, turned


def _divisor(index: tirx.Expr, k: tirx.Var) -> int | None:
    """Return by what an index along k is divided, 1 for k itself; None if it is another one."""
    if index.same_as(k):
        return 1
    if isinstance(index, tirx.FloorDiv) and index.a.same_as(k) and _is_int(index.b):
        return int(index.b)
    return None


def _is_int(value: tirx.Expr) -> bool:
    return isinstance(value, tirx.IntImm)


def _is_of_format(
    element: Stage, loads: Sequence[ir.TensorLoad], form: Packed, turned: bool
) -> bool:
    """Prove that a formula is that of a format, at each position in a word."""
    at = element.spatial[::-1] if turned else element.spatial
    axes = {form.word_axis} | ({form.other} if form.zero is None else set())
    if form.fields ** len(axes) > MOST_POSITIONS:
        return False
    stored = [lambda *at, b=load.source: tirx.BufferLoad(b, list(at)) for load in loads]
    wanted = unpacked(form, stored, at, str(element.buffer.ty.dtype))
    analyzer, fields = Analyzer(), tirx.IntImm("int64", form.fields)
    turns = {at[axis]: tirx.Var("turn", "int64") for axis in axes}
    for place, turn in turns.items():
        extent = element.extents[place]
        analyzer.bind(turn, ir.Range.from_min_extent(tirx.IntImm("int64", 0), extent))
    for positions in product(range(form.fields), repeat=len(axes)):
        here = {
            place: turn * fields + tirx.IntImm("int64", position)
            for (place, turn), position in zip(turns.items(), positions, strict=True)
        }
        ours, theirs = (
            _ordered(analyzer.simplify(substitute(value, here)))
            for value in (wanted, element.value)
        )
        if not tvm_ffi.structural_equal(ours, theirs):
            return False
    return True


def _ordered(value: tirx.Expr) -> tirx.Expr:
    """Return a product with its load last."""
    if isinstance(value, tirx.Mul) and isinstance(value.a, ir.TensorLoad):
        return tirx.Mul(value.b, value.a)
    return value
