"""Attention on tensor cores: an `AttentionKernel` for every tile of rows."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from ...compute.attention import Sizes, operands_of
from ...compute.attention_scores import Scores
from ...compute.attention_tile import Operands
from ...compute.ranges import root_of
from ...compute.reference import declare
from ...estimator.tile_plan import TilePlan
from ...workload import Attention
from .attention_kernel import AttentionKernel
from .attention_results import Partials, combine_kernel
from .attention_rows import AttentionRows
from .fragments import local
from .layout import LANES
from .tile import int32, int64, whole

KERNEL = "mma_attention"
"""Name of the block of a kernel."""


def emit(work: Attention, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan for tensor cores.

    Where keys are cut into parts, a kernel follows that puts these together.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        sizes, operands = operands_of(declare(work.graph), work)
    partials = Partials.of(work, sizes, plan.split_k) if plan.split_k > 1 else None
    body = _kernel(work, plan, sizes, operands, partials)
    if partials is not None:
        body = tirx.SeqStmt([body, combine_kernel(work, sizes, operands, partials)])
    made = [partials.sums, partials.statistics] if partials else []
    return builder.get().with_body(root_of(body, made))


def _kernel(
    work: Attention, plan: TilePlan, sizes: Sizes, operands: Operands, partials: Partials | None
) -> tirx.Stmt:
    """Return the kernel of one plan."""
    rows = sizes.q_len * int64(work.q_heads // work.kv_heads)
    tiles = ((rows + int64(plan.block_m - 1)) // int64(plan.block_m)).astype("int32")
    lines = int32(work.kv_heads) * sizes.batch.astype("int32")
    with (
        IRBuilder() as builder,
        T.prim_func(s_tir=True),
        T.thread_binding(tiles * lines * int32(plan.split_k), thread="blockIdx.x") as index,
        T.thread_binding(int32(plan.num_warps * LANES), thread="threadIdx.x") as thread,
        T.sblock(KERNEL),
    ):
        IRBuilder.name_many(["tile", "thread"], [index, thread])
        given = [b for b in vars(operands).values() if b is not None and b is not operands.out]
        made = [partials.sums, partials.statistics] if partials else [operands.out]
        T.reads(*(whole(b) for b in given))
        T.writes(*(whole(b) for b in made))
        rules = Scores(work, operands, sizes.q_len, sizes.kv_len, on_gpu=True)
        place = local("place", 3, "int32")
        for i, value in enumerate(_place(work, index // int32(plan.split_k), tiles)):
            T.buffer_store(place, value, [i])
        at = AttentionRows(work, plan, rules, thread, (place[0], place[1], place[2]))
        part = index % int32(plan.split_k)
        AttentionKernel(at, operands, thread, partials, part).emit()
    return builder.get().body.block.body


def _place(
    work: Attention, index: tirx.Expr, tiles: tirx.Expr
) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
    """Return batch, key head and row tile of a block.

    Under a causal mask the tiles that see most keys begin first, those of all heads, so that the
    last ones to run are short.
    """
    heads = int32(work.kv_heads)
    if work.causal == "none":
        line = index // tiles
        return line // heads, line % heads, index % tiles
    line = index // heads
    return line // tiles, index % heads, tiles - int32(1) - line % tiles
