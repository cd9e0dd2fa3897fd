"""Contractions of few rows on tensor cores: the loops of a product become a `FewRowsKernel`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx

from ...estimator.families.few_rows.packed import PackedPlan
from ...estimator.families.few_rows.tiles import MOST_ROWS
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...hardware import DeviceSpec
from ...tvm_ir import IRBuilder, T
from .decoded_rows import DecodedRowsKernel
from .few_rows_kernel import FewRowsKernel
from .few_rows_ring import Launch, Place
from .layout import LANES
from .row_norm import RowNorm
from .tile import Product, int32, int64, last_tile, tiles_of, whole

Kernel = FewRowsKernel | DecodedRowsKernel


def few_rows_kernel(
    product: Product, plan: TilePlan, norm: RowNorm | None, dev: DeviceSpec | None
) -> tirx.Stmt:
    """Return the kernel of one product, and of the norm in front of it if one is given.

    Parameters
    ----------
    dev : DeviceSpec, optional
        Where it will run; by default somewhere where a kernel begins behind those in front of it.
    """
    decodes = product.weight_is_computed
    height = PackedPlan.of(plan).height if decodes else plan.block_m
    tiles_m = (product.rows + int64(height - 1)) // int64(height)
    tiles_n = tiles_of(product.columns, plan.block_n)
    launch = Launch.on(dev, _blocks(product, plan, height))
    read = product.operands()
    if norm:
        normed = norm.result.body.buffer
        read = [norm.x, *norm.factors, *(b for b in read if not b.same_as(normed))]
    with (
        IRBuilder() as builder,
        T.prim_func(s_tir=True),
        T.thread_binding(tiles_m.astype("int32") * tiles_n, thread="blockIdx.x") as tile,
        _parts(plan) as part,
        T.thread_binding(int32(plan.num_warps * LANES), thread="threadIdx.x") as thread,
        T.sblock(product.out.name_hint.replace("out", "mma")),
    ):
        IRBuilder.name_many(["tile", "thread"], [tile, thread])
        T.reads(*(whole(buffer) for buffer in read))
        T.writes(whole(product.out.body.buffer))
        first_row = int64(tile // tiles_n) * int64(height)
        # The last tile has columns of the one before it, rather than a condition for each copy
        last = last_tile(product.columns, plan.block_n)
        first_column = int64(tirx.min(tile % tiles_n * int32(plan.block_n), last))
        place = Place(thread, first_row, first_column, part)
        if decodes:
            own = PackedPlan.of(plan)
            kernel: Kernel = DecodedRowsKernel(own, product, norm, place, launch)
        else:
            kernel = FewRowsKernel(plan, product, norm, place, launch)
        kernel.accumulate()
        kernel.finish()
    return builder.get().body.block.body


def _blocks(product: Product, plan: TilePlan, height: int) -> int | None:
    """Return the thread blocks of a kernel, the most where they depend on its rows."""
    if not isinstance(product.columns, int):
        return None
    rows = product.rows.value if isinstance(product.rows, tirx.IntImm) else MOST_ROWS
    tall = ceil_div(rows, height) if height > 1 else 1
    return tall * ceil_div(product.columns, plan.block_n) * plan.split_k


@contextmanager
def _parts(plan: TilePlan) -> Iterator[tirx.Expr]:
    """Give each part of k a thread block, all of a tile a cluster."""
    if plan.split_k == 1:
        yield int32(0)
        return
    size = int32(plan.split_k)
    with (
        T.thread_binding(size, thread="blockIdx.y"),
        T.thread_binding(size, thread="clusterCtaIdx.y") as part,
    ):
        IRBuilder.name("part", part)
        yield part
