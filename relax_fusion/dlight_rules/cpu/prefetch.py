"""Requests for weights that a task reads later, which no scheduling verb makes.

A processor follows the few bytes of packed weights in a row too late: it starts anew at every page.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from ...estimator.families.words import WordVectors
from ...matching.expressions import found_in, int64, loads_of, substitute
from ...tvm_ir import SBlock

AHEAD_BYTES = 8192
"""Of words between those that are read and those that are requested.  On Golden Cove 4 KB to
16 KB were as good, and read words from memory twice as fast as no requests."""

_READ, _KEEP, _DATA = 0, 3, 1
"""What LLVM's prefetch is told: to read, to keep in all caches, and that it is no code."""


def requests(
    products: SBlock, scales: SBlock, vectors: WordVectors, columns: int
) -> list[tirx.Stmt]:
    """Return what requests the words and the scales of a later chunk.

    Behind the end of a column the same one of the next tile is read.  An address behind the last
    column is no access.

    `products`: reads the words of (p, i, j, c, lane).
    `scales`: loops over the lanes of (p, j, c) for their scales; the requests are for its
    variables.
    `vectors`: of the weight.
    `columns`: of a tile, in each part.
    """
    words, scale = words_of(products), _first_scale(scales.body)
    part, _, column, chunk, lane, *_ = (v.var for v in products.iter_vars)
    p, j, c, _ = (v.var for v in scales.iter_vars)
    streams = columns * int(scales.iter_vars[0].dom.extent)
    word_bytes = tvm_ffi.dtype(vectors.form.word).itemsize
    ahead = max(1, AHEAD_BYTES // (streams * vectors.lanes * word_bytes))
    later = c + int64(ahead)
    next_j, next_c = j + later // vectors.chunks * columns, later % vectors.chunks
    word = substitute(words, {part: p, column: next_j, chunk: next_c, lane: int64(0)})
    return [_requested(word), _requested(substitute(scale, {j: next_j, c: next_c}))]


def words_of(products: SBlock) -> tirx.Expr:
    """Return what reads the words: a load, or a choice among loads."""
    value = products.body.value
    choices = [call for call in found_in(value, ir.Call) if _is_choice(call)]
    found = [e for e in (*loads_of(value), *choices) if str(e.ty.dtype).startswith("uint")]
    return found[-1]


def _first_scale(loop: tirx.For) -> tirx.Expr:
    """Return the value that a loop over lanes stores first."""
    realize = loop.body
    block = realize.block
    places = dict(zip((v.var for v in block.iter_vars), realize.iter_values, strict=True))
    value = substitute(block.body.value, places)
    return substitute(value, {loop.loop_var: int64(0)})


def _requested(value: tirx.Expr) -> tirx.Stmt:
    """Return the statement that requests what a value is loaded from."""
    if isinstance(value, tirx.Cast):
        return _requested(value.value)
    if _is_choice(value):
        condition, first, second = value.args
        return tirx.IfThenElse(condition, _requested(first), _requested(second))
    hints = (tirx.IntImm("int32", hint) for hint in (_READ, _KEEP, _DATA))
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(value), *hints))


def _is_choice(value: tirx.Expr) -> bool:
    return isinstance(value, ir.Call) and getattr(value.op, "name", "") == "prim.if_then_else"
