"""Chains of two matmuls on tensor cores: the blocks of a function become a `ChainKernel`."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from ...compute import matmul_chain_prim_func
from ...compute.ranges import root_of
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...workload import MatmulChain
from ..steps import blocks_of
from .chain_kernel import ChainKernel
from .chain_side import Side
from .layout import LANES
from .tile import int32, int64, whole


def emit(work: MatmulChain, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan for tensor cores.

    rewrite: ``for b, i, j, k: acc0``; ``out0``; ``for b, i, j, k: acc1``; ``out1`` ->
    ``for tile: bind block: for t: bind thread: copies, ldmatrix, mma, steps, mma, steps, stores``
    """
    func = matmul_chain_prim_func(work, plan)
    blocks = {block.name_hint: block for block in blocks_of(func)}
    batch, rows = (v.dom.extent for v in blocks["acc0"].iter_vars[:2])
    tiles = ((rows + int64(plan.block_m - 1)) // int64(plan.block_m)).astype("int32")
    parts = int32(ceil_div(work.n, plan.block_n))
    tensors = [p for p in func.params if tirx.is_buffer_var(p)]
    with (
        IRBuilder() as builder,
        T.prim_func(s_tir=True),
        T.thread_binding(batch.astype("int32") * tiles * parts, thread="blockIdx.x") as index,
        T.thread_binding(int32(plan.num_warps * LANES), thread="threadIdx.x") as thread,
        T.sblock("mma_chain"),
    ):
        IRBuilder.name_many(["tile", "thread"], [index, thread])
        T.reads(*map(whole, tensors[:-1]))
        T.writes(whole(tensors[-1]))
        line = index // parts
        matrix = int64(line // tiles)
        inner, outer = (Side(blocks[f"acc{i}"], blocks[f"out{i}"], matrix) for i in range(2))
        at = (line % tiles, index % parts)
        ChainKernel(work, plan, (inner, outer), thread, at).emit()
    return func.with_body(root_of(builder.get().body.block.body))
