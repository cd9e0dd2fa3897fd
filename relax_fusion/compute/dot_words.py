"""Neighbours along k in a word of 32 bits, as processors multiply them and add up the products.

A kernel says so in plain TIR, `products`, which any processor computes.  Where one has an
instruction for it, the schedule puts that in its place (`relax_fusion.dlight_rules.cpu.dots`).
"""

from __future__ import annotations

from functools import reduce
from operator import add, or_

from tvm import ir, te, tirx

from ..estimator.families.cpu_dots import FLIP, SIGN, Word
from ..matching.expressions import is_if_then_else, loads_of
from ..tvm_ir import Analyzer, TensorLoad, structural_equal
from .activations import ACCUMULATE
from .stages import Reader, as_stored

WORD, HALF = "uint32", "uint16"
"""The types of a word, and of the bits of a bfloat16."""


def word_at(word: Word, value: Reader, r: tirx.Expr, *at: tirx.Expr) -> tirx.Expr:
    """Return word number r of a row, whose elements, or their bits, `value` reads."""
    elements = (value(*at, word.count * r + i) for i in range(word.count))
    parts = (_bits(each, word.bits).astype(WORD) for each in elements)
    return reduce(or_, (p << _word(word.bits * i) if i else p for i, p in enumerate(parts)))


def column_word(word: Word, value: Reader, r: tirx.Expr, *at: tirx.Expr) -> tirx.Expr:
    """Return word number r of a column: with the other sign, where the word has that."""
    found = word_at(word, value, r, *at)
    return found ^ _word(FLIP) if word.is_flipped else found


def _word(value: int) -> tirx.Expr:
    return tirx.const(value, WORD)


def _bits(value: tirx.Expr, count: int) -> tirx.Expr:
    """Return the bits of an element, as so many; those of each where it is one of two.

    TVM computes what is chosen of bfloat16 as float32, and has then other bits.
    """
    if is_if_then_else(value):
        chosen = (_bits(each, count) for each in value.args[1:])
        return tirx.if_then_else(value.args[0], *chosen)
    dtype, bits = str(value.ty.dtype), f"uint{count}"
    if count == 16 and dtype in ("int8", "uint8"):
        return tirx.reinterpret(bits, value.astype("int16"))
    return value if dtype == bits else tirx.reinterpret(bits, value)


def _stored(bits: tirx.Expr) -> tirx.Expr:
    """Return the element whose bits `_bits` gives."""
    if is_if_then_else(bits):
        return tirx.if_then_else(bits.args[0], *map(_stored, bits.args[1:]))
    return bits.args[0] if isinstance(bits, ir.Call) else bits  # of a uint8, its bits are it


def first_of(value: tirx.Expr) -> tuple[tirx.Expr, int] | None:
    """Return the first of neighbours in memory that a word has, and how many there are."""
    parts: list[tirx.Expr] = []
    value = value.a if isinstance(value, tirx.BitwiseXor) else value
    while isinstance(value, tirx.BitwiseOr):
        parts.insert(0, value.b)
        value = value.a
    loads = [loads_of(part) for part in (value, *parts)]
    if not parts or not loads[0]:
        return None
    for number, others in enumerate(loads):
        if not all(_follows(a, b, number) for a, b in zip(loads[0], others, strict=True)):
            return None
    return _stored(value.value), len(loads)


def _follows(first: TensorLoad, later: TensorLoad, distance: int) -> bool:
    *outer, last = zip(first.indices, later.indices, strict=True)
    same = first.source.same_as(later.source) and all(structural_equal(a, b) for a, b in outer)
    return same and bool(Analyzer().can_prove_equal(last[1], last[0] + distance))


def bits_of(x: te.Tensor) -> te.Tensor:
    """Add the rows of a norm, float32, as the bits of what they are as bfloat16."""

    def rounded(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        bits = tirx.reinterpret(WORD, as_stored(x(i, j), "bfloat16"))
        return (bits >> _word(16)).astype(HALF)

    return te.compute(x.shape, rounded, "x_bits")


def added_by_rows(x: te.Tensor, word: Word) -> te.Tensor | None:
    """Add what the flipped signs of columns took off, or added to, the sums of each row."""
    if not word.is_flipped:
        return None
    rows, k = x.shape
    r = te.reduce_axis((0, k), "r_sum")
    sums = te.compute((rows,), lambda i: te.sum(x(i, r).astype(word.sums), axis=r), "x_row_sum")
    sign = tirx.const(-SIGN if word.rows == "int8" else SIGN, word.sums)
    return te.compute((rows,), lambda i: sums(i) * sign, "x_added")


def products(word: Word, x: tirx.Expr, w: tirx.Expr) -> tirx.Expr:
    """Return the sum of the products of the elements of two words."""
    terms = (
        _element(x, i, word.rows, word.bits) * _element(w, i, word.columns, word.bits)
        for i in range(word.count)
    )
    return reduce(add, terms)


def _element(value: tirx.Expr, place: int, dtype: str, bits: int) -> tirx.Expr:
    """Return an element of a word, as what its products are added up as."""
    up = 32 - bits * (place + 1)
    high = value << _word(up) if up else value
    if dtype == "bfloat16":
        return tirx.reinterpret(ACCUMULATE, high & _word(0xFFFF0000))
    if dtype.startswith("u"):
        return (high >> _word(32 - bits)).astype("int32")
    return tirx.reinterpret("int32", high) >> tirx.const(32 - bits, "int32")
