"""Products by MLC-LLM's functions of experts: of weights as they are, or of words and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

from ..compute.packed import unpacked
from ..errors import GraphError
from ..matching.expressions import found_in, int64, is_if_then_else, is_number, loads_of, substitute
from ..matching.packed_formula import Formula, formula_of
from ..matching.pattern import BlockView
from ..matching.shapes import dtype_of, same_shape, shape_of
from ..matching.stages import read_stages
from ..tvm_ir import Analyzer, TensorLoad, structural_equal
from ..workload import DynamicDim, ExpertMatmul, Packed


def dims(expr: relax.Expr) -> list[Any]:
    """Return the sizes of a tensor, none if they are not known."""
    return shape_of(expr) or []


@dataclass(frozen=True)
class Product:
    """Rows by the weights of experts."""

    rows: relax.Expr
    """``[pairs, k]``, or the one row of a single token."""
    weights: Sequence[relax.Expr]
    """Those of all experts, or words and scales."""
    ids: relax.Expr
    """``[tokens, chosen]``"""
    form: Packed | None
    sizes: tuple[int, int, int]
    """Experts, columns and k."""

    @staticmethod
    def of(view: BlockView, var: relax.Var, ids: relax.Expr) -> Product | None:
        """Return the product of one of MLC-LLM's functions, if its weights are of a known form."""
        call = view.defs[var]
        func = view.mod[call.args[0]]
        rows, *weights, _ = call.args[1].fields
        stored = dims(weights[0])
        known = (*stored[:1], *dims(var)[-1:], *dims(rows)[-1:])
        static = all(isinstance(size, tirx.IntImm) for size in (*known, *stored))
        if not static or len(known) != 3 or len(stored) != 3:
            return None
        experts, n, k = map(int, known)
        sizes = experts, n, k
        if len(weights) == 1:
            alike = same_shape(stored, sizes) and dtype_of(weights[0]) == dtype_of(rows)
            plain = alike and _is_read_plainly(func)
            return Product(rows, weights, ids, None, sizes) if plain else None
        form = _read_format(func, sizes) if len(weights) == 2 else None
        return Product(rows, weights, ids, form, sizes) if form is not None else None

    def work(self) -> ExpertMatmul:
        """Describe the product for any number of rows."""
        experts, n, k = self.sizes
        chosen, dtype = int(dims(self.ids)[-1]), dtype_of(self.rows)
        rows = DynamicDim("rows")
        return ExpertMatmul(rows, experts, chosen, k, n, "nk", dtype, dtype, packed=self.form)


def _read_format(func: tirx.PrimFunc, shape: tuple[int, int, int]) -> Packed | None:
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


def _is_read_plainly(func: tirx.PrimFunc) -> bool:
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
