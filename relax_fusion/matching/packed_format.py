"""In which format a function decodes a weight: read from what it computes, and proved.

At every position in a word, that function and the format's own formula are the same expression.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from tvm import ir, tirx

from ..compute.packed import Stored, unpacked
from ..errors import GraphError
from ..tvm_ir import Analyzer, TensorLoad, structural_map
from ..workload import Packed
from ..workload.formats import ALL
from .expressions import found_in, loads_of, substitute, variables_of
from .packed_formula import Field, Formula, formula_of
from .stages import Stage, read_stages

MOST_POSITIONS = 256
"""So many positions in a word, or in a word and one of zeros beside it, are compared, not more."""

TURNS = (1, 2, 4)
"""Orders of the fields in a word that are looked for (see `Packed`)."""


@dataclass(frozen=True)
class Decoding:
    """What a function decodes: a format, of the transposed matrix if `transposed`.

    `order` says which parameters are words, scales and zeros.
    """

    form: Packed
    order: tuple[int, ...]
    transposed: bool


MOST_LOADS = 32
"""A formula that decodes an element has no more loads: sums of sums double with each step."""


@lru_cache(maxsize=256)
def packed_format(
    func: tirx.PrimFunc, constants: tuple[tuple[int, int], ...] = ()
) -> Decoding | None:
    """Return what a function decodes; None if it does anything else.

    `constants`: the numbers of parameters that are full of one integer, and that integer.
    """
    stages = read_stages(func)
    if not stages or any(stage.reduced for stage in stages):
        return None
    params = list(func.params)
    element = _inlined(stages, {params[n]: value for n, value in constants})
    if element is None:
        return None
    params_read = [p for n, p in enumerate(params[:-1]) if n not in dict(constants)]
    loads = {load.source: load for load in loads_of(element.value)}
    formula = formula_of(element.value)
    if formula is None or len(element.spatial) != 2 or set(loads) != set(params_read):
        return None
    found = formula.loads()
    if len({load.source for load in found}) != len(loads):
        return None
    for form, transposed in _candidates(element, formula):
        if _is_of_format(element, formula, form, transposed):
            return Decoding(form, tuple(params.index(load.source) for load in found), transposed)
    return None


def _inlined(stages: list[Stage], constants: Mapping[tirx.Var, int]) -> Stage | None:
    """Return the last stage as a formula of the parameters alone, None if that is a long one."""
    made: dict[tirx.Var, Stage] = {}
    loads: dict[tirx.Var, int] = {}
    for stage in stages:
        read = found_in(stage.value, TensorLoad)
        loads[stage.buffer] = sum(loads.get(load.source, 1) for load in read)
        if loads[stage.buffer] > MOST_LOADS:
            return None

        def own(load: TensorLoad, made: Mapping[tirx.Var, Stage] = made) -> tirx.Expr:
            source = made.get(load.source)
            if load.source in constants:
                return tirx.const(constants[load.source], load.ty.dtype)
            if source is None:
                return load
            return substitute(source.value, dict(zip(source.spatial, load.indices, strict=True)))

        value = structural_map(stage.value, (TensorLoad, own))
        fields = (stage.spatial, stage.reduced, stage.extents)
        made[stage.buffer] = Stage(stage.name, stage.buffer, *fields, value, stage.init)
    return made[stages[-1].buffer]


def _candidates(element: Stage, formula: Formula) -> Iterator[tuple[Packed, bool]]:
    """Yield the formats that a formula can be of, of the matrix or of the transposed one."""
    field, scale, zero = formula.field, formula.scale, formula.zero
    word = str(field.load.ty.dtype)
    scale_dtype = "" if scale is None else str(scale.ty.dtype)
    numbers = field.bits, None if isinstance(zero, Field) else zero
    for transposed, axis, across, turns in product((False, True), (-1, -2), (False, True), TURNS):
        at = element.spatial[::-1] if transposed else element.spatial
        sizes = [1, 1] if scale is None else [_shared(scale, at[a]) for a in (axis, -3 - axis)]
        if 0 in sizes or (sizes[0] == 1 != sizes[1]) or (turns > 1 and field.number):
            continue
        how = (word, scale_dtype, axis, across, turns, field.number)
        try:
            form = Packed(numbers[0], sizes[0], numbers[1], *how, sizes[1], formula.limit)
        except GraphError:
            continue
        place = form.word_axis
        if _divisor(field.load.indices[place], at[place]) == form.fields:
            yield form, transposed


def _shared(scale: TensorLoad, k: tirx.Var) -> int:
    """Return how many elements along k share a scale, `ALL`, or 0 if it is anything else."""
    following = [i for i in scale.indices if k in variables_of(i)]
    if not following:
        return ALL
    return _divisor(following[0], k) or 0 if len(following) == 1 else 0


def _divisor(index: tirx.Expr, k: tirx.Var) -> int | None:
    """Return by what an index along k is divided, 1 for k itself; None if it is another one."""
    if index.same_as(k):
        return 1
    if isinstance(index, tirx.FloorDiv) and index.a.same_as(k) and isinstance(index.b, tirx.IntImm):
        return int(index.b)
    return None


def _is_of_format(element: Stage, formula: Formula, form: Packed, transposed: bool) -> bool:
    """Prove that a formula is that of a format, at each position in a word."""
    at = element.spatial[::-1] if transposed else element.spatial
    if not all(_is_in_order(load, at) for load in formula.loads()):
        return False
    axes = {form.word_axis} | ({form.other} if form.zero is None else set())
    if form.fields ** len(axes) > MOST_POSITIONS:
        return False
    wanted = unpacked(form, _stored(formula, at), at, str(element.buffer.ty.dtype))
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
            formula_of(analyzer.simplify(substitute(value, here)))
            for value in (wanted, element.value)
        )
        if ours is None or not ours.same_as(theirs):
            return False
    return True


def _is_in_order(load: TensorLoad, at: Sequence[tirx.Var]) -> bool:
    """Tell whether the dimensions of an operand are in the order of the weight's."""
    followed = [n for n in _followed(load, at) if n is not None]
    return followed == sorted(set(followed))


def _followed(load: TensorLoad, at: Sequence[tirx.Var]) -> list[int | None]:
    """Return which dimension of a weight each dimension of an operand follows, None for neither."""
    return [next((n for n, v in enumerate(at) if v in variables_of(i)), None) for i in load.indices]


def _stored(formula: Formula, at: Sequence[tirx.Var]) -> list[Stored]:
    """Return what the operands of a formula hold at their indices, as their format has those."""

    def reader(load: TensorLoad) -> Stored:
        follow = _followed(load, at)
        zero = tirx.IntImm("int64", 0)
        return lambda *place: tirx.BufferLoad(
            load.source, [zero if n is None else place[n] for n in follow]
        )

    return [reader(load) for load in formula.loads()]
