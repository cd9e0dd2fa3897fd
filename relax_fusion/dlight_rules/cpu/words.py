"""The CPU schedule of few rows by packed weights: vectors of words, unpacked field by field."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target, codegen

from ...estimator.families.words import WordVectors
from ...estimator.tile_plan import TilePlan
from ...matching.expressions import found_in, int64, is_if_then_else, loads_of, ramp, substitute
from ...tvm_ir import SBlock, SBlockRV, structural_map
from .. import verbs
from .panels import along, bound

Projections = Sequence[tuple[SBlockRV, SBlockRV]]


LANES, INDEX_BITS = 16, 4
"""A lookup has 16 entries and results, and reads 4 bits of an index."""

_LOOKUP, _FEATURE = "llvm.x86.avx512.permvar.sf.512", "avx512f"


def schedule_words(
    sch: s_tir.Schedule, projections: Projections, plan: TilePlan, vectors: WordVectors
) -> tirx.PrimFunc:
    """Return the function with tiles of results in registers, over vectors of words.

    rewrite::

        for p, i, j, c, l: part = sum of fields     ->    for panel in parallel:
        for p, i, j, l: lane = sum of part * scale            for tile of columns, tile of rows:
        for p, i, j: acc = sum of lane                            for c: unrolled p, j:
        for i, j: out                                                 vector of scales
                                                                      for f, p, j, i: vector part
                                                                      lane += part * scales
                                                                  acc, out

    Blocks are moved before any is decomposed or put into another: those are no stages.
    """
    sch.parallel(sch.get_loops(sch.get_sblock("x_words"))[0])
    sums: list[tuple[SBlockRV, LoopRV]] = []
    scales = [sch.get_sblock(f"w_scales{index}") for index in range(len(projections))]
    for index, blocks in enumerate(projections):
        stages = [sch.get_sblock(f"part{index}"), sch.get_sblock(f"lane{index}"), scales[index]]
        sums += _place(sch, blocks, stages, plan)
    filled = [_scales_in_registers(sch, each, vectors.repeats) for each in scales]
    for block, loop in sums:
        sch.decompose_reduction(block, loop)
    func = sch.mod["main"]
    for index, name in enumerate(filled):
        func = filled_in_registers(func, f"part{index}_update", name, vectors, plan.reg_n)
    return func


def _place(
    sch: s_tir.Schedule,
    blocks: tuple[SBlockRV, SBlockRV],
    stages: Sequence[SBlockRV],
    plan: TilePlan,
) -> list[tuple[SBlockRV, LoopRV]]:
    """Move the stages of a projection under its tiles, and their results into vector registers.

    Returns the sums over fields and over chunks, with the loops that are outside of their starts.
    """
    (acc, out), (part, lane, scales) = blocks, stages
    i, j, *inner = sch.get_loops(out)
    i_tile, i_reg = sch.split(i, [None, plan.reg_m])
    panel, j_tile, j_reg = sch.split(j, [None, plan.block_n // plan.reg_n, plan.reg_n])
    sch.reorder(panel, j_tile, i_tile, i_reg, j_reg)
    sch.parallel(panel)
    for block in (acc, lane):
        sch.compute_at(block, i_tile, preserve_unit_loops=True)
    verbs.unroll_all(sch, [*sch.get_loops(acc)[-4:], i_reg, j_reg, *inner])
    p, i, j, vector, chunk = sch.get_loops(lane)[-5:]
    sch.reorder(chunk, p, j, i, vector)
    for block in (part, scales):
        sch.compute_at(block, chunk, preserve_unit_loops=True)
    field = sch.get_loops(part)[-1]
    tile = dict(zip("pijcl", sch.get_loops(part)[-6:-1], strict=True))
    sch.reorder(field, tile["p"], tile["j"], tile["i"], tile["c"], tile["l"])
    verbs.unroll_all(sch, [p, i, j, field, *(tile[name] for name in "pijc")])
    for block, lanes in ((part, tile["l"]), (lane, vector)):
        sch.vectorize(lanes)
        sch.set_scope(block, 0, "local")
    return [(part, field), (lane, chunk)]


def _scales_in_registers(sch: s_tir.Schedule, scales: SBlockRV, repeats: int) -> str:
    """Make a vector of scales; return the name of the block that fills it."""
    sch.set_scope(scales, 0, "local")
    *tile, lanes = sch.get_loops(scales)[-4:]
    verbs.unroll_all(sch, tile)
    vector = sch.blockize(lanes)
    if verbs.extent(sch, lanes) == repeats:
        sch.vectorize(lanes)
    return str(sch.get(vector).name_hint)


def filled_in_registers(
    func: tirx.PrimFunc, products: str, scales: str, vectors: WordVectors, columns: int
) -> tirx.PrimFunc:
    """Return `func` with a shuffle for the vector that its block `scales` fills, and requests.

    rewrite::

        for l in lanes:                     ->    prefetch what `products` reads later, and s
            block: v[l] = s[l // repeats]         few = s[vector of lanes / repeats]
                                                  v[vector l] = shuffle(few, l // repeats)
    """
    blocks = {block.name_hint: block for block in found_in(func.body, SBlock)}

    def visit(block: SBlock) -> SBlock:
        if block.name_hint != scales:
            return block
        lanes, repeats = vectors.lanes, vectors.repeats
        fill = block.body if repeats == lanes else _repeated(block.body, lanes, repeats)
        body = tirx.SeqStmt([*requests(blocks[products], block, vectors, columns), fill])
        return SBlock(block.iter_vars, block.reads, block.writes, scales, body)

    return func.with_body(structural_map(func.body, (SBlock, visit)))


def _repeated(loop: tirx.For, lanes: int, repeats: int) -> tirx.Stmt:
    """Return the store of a vector that a loop over its lanes describes."""
    realize, lane = loop.body, loop.loop_var
    block = realize.block
    places = dict(zip((v.var for v in block.iter_vars), realize.iter_values, strict=True))
    store = block.body
    value, *indices = (substitute(e, places) for e in (store.value, *store.indices))
    statements: list[tirx.Stmt] = []
    few = bound(statements, along(value, lane, lanes // repeats), "scales")
    order = [tirx.IntImm("int32", i // repeats) for i in range(lanes)]
    # A shuffle has no more results than operands.
    vector = tirx.Shuffle([few] * repeats, order)
    zero = tirx.IntImm("int64", 0)
    *outer, last = (substitute(index, {lane: zero}) for index in indices)
    ramp = tirx.Ramp(last, tirx.IntImm("int64", 1), lanes)
    statements.append(tirx.BufferStore(store.buffer, vector, [*outer, ramp]))
    return tirx.SeqStmt(statements)


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
    choices = [call for call in found_in(value, ir.Call) if is_if_then_else(call)]
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
    if is_if_then_else(value):
        condition, first, second = value.args
        return tirx.IfThenElse(condition, _requested(first), _requested(second))
    hints = (tirx.IntImm("int32", hint) for hint in (_READ, _KEEP, _DATA))
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(value), *hints))
