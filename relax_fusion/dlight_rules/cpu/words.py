"""The CPU schedule of few rows by packed weights: vectors of words, unpacked field by field."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV

from ...estimator.families.words import WordVectors
from ...estimator.tile_plan import TilePlan
from ...matching.expressions import found_in, substitute
from ...tvm_ir import SBlock, SBlockRV, structural_map
from .. import steps
from .prefetch import requests
from .vector_transpose import along, bound

Projections = Sequence[tuple[SBlockRV, SBlockRV]]


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

    Parameters
    ----------
    vectors : WordVectors
        Of the weights.
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

    Returns
    -------
    list of (SBlockRV, LoopRV)
        The sums over fields and over chunks, with the loops that are outside of their starts.
    """
    (acc, out), (part, lane, scales) = blocks, stages
    i, j, *inner = sch.get_loops(out)
    i_tile, i_reg = sch.split(i, [None, plan.reg_m])
    panel, j_tile, j_reg = sch.split(j, [None, plan.block_n // plan.reg_n, plan.reg_n])
    sch.reorder(panel, j_tile, i_tile, i_reg, j_reg)
    sch.parallel(panel)
    for block in (acc, lane):
        sch.compute_at(block, i_tile, preserve_unit_loops=True)
    steps.unroll_all(sch, [*sch.get_loops(acc)[-4:], i_reg, j_reg, *inner])
    p, i, j, vector, chunk = sch.get_loops(lane)[-5:]
    sch.reorder(chunk, p, j, i, vector)
    for block in (part, scales):
        sch.compute_at(block, chunk, preserve_unit_loops=True)
    field = sch.get_loops(part)[-1]
    tile = dict(zip("pijcl", sch.get_loops(part)[-6:-1], strict=True))
    sch.reorder(field, tile["p"], tile["j"], tile["i"], tile["c"], tile["l"])
    steps.unroll_all(sch, [p, i, j, field, *(tile[name] for name in "pijc")])
    for block, lanes in ((part, tile["l"]), (lane, vector)):
        sch.vectorize(lanes)
        sch.set_scope(block, 0, "local")
    return [(part, field), (lane, chunk)]


def _scales_in_registers(sch: s_tir.Schedule, scales: SBlockRV, repeats: int) -> str:
    """Make a vector of scales; return the name of the block that fills it."""
    sch.set_scope(scales, 0, "local")
    *tile, lanes = sch.get_loops(scales)[-4:]
    steps.unroll_all(sch, tile)
    vector = sch.blockize(lanes)
    if steps.extent(sch, lanes) == repeats:
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
