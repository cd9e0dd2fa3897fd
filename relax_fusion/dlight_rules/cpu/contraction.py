"""The CPU half of the contraction rule: dot products for few rows, panels of weights for many."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import s_tir, tirx
from tvm.target import Target

from ...compute import contraction_prim_func
from ...compute.activations import ACCUMULATE
from ...compute.ranges import root_of
from ...estimator.families.cpu_dots import COUNTS
from ...estimator.families.cpu_tiles import PANELS, CpuPlan
from ...estimator.families.words import FAMILY as WORDS
from ...estimator.families.words import WordVectors, word_vectors
from ...estimator.tile_plan import TilePlan
from ...hardware.target import device_of
from ...matching.expressions import found_in
from ...tvm_ir import SBlock, SBlockRV
from ...workload import DTYPE_BYTES, GatedFFN, NormMatmul, Projection
from .. import verbs
from ..joined import side_by_side
from .dots import multiply_words
from .panels import place_panels, vectorised
from .words import look_up_fields, looks_up, schedule_words

Projections = list[tuple[SBlockRV, SBlockRV]]

WEIGHT = 1
"""The number of the weight among the tensors that a sum reads, behind x; scales are last."""

_PROLOGUE = (
    *("first_square_sum", "x_sum", "mean_sum", "square_sum", "x_norm", "x_bits", "norm_out"),
    *("x_row_sum", "x_added", "x_largest", "x_step", "x_codes"),
)


def emit(
    work: NormMatmul | GatedFFN, plan: TilePlan, target: Target, *, laid: bool = False
) -> tirx.PrimFunc:
    """Return the kernel of a plan; `laid`: for weights that are in panels already."""
    vectors = word_vectors(work, plan.lanes)
    func = contraction_prim_func(work, plan, gpu=False, laid=laid)
    if isinstance(work, NormMatmul) and work.head_columns:
        func = placed_heads(func, work, device_of(target).vector_bytes // DTYPE_BYTES[ACCUMULATE])
    words = vectors if plan.family == WORDS else None
    outputs = () if isinstance(work, GatedFFN) else work.outputs
    func = joined_heads(schedule_cpu(func, plan, words, [*map(_run, outputs)]))
    if plan.family in COUNTS:
        return multiply_words(func, plan, work.dtype, target)
    if words is None or not looks_up(words, target):
        return func
    return look_up_fields(func, words, 1 if isinstance(work, GatedFFN) else len(work.outputs))


def _run(projection: Projection) -> int:
    """Return how many neighbouring pairs are rotated, or are not; 0 where all columns are alike."""
    rope, columns = projection.rope, projection.columns
    if rope is None or (rope.width == rope.head_dim and rope.turned(columns) == columns):
        return 0
    return math.gcd(rope.width // 2, rope.head_dim // 2)


def schedule_cpu(
    func: tirx.PrimFunc,
    plan: TilePlan,
    vectors: WordVectors | None = None,
    runs: Sequence[int] = (),
) -> tirx.PrimFunc:
    """Schedule every stage of a contraction.

    A parallel loop normalises the rows; then, for each projection, blocks of ``block_n`` columns
    run in parallel, in register tiles of ``reg_m x reg_n`` results.  Few rows take the weights as
    they lie: in ``[n, k]`` by dot products with one partial sum per lane, in ``[k, n]`` in vectors
    along n.  Many rows ("panels", and those of `cpu_dots`) take columns that were packed for them.
    Words of packed weights are unpacked by vectors (family "words").

    `vectors`: of the weights, for the family "words".
    `runs`: how many neighbouring columns of each result are computed alike, where not all are.
    """
    sch = s_tir.Schedule(func)
    projections = verbs.projections(sch)
    names = verbs.block_names(sch.mod["main"])
    present = [sch.get_sblock(n) for n in _PROLOGUE if n in names]
    if present:
        _rows(sch, present, plan)
    if plan.family in (PANELS, *COUNTS):
        return _panels(sch, projections, CpuPlan.of(plan), runs)
    if vectors is not None:
        return schedule_words(sch, projections, plan, vectors)
    for acc, out in projections:
        _columns(sch, acc, out, plan)
    return sch.mod["main"]


def _panels(
    sch: s_tir.Schedule, projections: Projections, plan: CpuPlan, runs: Sequence[int]
) -> tirx.PrimFunc:
    """Schedule the matmuls whose weights are repacked.

    Blocks are moved before any is decomposed: its halves alone are no valid blocks.
    """
    tiles = sch.get_sblock("x_tiles")
    sch.parallel(sch.get_loops(tiles)[0])
    names = verbs.block_names(sch.mod["main"])
    if "x_group_sum" in names:
        sch.parallel(sch.get_loops(sch.get_sblock("x_group_sum"))[0])
    copies, sums = [tiles], []
    for index, blocks in enumerate(projections):
        stages = (f"{name}{index}" for name in ("w_panels", "w_words", "w_scales"))
        panels = [sch.get_sblock(name) for name in stages if name in names]
        run = runs[index] if runs else 0
        sums.append((blocks[0], place_panels(sch, blocks, panels, plan, run)))
        copies += panels
    return vectorised(sch, copies, sums, plan.lanes)


def _rows(sch: s_tir.Schedule, blocks: list[SBlockRV], plan: TilePlan) -> None:
    """Normalise rows in parallel, each with vectorised partial sums."""
    ordered: list[SBlockRV] = []
    partials: list[SBlockRV] = []
    for block in blocks:
        # Only an even split: moving a block under the row loop drops the guard of an uneven one.
        width = verbs.extent(sch, sch.get_loops(block)[-1]) or 1
        lanes = math.gcd(width, plan.lanes)
        if verbs.is_reduction(sch, block) and lanes > 1:
            partials.append(verbs.split_lanes(sch, block, lanes))
            ordered.append(partials[-1])
        ordered.append(block)
    row = sch.get_loops(ordered[0])[0]
    verbs.chain_rows(sch, ordered[1:], row)
    sch.parallel(row)  # before reductions are decomposed: their halves alone are no valid blocks
    for block in ordered:
        loops = sch.get_loops(block)[1:]
        if block in partials:
            # A moved block has its loops in the order of its block variables: lanes first.
            outer, lane = loops if block is ordered[0] else (loops[-1], loops[0])
            sch.reorder(outer, lane)
            sch.set_scope(block, 0, "local")
            sch.vectorize(lane)
            sch.decompose_reduction(block, outer)
        elif not verbs.is_reduction(sch, block):
            verbs.vectorise_inner(sch, loops[-1], plan.lanes)


def _columns(sch: s_tir.Schedule, acc: SBlockRV, out: SBlockRV, plan: TilePlan) -> None:
    """Tile one projection into blocks of columns and register tiles."""
    dot = verbs.reads_along(sch, acc, WEIGHT, -1)
    lanes = plan.lanes
    partial = verbs.split_lanes(sch, acc, lanes) if dot and lanes > 1 else acc
    i, j, *inner = sch.get_loops(out)
    i_block, i_tile, i_reg = sch.split(i, [None, plan.block_m // plan.reg_m, plan.reg_m])
    panel, j_tile, j_reg = sch.split(j, [None, plan.block_n // plan.reg_n, plan.reg_n])
    sch.reorder(panel, i_block, j_tile, i_tile, i_reg, j_reg)
    sch.parallel(panel)
    sch.compute_at(acc, i_tile, preserve_unit_loops=True)
    if partial is not acc:
        sch.compute_at(partial, i_tile, preserve_unit_loops=True)
        _register_tile(sch, partial, reduced_last=True)
        verbs.unroll_all(sch, sch.get_loops(acc)[-4:])
    else:
        _register_tile(sch, acc, reduced_last=False, lanes=lanes)
    sch.unroll(i_reg)
    verbs.unroll_all(sch, [j_reg, *inner])


def _register_tile(
    sch: s_tir.Schedule, block: SBlockRV, reduced_last: bool, lanes: int = 1
) -> None:
    """Keep a tile of accumulators in vector registers over the whole reduction.

    rewrite: ``for l, p, i, j, k: acc += x * w`` -> ``init; for k: unrolled p, i, j: vector l:``
    """
    if reduced_last:
        lane, p, i, j, k = sch.get_loops(block)[-5:]
        sch.reorder(k, p, i, j, lane)
    else:
        p, i, j, k = sch.get_loops(block)[-4:]
        j, lane = sch.split(j, [None, lanes])
        sch.reorder(k, p, i, j, lane)
    sch.set_scope(block, 0, "local")
    sch.vectorize(lane)
    verbs.unroll_all(sch, [p, i, j])
    sch.decompose_reduction(block, k)


_FIRST = "head_sum"


def placed_heads(func: tirx.PrimFunc, work: NormMatmul, lanes: int) -> tirx.PrimFunc:
    """Normalise and rotate the heads of each projection in a parallel loop.

    rewrite::

        for i, h, r: head_sum += raw^2         ->    for i, h in parallel:
        for i, h: head_scale = rsqrt                     for r: vector head_sum += raw^2
        for i, pair, part: out                           head_scale = rsqrt
                                                         for part: vectors of pairs: out
    """
    sch = s_tir.Schedule(func)
    for index, projection in enumerate(work.outputs):
        if projection.head_norm is not None:
            _place(sch, index, projection, lanes)
    return sch.mod["main"]


def _place(sch: s_tir.Schedule, index: int, projection: Projection, lanes: int) -> None:
    """Schedule one projection; where a norm is of whole rows, the loop is over rows."""
    norm, rope = projection.head_norm, projection.rope
    assert norm is not None
    total, scale, out = (sch.get_sblock(f"{name}{index}") for name in (_FIRST, "head_scale", "out"))
    width = lanes if norm.width % lanes == 0 else 1
    partial = verbs.split_lanes(sch, total, width) if width > 1 else None
    row, column, *part = sch.get_loops(out)
    size = norm.width if rope is None else norm.width // 2
    head, column = sch.split(column, [None, size])
    run = size if rope is None else rope.distance
    outer, column = sch.split(column, [None, run])
    sch.reorder(row, head, outer, *part, column)
    verbs.unroll_all(sch, part)
    row = sch.fuse(row, head)
    for block in (scale, total, partial):
        if block is not None:
            sch.compute_at(block, row, preserve_unit_loops=True)
    sch.parallel(row)
    if partial is not None:
        lane, *rest = verbs.loops_below(sch, partial, row)
        sch.reorder(*rest, lane)
        sch.set_scope(partial, 0, "local")
        sch.vectorize(lane)
        sch.decompose_reduction(partial, rest[0])
    if run % lanes == 0:
        verbs.vectorise_inner(sch, column, lanes)


def joined_heads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let one parallel loop, the last, normalise the heads of all projections.

    rewrite: ``raw0; heads0; raw1; heads1; out2`` -> ``raw0; raw1; out2; heads0 beside heads1``
    """
    root = func.body.block
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else []
    behind = [nest for nest in nests if _normalises_heads(nest)]
    if len(behind) < 2:
        return func
    before = [nest for nest in nests if not _normalises_heads(nest)]
    body = tirx.SeqStmt([*before, side_by_side(behind, on_gpu=False)])
    return func.with_body(root_of(body, root.alloc_buffers))


def _normalises_heads(nest: tirx.Stmt) -> bool:
    return any(block.name_hint.startswith(_FIRST) for block in found_in(nest, SBlock))
