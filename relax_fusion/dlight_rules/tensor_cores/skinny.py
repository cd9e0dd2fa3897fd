"""Contractions of few rows on tensor cores: the loops of a product become a `SkinnyKernel`."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...estimator.prediction import ceil_div
from ...tile_plan import TilePlan
from .decoded_rows import DecodedRowsKernel
from .layout import LANES
from .row_norm import RowNorm
from .skinny_kernel import SkinnyKernel
from .tile import Product, int32, int64, whole


def skinny_kernel(product: Product, plan: TilePlan, norm: RowNorm | None) -> tirx.Stmt:
    """Return the kernel of one product, and of the norm in front of it if one is given."""
    tiles_m = (product.rows + int64(plan.block_m - 1)) // int64(plan.block_m)
    tiles_n = int32(ceil_div(product.columns, plan.block_n))
    read = product.operands()
    if norm:
        normed = norm.result.body.buffer
        read = [norm.x, *norm.factors, *(b for b in read if not b.same_as(normed))]
    with (
        IRBuilder() as builder,
        T.prim_func(s_tir=True),
        T.thread_binding(tiles_n, thread="blockIdx.x") as tile_n,
        T.thread_binding(tiles_m.astype("int32"), thread="blockIdx.y") as tile_m,
        T.thread_binding(int32(plan.num_warps * LANES), thread="threadIdx.x") as thread,
        T.sblock(product.out.name_hint.replace("out", "mma")),
    ):
        IRBuilder.name_many(["tile_n", "tile_m", "thread"], [tile_n, tile_m, thread])
        T.reads(*(whole(buffer) for buffer in read))
        T.writes(whole(product.out.body.buffer))
        place = thread, tile_m, tile_n
        if product.weight_is_computed:
            kernel: SkinnyKernel = DecodedRowsKernel(plan, product, place)
        else:
            kernel = SkinnyKernel(plan, product, norm, place)
        kernel.accumulate()
        kernel.finish()
    return builder.get().body.block.body
