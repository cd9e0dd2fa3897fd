"""Two bfloat16 in a word, as processors multiply them: both products are added to a float32.

A kernel says so in plain TIR, `products`, which any processor computes.  Where one has an
instruction for it, the schedule puts that in its place (`relax_fusion.dlight_rules.cpu.dots`).
"""

from __future__ import annotations

from tvm import ir, te, tirx

from ..matching.expressions import loads_of
from ..tvm_ir import Analyzer, TensorLoad, structural_equal
from .activations import ACCUMULATE
from .stages import Reader, as_stored

WORD, HALF = "uint32", "uint16"
"""The types of a pair, and of the bits of one element."""


def pair(value: Reader, r: tirx.Expr, *at: tirx.Expr) -> tirx.Expr:
    """Return elements 2r and 2r + 1 of a row of bfloat16, or of its bits, in one word."""
    first, second = (value(*at, 2 * r + i) for i in range(2))
    return _bits(first) | _bits(second) << tirx.const(16, WORD)


def _bits(value: tirx.Expr) -> tirx.Expr:
    return _halves(value).astype(WORD)


def _halves(value: tirx.Expr) -> tirx.Expr:
    """Return the bits of an element, those of each where it is one of two.

    TVM computes what is chosen of bfloat16 as float32, and has then other bits.
    """
    if _is_choice(value):
        return tirx.if_then_else(value.args[0], *map(_halves, value.args[1:]))
    return value if str(value.ty.dtype) == HALF else tirx.reinterpret(HALF, value)


def _stored(bits: tirx.Expr) -> tirx.Expr:
    """Return the element whose bits `_halves` gives."""
    if _is_choice(bits):
        return tirx.if_then_else(bits.args[0], *map(_stored, bits.args[1:]))
    return bits if isinstance(bits, TensorLoad) else bits.args[0]


def _is_choice(value: tirx.Expr) -> bool:
    return isinstance(value, ir.Call) and value.op.name == "prim.if_then_else"


def element_of(value: tirx.Expr) -> tirx.Expr | None:
    """Return the first element of a pair of neighbours in memory, which `value` may be."""
    if not isinstance(value, tirx.BitwiseOr):
        return None
    first, second = loads_of(value.a), loads_of(value.b)
    if not first or not all(map(_follows, first, second)):
        return None
    return _stored(value.a.value)


def _follows(first: TensorLoad, second: TensorLoad) -> bool:
    *outer, last = zip(first.indices, second.indices, strict=True)
    same = first.source.same_as(second.source) and all(structural_equal(a, b) for a, b in outer)
    return same and bool(Analyzer().can_prove_equal(last[1], last[0] + 1))


def bits_of(x: te.Tensor) -> te.Tensor:
    """Add the rows of a norm, float32, as the bits of what they are as bfloat16."""

    def rounded(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        bits = tirx.reinterpret(WORD, as_stored(x(i, j), "bfloat16"))
        return (bits >> tirx.const(16, WORD)).astype(HALF)

    return te.compute(x.shape, rounded, "x_bits")


def products(x: tirx.Expr, w: tirx.Expr) -> tirx.Expr:
    """Return the sum of the products of the elements of two words, in float32."""
    high = tirx.const(0xFFFF0000, WORD)

    def wide(bits: tirx.Expr) -> tirx.Expr:
        return tirx.reinterpret(ACCUMULATE, bits)

    shift = tirx.const(16, WORD)
    return wide(x << shift) * wide(w << shift) + wide(x & high) * wide(w & high)
