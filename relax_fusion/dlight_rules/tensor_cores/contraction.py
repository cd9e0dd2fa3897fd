"""Contractions on tensor cores: a product becomes an `MmaKernel`, or a `FewRowsKernel`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from ...compute import contraction_prim_func
from ...compute.ranges import root_of
from ...dlight_rules import verbs
from ...estimator.families.few_rows import tiles as few_rows
from ...estimator.families.few_rows.packed import PackedPlan
from ...estimator.families.few_rows.tiles import MOST_ROWS
from ...estimator.families.tensor_cores import tiles as mma
from ...estimator.limits import VECTOR_LOAD_BYTES
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...hardware import DeviceSpec
from ...hardware.nvidia import has_float8
from ...hardware.target import compute_capability, device_of, is_cuda
from ...matching.expressions import found_in
from ...tvm_ir import IRBuilder, SBlock, SBlockRV, T
from ...workload import DTYPE_BYTES, GatedFFN, NormMatmul
from . import dependent
from .dequantised_rows import DequantisedRowsKernel
from .epilogue import MmaEpilogue
from .few_rows_kernel import FewRowsKernel
from .few_rows_ring import Launch, Place
from .layout import LANES, grouped
from .mma_kernel import MmaKernel
from .streamed_row import streamed_row_kernel
from .sums import cluster_sums, leave_cluster, own_sums
from .tile import (
    NORM_BLOCKS,
    POST_NORM,
    MmaTile,
    Product,
    RowNorm,
    int32,
    int64,
    last_tile,
    tiles_of,
    whole,
)
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
    for name in verbs.block_names(func):
        if name.startswith("w_parts") and plan.family in few_rows.FAMILIES:
            sch.compute_inline(sch.get_sblock(name))
        elif name.startswith("w_parts"):
            block, threads = sch.get_sblock(name), plan.num_warps * LANES
            verbs.element_wise_kernel(sch, block, threads, plan.lanes)
    names = verbs.block_names(func)
    if not {"x_norm", POST_NORM}.isdisjoint(names) and not _normalises(plan, names):
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
    inside = _normalises(plan, verbs.block_names(func))
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
            # A kernel that dequantises weights has many small blocks; that each of them waits cost
            # 9 us at 4096 x 4096 on an H200
            early = dev is not None and dev.capabilities.dependent_launch
            announced = early and any(
                b.name_hint in (*NORM_BLOCKS, POST_NORM) for b in stage_blocks
            )
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


FIRST = -2
"""`Schedule.compute_at` puts a block in front of the others by this index."""


def normalise_rows(sch: s_tir.Schedule, threads: int) -> None:
    """Give the norm of a contraction, with the addition in front of it, a kernel of its own.

    rewrite: ``for i: for j: sum``; ``for i: for r: square``; ``for i: for j: norm`` ->
    ``for i: bind block: for t: bind thread: sum, square, norm of every threads-th vector``

    A thread has the same elements in every step, so what it reads again it wrote itself.  What it
    multiplies by and adds is on its way while the statistics are added up.
    """
    names = verbs.block_names(sch.mod["main"])
    stages = (POST_NORM, "x_sum", "mean_sum", "square_sum", "x_norm")
    blocks = [sch.get_sblock(name) for name in stages if name in names]
    row = sch.get_loops(blocks[0])[0]
    verbs.chain_rows(sch, blocks[1:], row)
    sch.bind(row, "blockIdx.x")
    if len(blocks) > 1:
        _load_factors(sch, blocks[-1], row, threads)
    for block in blocks:
        if sch.get(block).init is not None:
            sch.set_scope(block, 0, "shared")
        _spread(sch, block, threads)


def _load_factors(sch: s_tir.Schedule, block: SBlockRV, row: LoopRV, threads: int) -> None:
    """Load gamma, and beta, into registers in front of all else that is done for a row."""
    reads = sch.get(block).reads
    x, last = reads[0].source, reads[0].region[-1].min
    for index, region in enumerate(reads):
        if region.source.same_as(x) or not region.region[-1].min.same_as(last):
            continue
        lanes = gcd(
            int(x.ty.shape[-1]), VECTOR_LOAD_BYTES // DTYPE_BYTES[str(region.source.ty.dtype)]
        )
        copy = sch.cache_read(block, index, "local", [block])
        sch.compute_at(copy, row, preserve_unit_loops=True, index=FIRST)
        turn, thread, lane = sch.split(sch.get_loops(copy)[-1], [None, threads, lanes])
        sch.bind(thread, "threadIdx.x")
        sch.unroll(turn)
        sch.vectorize(lane)


def _spread(sch: s_tir.Schedule, block: SBlockRV, threads: int) -> None:
    """Spread the last loop of a block over the threads, a vector at a time."""
    found = sch.get(block)
    last = found.iter_vars[-1].var
    along = [
        i
        for i, r in enumerate(found.reads)
        if r.region[-1].min.same_as(last) and r.source.scope() == "global"
    ]
    stores = found.init is None
    regions = [*(found.reads[i] for i in along), *(found.writes if stores else ())]
    widest = max(DTYPE_BYTES[str(region.source.ty.dtype)] for region in regions)
    lanes = gcd(int(found.iter_vars[-1].dom.extent), VECTOR_LOAD_BYTES // widest)
    turn, thread, lane = sch.split(sch.get_loops(block)[-1], [None, threads, lanes])
    sch.bind(thread, "threadIdx.x")
    verbs.unroll_all(sch, [turn, lane])
    for index in along:
        verbs.load_wide(sch, block, index, thread)
    if stores:
        verbs.store_wide(sch, block, thread)


Kernel = FewRowsKernel | DequantisedRowsKernel


def few_rows_kernel(
    product: Product, plan: TilePlan, norm: RowNorm | None, dev: DeviceSpec | None
) -> tirx.Stmt:
    """Return the kernel of one product, and of the norm in front of it if one is given.

    Without a device, it runs where a kernel begins behind those in front of it.
    """
    dequantises = product.weight_is_computed
    if isinstance(plan, PackedPlan) and plan.residents:
        assert dev is not None, "so many thread blocks as a device holds"
        return streamed_row_kernel(product, plan, norm, dev)
    height = PackedPlan.of(plan).height if dequantises else plan.block_m
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
        if dequantises:
            own = PackedPlan.of(plan)
            kernel: Kernel = DequantisedRowsKernel(own, product, norm, place, launch)
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
