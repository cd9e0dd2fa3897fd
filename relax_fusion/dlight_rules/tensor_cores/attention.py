"""Attention on tensor cores: the tiles of a function become `AttentionKernel`s."""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...compute.attention import Sizes, operands_of, range_suffix
from ...compute.attention_scores import Scores
from ...compute.attention_tile import Operands
from ...estimator.families.tensor_cores.tiles import FAMILY
from ...estimator.tile_plan import PlanTable, TilePlan
from ...workload import Attention
from .attention_kernel import AttentionKernel
from .attention_results import Partials, combine_kernel
from .attention_rows import AttentionRows
from .fragments import local
from .layout import LANES
from .tile import int32, int64, whole

KERNEL = "mma_attention"
"""Name of the block of a kernel."""


def with_mma_attention(func: tirx.PrimFunc, work: Attention, table: PlanTable) -> tirx.PrimFunc:
    """Return `func` with the tiles of every plan for tensor cores as a kernel.

    rewrite: ``for b, h, t: tile(b, h, t)`` ->
    ``for bht: bind block: for x: bind thread: copies, ldmatrix, mma, softmax, mma, stores``

    Where keys are cut into parts, a kernel follows that puts these together.
    """
    sizes, operands = operands_of(func, work)
    kernels: dict[str, tirx.Stmt] = {}
    workspace: list[tirx.Var] = []
    for index, (_, plan) in enumerate(table.entries):
        if plan.family != FAMILY:
            continue
        suffix, partials = range_suffix(index), None
        if plan.split_k > 1:
            partials = Partials.of(work, sizes, plan.split_k, suffix)
            workspace += [partials.sums, partials.statistics]
        kernels["tile" + suffix] = _launches(work, plan, sizes, operands, partials)
    if not kernels:
        return func

    def replace(loop: tirx.For) -> tirx.Stmt:
        return kernels.get(_tile_of(loop), loop)

    root = func.body.block
    body = tvm_ffi.structural_map(root.body, (tirx.For, replace))
    buffers = [*root.alloc_buffers, *workspace]
    root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
    return func.with_body(s_tir.SBlockRealize([], True, root))


def _tile_of(loop: tirx.For) -> str:
    """Return the name of the block that these three loops go around; "" if there is none."""
    body: tirx.Stmt = loop
    for _ in range(3):
        if not isinstance(body, tirx.For):
            return ""
        body = body.body
    return body.block.name_hint if isinstance(body, s_tir.SBlockRealize) else ""


def _launches(
    work: Attention, plan: TilePlan, sizes: Sizes, operands: Operands, partials: Partials | None
) -> tirx.Stmt:
    """Return what is launched for a plan."""
    body = _kernel(work, plan, sizes, operands, partials)
    if partials is not None:
        body = tirx.SeqStmt([body, combine_kernel(work, sizes, operands, partials)])
    size = sizes.batch * sizes.q_len
    if isinstance(size, tirx.IntImm):
        return body
    # TVM launches one thread block where a grid has none; it would read what is not there
    some = tirx.op.tvm_thread_invariant(size > int64(0))
    return tirx.IfThenElse(some, body, None)


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
