"""How MLC-LLM's functions of experts read weights: as they are, or decoded of words and scales."""

from __future__ import annotations

from tvm import te, tirx

from ..compute.packed import unpacked
from ..errors import GraphError
from ..matching.expressions import found_in, int64, is_if_then_else, is_number, loads_of, substitute
from ..matching.packed_formula import Formula, formula_of
from ..matching.stages import read_stages
from ..tvm_ir import Analyzer, TensorLoad, structural_equal
from ..workload import Packed


def read_format(func: tirx.PrimFunc, shape: tuple[int, int, int]) -> Packed | None:
    """Return the format of weights ``[experts, n, k]`` that a function decodes, if it is known.

    The second parameter has words ``[experts, n, words]``, the third scales
    ``[experts, n, groups]``.
    """
    words, scales = func.params[1], func.params[2]
    stores = [s for s in found_in(func.body, tirx.BufferStore) if _reads(s.value, words)]
    formula = formula_of(_within(stores[0].value)) if len(stores) == 1 else None
    if formula is None or formula.scale is None or not isinstance(formula.zero, int):
        return None
    k, fields, group = _along(formula.field.load, formula.scale)
    if k is None or not _of(formula.field.load, words) or not _of(formula.scale, scales):
        return None
    bits, zero = formula.field.bits, formula.zero
    try:
        form = Packed(bits, group, zero, str(words.ty.dtype), str(scales.ty.dtype))
    except GraphError:
        return None
    experts, n, size = shape
    stored = [operand.shape for operand in form.operands("w", (experts * n, size))]
    given = [(experts * n, int(p.ty.shape[-1])) for p in (words, scales)]
    whole = form.fields == fields and formula.limit is None and stored == given
    value = _within(stores[0].value)
    return (
        form
        if whole and all(_shift(value, k, fields, p) == p * bits for p in range(fields))
        else None
    )


def is_read_plainly(func: tirx.PrimFunc) -> bool:
    """Tell whether a function reads its second parameter, the weights, in one place, as it is."""
    return len([load for load in loads_of(func.body) if _of(load, func.params[1])]) == 1


def adds_pairs(func: tirx.PrimFunc) -> bool:
    """Tell whether a function adds the two parts of a tensor along the second of three axes."""
    stages = read_stages(func) or []
    value = stages[0].value if len(stages) == 1 and len(stages[0].spatial) == 2 else None
    if not isinstance(value, tirx.Add):
        return False
    i, j = stages[0].spatial
    parts = [v for v in (value.a, value.b) if isinstance(v, TensorLoad) and len(v.indices) == 3]
    places = [v.indices for v in parts if _of(v, func.params[0])]
    halves = [p[1] for p in places if p[0].same_as(i) and p[2].same_as(j)]
    return len(halves) == 2 and all(is_number(half, n) for n, half in enumerate(halves))


def decoded(form: Packed, dtype: str, k: int, words: te.Tensor, scales: te.Tensor) -> te.Tensor:
    """Return the weights ``[rows, k]`` of words and scales."""

    def element(*at: tirx.Var) -> tirx.Expr:
        return unpacked(form, (words, scales), at, dtype)

    return te.compute([int64(int(words.shape[0])), int64(k)], element, "dequantize")


def _reads(value: tirx.Expr, param: tirx.Var) -> bool:
    return any(_of(load, param) for load in loads_of(value))


def _of(load: TensorLoad, param: tirx.Var) -> bool:
    return bool(load.source.same_as(param))


def _within(value: tirx.Expr) -> tirx.Expr:
    """Return a value where there is one, without the zero beyond the last column."""
    return value.args[1] if is_if_then_else(value) else value


def _along(word: TensorLoad, scale: TensorLoad) -> tuple[tirx.Var | None, int, int]:
    """Return the variable along k, and how many of its values have the same word, and scale.

    No variable where the two are not of the same column of the same expert.
    """
    ends = [load.indices[-1] for load in (word, scale)]
    same = all(map(structural_equal, word.indices[:-1], scale.indices[:-1]))
    parts = all(isinstance(e, tirx.FloorDiv) and isinstance(e.b, tirx.IntImm) for e in ends)
    if not same or not parts or len(word.indices) != 3 or not ends[0].a.same_as(ends[1].a):
        return None, 0, 0
    return ends[0].a, int(ends[0].b), int(ends[1].b)


def _shift(value: tirx.Expr, k: tirx.Var, fields: int, place: int) -> int | None:
    """Return by how many bits a word is shifted for its element at a place."""
    word = tirx.Var("word", str(k.ty.dtype))
    at = word * tirx.const(fields, str(k.ty.dtype)) + tirx.const(place, str(k.ty.dtype))
    formula: Formula | None = formula_of(Analyzer().simplify(substitute(value, {k: at})))
    if formula is None or not all(isinstance(s, tirx.IntImm) for s in formula.field.shift):
        return None
    return sum(int(s) for s in formula.field.shift)
