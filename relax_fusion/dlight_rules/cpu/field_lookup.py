"""Fields of words by a table in a vector register, where a processor looks up 16 at once."""

from __future__ import annotations

from tvm import ir, s_tir, tirx
from tvm.target import Target, codegen

from ...estimator.families.words import WordVectors
from ...matching.expressions import ramp, substitute
from ...tvm_ir import SBlock, structural_map
from .prefetch import words_of
from .vector_transpose import along, bound

LANES, INDEX_BITS = 16, 4
"""Of the lookup: entries and results, and the bits of an index that it reads."""

_LOOKUP, _FEATURE = "llvm.x86.avx512.permvar.sf.512", "avx512f"


def looks_up(vectors: WordVectors, target: Target) -> bool:
    """Tell whether a target looks up the fields of vectors of words."""
    fits = vectors.lanes == LANES and vectors.form.bits <= INDEX_BITS
    return fits and bool(codegen.target_has_features(_FEATURE, target))


def look_up_fields(func: tirx.PrimFunc, vectors: WordVectors, projections: int) -> tirx.PrimFunc:
    """Return `func` with the fields that its sums ``part{i}`` are over looked up.

    rewrite::

        for l: part[l] += x[f, l] * field(w[l], f)   ->   words = w[vector of l] >> bits of f
                                                          part += x * lookup(table, words)

    No field is cut out: an index has only its low bits, and where a field has fewer, the entries
    repeat.  A word is shifted, looked up and multiplied, where it would be cut out, given an
    exponent, moved to zero and multiplied.
    """
    sch = s_tir.Schedule(func)
    sums = [sch.get_sblock(f"part{index}_update") for index in range(projections)]
    vectors_of_sums = {
        str(sch.get(sch.blockize(sch.get_loops(each)[-1])).name_hint) for each in sums
    }

    def visit(block: SBlock) -> SBlock:
        if block.name_hint not in vectors_of_sums:
            return block
        body = _looked_up(block, vectors)
        return SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body)

    func = sch.mod["main"]
    return func.with_body(structural_map(func.body, (SBlock, visit)))


def _looked_up(vector: SBlock, vectors: WordVectors) -> tirx.Stmt:
    """Return the sum of a vector that a block describes by a loop over its lanes."""
    realize, lane = vector.body.body, vector.body.loop_var
    block, form = realize.block, vectors.form
    places = dict(zip((v.var for v in block.iter_vars), realize.iter_values, strict=True))
    which = vector.iter_vars[-1].var
    total, product = block.body.value.a, block.body.value.b
    zero = tirx.IntImm("int64", 0)
    indices = [substitute(substitute(i, places), {lane: zero}) for i in block.body.indices]
    statements: list[tirx.Stmt] = []
    words = along(substitute(words_of(block), places), lane, LANES).astype(f"uint32x{LANES}")
    shift = tirx.Broadcast((which * form.bits).astype("uint32"), LANES)
    shifted = bound(statements, words >> shift, "shifted")
    field = tirx.call_llvm_pure_intrin(
        f"float32x{LANES}", _LOOKUP, _table(vectors), tirx.reinterpret(f"int32x{LANES}", shifted)
    )
    x, old = (along(substitute(e, places), lane, LANES) for e in (product.a, total))
    places_of_sum = [*indices[:-1], ramp(indices[-1], LANES)]
    statements.append(tirx.BufferStore(block.body.buffer, old + x * field, places_of_sum))
    return tirx.SeqStmt(statements)


def _table(vectors: WordVectors) -> ir.Expr:
    """Return the elements that the fields stand for, without their scale."""
    form = vectors.form
    assert form.zero is not None, "words with zeros apart are of no such kernel"
    entries = [float(index % 2**form.bits - form.zero) for index in range(2**INDEX_BITS)]
    constants = [tirx.const(entry, "float32") for entry in entries]
    return tirx.Shuffle(constants, [tirx.IntImm("int32", i) for i in range(LANES)])
