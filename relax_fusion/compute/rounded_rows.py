"""Rows that are rounded to bytes before weights of few bits multiply them.

Stages, beside those of `contraction` and `accumulation`:

``x_largest``    the largest magnitude of a row, infinite if there is a NaN    [rows], float32
``x_step``       what 1 is in a row's bytes                                    [rows], float32
``x_codes``      the rows in bytes                                             [rows, k], int8
``x_group_sum``  their sums over the groups of the weight                      [rows, groups], int32
``part{i}``      sums of products over a group                  [groups, parts, rows', n'], int32
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tvm import te, tirx

from ..workload import Packed
from .activations import ACCUMULATE
from .dot_words import WORD
from .stages import int64

LARGEST = 127.0
"""The largest byte of a row: bytes of both signs are as many."""

LEAST = 2.0**-100
"""A row of smaller numbers is one of zeros."""

WHOLE, WHOLE_BITS = 1.5 * 2.0**23, 0x4B400000
"""A float32 of this size has no bits for fractions: what is added to it is rounded to nearest, and
is in its last bits.  TVM 0.27 has no vectors of `nearbyint`."""

SUMS = "int32"


class Rounded(NamedTuple):
    """What 1 is in the bytes of each row, and their sums over groups."""

    step: te.Tensor
    sums: te.Tensor


def rounded_rows(x: te.Tensor, group: int) -> tuple[te.Tensor, Rounded]:
    """Add the rows of x in bytes, by the largest magnitude of each.

    The step of a row with NaN or an infinity is infinite, its bytes are 0: its products are NaN.
    """
    (rows, k), endless = x.shape, tirx.const(math.inf, ACCUMULATE)
    r, at = te.reduce_axis((0, k), "r"), te.reduce_axis((0, group), "at")

    def size(i: tirx.Expr) -> tirx.Expr:
        found = tirx.abs(x(i, r).astype(ACCUMULATE))
        return tirx.Select(found < endless, found, endless)  # NaN is not below it

    largest = te.compute((rows,), lambda i: te.max(size(i), axis=r), "x_largest")
    least = tirx.const(LEAST, ACCUMULATE)
    step = te.compute(
        (rows,), lambda i: te.max(largest(i), least) / tirx.const(LARGEST, ACCUMULATE), "x_step"
    )

    def code(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        value = x(i, j).astype(ACCUMULATE) / step(i)
        value = tirx.Select(step(i) < endless, value, tirx.const(0.0, ACCUMULATE))
        bits = tirx.reinterpret(SUMS, value + tirx.const(WHOLE, ACCUMULATE))
        return (bits - tirx.const(WHOLE_BITS, SUMS)).astype("int8")

    codes = te.compute(int64((rows, k)), code, "x_codes")
    sums = te.compute(
        int64((rows, k // group)),
        lambda i, g: te.sum(codes(i, g * group + at).astype(SUMS), axis=at),
        "x_group_sum",
    )
    return codes, Rounded(step, sums)


def byte_word(form: Packed, words: te.Tensor, r: tirx.Expr, *at: tirx.Expr) -> tirx.Expr:
    """Return fields 4r to 4r + 3 of a column as bytes of a word; `at`: panel, part and column."""
    panel, *rest = at
    if form.bits == 8:
        return words(panel, r, *rest)
    shift = (r % 2 * 16).astype(WORD)
    half = words(panel, r // 2, *rest) >> shift & tirx.const(0xFFFF, WORD)
    bytes_ = (half | half << tirx.const(8, WORD)) & tirx.const(0x00FF00FF, WORD)
    return (bytes_ | bytes_ << tirx.const(4, WORD)) & tirx.const(0x0F0F0F0F, WORD)
