"""The CPU schedule of norms of heads behind contractions: a parallel loop over heads of rows."""

from __future__ import annotations

from tvm import s_tir, tirx

from ...compute.ranges import root_of
from ...matching.expressions import found_in
from ...tvm_ir import SBlock
from ...workload import NormMatmul, Projection
from .. import verbs
from ..joined import side_by_side

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
