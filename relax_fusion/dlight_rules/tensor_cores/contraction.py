"""Contractions on tensor cores: the loops of a product become an `MmaKernel`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from tvm import s_tir, tirx
from tvm.target import Target

from ...compute import contraction_prim_func
from ...compute.ranges import root_of
from ...estimator.families.few_rows import tiles as few_rows
from ...estimator.families.few_rows.packed import PackedPlan
from ...estimator.families.tensor_cores import tiles as mma
from ...estimator.tile_plan import TilePlan
from ...hardware import DeviceSpec
from ...hardware.nvidia import has_float8
from ...hardware.target import compute_capability, device_of, is_cuda
from ...matching.expressions import found_in
from ...tvm_ir import IRBuilder, SBlock, T
from ...workload import GatedFFN, NormMatmul
from .. import steps
from . import dependent
from .epilogue import MmaEpilogue
from .few_rows import few_rows_kernel
from .layout import LANES, grouped
from .mma_kernel import MmaKernel
from .norm_rows import normalise_rows
from .row_norm import NORM_BLOCKS, RowNorm
from .sums import cluster_sums, leave_cluster, own_sums
from .tile import MmaTile, Product, int32, int64, tiles_of, whole
from .wgmma_kernel import WgmmaKernel


def emit(work: NormMatmul | GatedFFN, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernels of a plan for tensor cores."""
    return schedule_mma(contraction_prim_func(work, plan, gpu=True), plan, target)


def schedule_mma(func: tirx.PrimFunc, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Schedule a contraction: a kernel for its norm, and one for every product.

    Where the target has dependent launches, products of few rows ask for weights before they wait
    for the kernels in front.  Packed weights are unpacked by a kernel in front, for few rows in
    registers.
    """
    sch = s_tir.Schedule(func)
    for name in steps.block_names(func):
        if name.startswith("w_parts") and plan.family in few_rows.FAMILIES:
            sch.compute_inline(sch.get_sblock(name))
        elif name.startswith("w_parts"):
            block, threads = sch.get_sblock(name), plan.num_warps * LANES
            steps.element_wise_kernel(sch, block, threads, plan.lanes)
    names = steps.block_names(func)
    if "x_norm" in names and not _normalises(plan, names):
        normalise_rows(sch, plan.num_warps * LANES)
    float8 = is_cuda(target) and has_float8(compute_capability(target))
    return with_mma(sch.mod["main"], plan, device_of(target), float8)


def with_mma(
    func: tirx.PrimFunc, plan: TilePlan, dev: DeviceSpec | None = None, float8: bool = False
) -> tirx.PrimFunc:
    """Return `func` with every product as a kernel for tensor cores.

    rewrite: ``for p, i, j, k: acc += x * w``; ``for i, j: out = f(acc)`` ->
    ``for tile: bind block: for t: bind thread: copies, ldmatrix, mma, f, stores``
    """
    root = func.body.block
    kernels: list[tirx.Stmt] = []
    sums: list[tirx.Var] = []
    blocks: dict[str, SBlock] = {}
    inside = _normalises(plan, steps.block_names(func))
    for stage in root.body.seq:
        stage_blocks = found_in(stage, SBlock)
        block = stage_blocks[0]
        name = block.name_hint
        blocks[name] = block
        if name.startswith("acc"):
            sums.append(block.body.buffer)
        elif name.startswith("out"):
            product = Product(blocks[name.replace("out", "acc")], block, float8)
            norm = RowNorm.of(blocks) if inside else None
            few = plan.family in few_rows.FAMILIES
            kernel = few_rows_kernel(product, plan, norm, dev) if few else _kernel(product, plan)
            kernels.append(kernel)
        elif inside and name in NORM_BLOCKS:
            sums.append(block.body.buffer)
        else:
            # A kernel that decodes weights has many small blocks; that each of them waits cost 9 us
            # at 4096 x 4096 on an H200
            early = dev is not None and dev.capabilities.dependent_launch
            announced = early and any(b.name_hint in NORM_BLOCKS for b in stage_blocks)
            kernels.append(dependent.announcing(stage) if announced else stage)
    kept = [buffer for buffer in root.alloc_buffers if not any(buffer.same_as(s) for s in sums)]
    body = tirx.SeqStmt(kernels) if len(kernels) > 1 else kernels[0]
    return func.with_body(root_of(body, kept))


def _normalises(plan: TilePlan, blocks: Iterable[str]) -> bool:
    """Tell whether the kernels of products normalise rows; not those of a sum that is a result."""
    if isinstance(plan, PackedPlan):
        return plan.keeps_row and "x_sum" not in blocks
    return plan.family == few_rows.FAMILY and few_rows.normalises(plan)


def _kernel(product: Product, plan: TilePlan) -> tirx.Stmt:
    """Return the kernel of one product; parts of a reduction are blocks of a cluster."""
    tile = MmaTile(plan, product.parts, product.layout, product.dtype)
    tiles_m = (product.rows + int64(plan.block_m - 1)) // int64(plan.block_m)
    tiles_n = tiles_of(product.columns, plan.block_n)
    split = plan.split_k
    blocks = tiles_m.astype("int32") * (tiles_n * split)
    with (
        IRBuilder() as builder,
        T.prim_func(s_tir=True),
        T.thread_binding(blocks, thread="blockIdx.x") as index,
        _cluster(split) as rank,
        T.thread_binding(int32(tile.threads), thread="threadIdx.x") as thread,
        T.sblock(product.out.name_hint.replace("out", "mma")),
    ):
        IRBuilder.name_many(["block", "thread"], [index, thread])
        T.reads(*(whole(b) for b in product.operands()))
        T.writes(whole(product.out.body.buffer))
        tiles = tiles_m.astype("int32"), tiles_n
        row, column = grouped(index // split, tiles, _some)
        emitter = WgmmaKernel if plan.family == mma.WARP_GROUPS else MmaKernel
        kernel = emitter(tile, product, thread, (row, column), rank)
        kernel.accumulate()
        epilogue = MmaEpilogue(kernel)
        if split == 1:
            epilogue.emit(own_sums(kernel))
        else:
            epilogue.emit(cluster_sums(kernel))
            leave_cluster()
    return builder.get().body.block.body


def _cluster(size: int) -> AbstractContextManager[tirx.Expr]:
    """Bind the rank of a block in a cluster of `size`; 0 where there are no clusters."""
    if size == 1:
        return nullcontext(int32(0))
    return T.thread_binding(int32(size), thread="clusterCtaIdx.x")


def _some(a: tirx.Expr, b: int) -> tirx.Expr:
    """Return the minimum of two numbers that are not 0: said, it spares a division its rounding."""
    return tirx.max(tirx.min(a, int32(b)), int32(1))
