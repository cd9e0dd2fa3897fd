"""The schedules of a contraction on a GPU: tiles for many rows, dot products for few.

Of dot products, read as a matrix, a thread block is ``y`` columns by ``x`` threads along k.
Neighbouring threads read neighbouring vectors of `lanes` weights, so that a warp reads whole lines;
each thread keeps a partial sum for `reg_n` columns, and the partial sums of a column's threads are
added by shuffles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from ..compute import contraction_prim_func
from ..estimator.families.dot_products import stages_norm
from ..estimator.families.matmuls import DOT_PRODUCTS
from ..estimator.limits import VECTOR_LOAD_BYTES
from ..estimator.shape import matmul_shape
from ..estimator.tile_plan import TilePlan
from ..hardware.target import device_of
from ..tvm_ir import SBlockRV
from ..workload import DTYPE_BYTES, GatedFFN, NormMatmul
from . import verbs


def threads_of(plan: TilePlan, warp: int) -> tuple[int, int]:
    """Return the threads of a block: along columns, and along k."""
    columns = plan.block_n // plan.reg_n
    return columns, plan.num_warps * warp // columns


def spread_over_block(sch: s_tir.Schedule, block: SBlockRV, plan: TilePlan, warp: int) -> None:
    """Spread the last loop over all threads, each taking vectors of `lanes` elements in turn.

    Where it is a reduction, TVM adds up what the threads have.

    rewrite::

        for r in k: s += f(r)    ->    for o: bind y: bind x: for l in lanes: s += f(o, y, x, l)
    """
    vectors, lane = sch.split(sch.get_loops(block)[-1], [None, plan.lanes])
    _, y, x = sch.split(vectors, [None, *threads_of(plan, warp)])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    sch.unroll(lane)


def dot_products(
    sch: s_tir.Schedule, acc: SBlockRV, out: SBlockRV, plan: TilePlan, warp: int
) -> tuple[LoopRV, SBlockRV]:
    """Schedule one projection.

    Returns the loop of a thread block, for what its threads share; and the partial sums, whose
    reduction `finish` splits from its start.
    """
    y, x = threads_of(plan, warp)
    partial = _partial_sums(sch, acc, plan, x)
    i, j, *inner = sch.get_loops(out)
    verbs.unroll_all(sch, inner)
    block_j, thread_j, reg_j = sch.split(j, [None, y, plan.reg_n])
    sch.reorder(block_j, i, thread_j, reg_j)
    sch.bind(block_j, "blockIdx.x")
    sch.bind(i, "blockIdx.y")
    sch.bind(thread_j, "threadIdx.y")
    for block in (acc, partial):
        sch.compute_at(block, thread_j, preserve_unit_loops=True)
        sch.set_scope(block, 0, "local")
    thread, *tile = sch.get_loops(acc)[-4:]
    sch.reorder(*tile, thread)
    sch.bind(thread, "threadIdx.x")
    _one_thread(sch, out, x)
    return i, partial


def _partial_sums(sch: s_tir.Schedule, acc: SBlockRV, plan: TilePlan, x: int) -> SBlockRV:
    """Give every thread along k its own sums."""
    k = sch.get_loops(acc)[-1]
    vectors, _ = sch.split(k, [None, plan.lanes])
    _, _, thread = sch.split(vectors, [None, max(1, plan.block_k // (x * plan.lanes)), x])
    return sch.rfactor(thread, 0)


def _one_thread(sch: s_tir.Schedule, out: SBlockRV, x: int) -> None:
    """Let the first of the ``x`` threads that know a result store it."""
    unit = sch.add_unit_loop(out)
    _, thread = sch.split(unit, [None, x])
    sch.bind(thread, "threadIdx.x")


def finish(sch: s_tir.Schedule, partial: SBlockRV) -> None:
    """Load the operands of the partial sums in vectors, unroll a step, and start sums at zero."""
    thread, p, i, j, k_outer, k_step, lane = sch.get_loops(partial)[-7:]
    sch.reorder(thread, k_outer, k_step, p, i, j, lane)
    sch.bind(thread, "threadIdx.x")
    # Row by row of the weight, as a gate and an up can be far apart; x once for all of them.
    for index, loop in ((1, j), (0, k_step)):
        _load_vectors(sch, sch.cache_read(partial, index, "local", [partial]), loop)
    verbs.unroll_all(sch, [k_step, p, i, j, lane])
    sch.decompose_reduction(partial, k_outer)


def _load_vectors(sch: s_tir.Schedule, copy: SBlockRV, loop: LoopRV) -> None:
    """Copy what one iteration of `loop` reads, with the widest loads there are.

    rewrite::

        for a, l in (1, 16): S    ->    unrolled a, l in 2: vector l in 8: S
    """
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    loops = verbs.loops_below(sch, copy, loop)
    element = DTYPE_BYTES[str(sch.get(copy).writes[0].source.ty.dtype)]
    lanes = verbs.extent(sch, loops[-1]) or 1
    outer, inner = sch.split(loops[-1], [None, min(lanes, VECTOR_LOAD_BYTES // element)])
    sch.vectorize(inner)
    verbs.unroll_all(sch, [*loops[:-1], outer])


Threads = tuple[int, int]

COMPUTED_LANES = 4
"""Most elements of a vector that a GPU computes, rather than loads: TVM 0.27 has none of eight."""


def emit(work: NormMatmul | GatedFFN, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernels of a plan for scalar instructions."""
    if matmul_shape(work).unpacked_bytes:
        plan = replace(plan, lanes=min(plan.lanes, COMPUTED_LANES))
    return schedule_gpu(contraction_prim_func(work, plan, gpu=True), plan, target)


def schedule_gpu(func: tirx.PrimFunc, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Schedule every stage of a contraction.

    Dot products of a single projection normalise their row in each of its thread blocks.
    Everything else is preceded by a kernel that normalises all rows once: in a tile, TVM orders the
    statistics of a row and their readers only where the two use different threads.

    With ``block_m`` 1 and weights in ``[n, k]``, dot products (a GEMV): the ``num_warps`` warps of
    a block are ``block_n / reg_n`` groups, each group shares ``reg_n`` columns, its threads lie
    along k and load vectors of ``lanes`` weights, and a group takes ``block_k`` elements of k in
    one unrolled step.  Else thread blocks of ``block_m x block_n`` outputs with both operands
    staged in shared memory, ``block_k`` at a time.
    """
    sch = s_tir.Schedule(func)
    projections = verbs.projections(sch)
    names = verbs.block_names(sch.mod["main"])
    statistics = [sch.get_sblock(n) for n in ("mean_sum", "square_sum") if n in names]
    dev = device_of(target)
    warp = dev.warp_size
    dots = plan.family == DOT_PRODUCTS
    in_block = dots and len(projections) == 1 and "norm_out" not in names
    if in_block and statistics:
        k = sch.get(sch.get_sblock("x_norm")).writes[0].source.ty.shape[-1]
        in_block = stages_norm(int(k), dev)
    threads = plan.num_warps * warp
    if "first_square_sum" in names:
        _rows_kernel(sch, [sch.get_sblock("first_square_sum")], [sch.get_sblock("x_sum")], threads)
    elif "x_sum" in names:
        verbs.element_wise_kernel(sch, sch.get_sblock("x_sum"), threads)
    if not in_block and statistics:
        _norm_kernel(sch, statistics, names, threads)
    fused = [sch.get_sblock("x_norm"), *statistics] if in_block and statistics else []
    for blocks in projections:
        if dots:
            _dots(sch, blocks, fused, plan, warp)
        else:
            _tile(sch, blocks, plan, dev.smem_per_block_bytes > 0)
    sch.compute_inline(sch.get_sblock("x_pad"))
    return sch.mod["main"]


def _norm_kernel(
    sch: s_tir.Schedule, statistics: list[SBlockRV], names: list[str], threads: int
) -> None:
    """Normalise in a kernel of its own."""
    results = [sch.get_sblock(name) for name in ("x_norm", "norm_out") if name in names]
    _rows_kernel(sch, statistics, results, threads)


def _rows_kernel(
    sch: s_tir.Schedule, statistics: list[SBlockRV], results: list[SBlockRV], threads: int
) -> None:
    """Give statistics of rows, and what is made of them, one kernel: one thread block per row."""
    row = sch.get_loops(results[0])[0]
    for block in reversed(statistics):
        sch.compute_at(block, row, preserve_unit_loops=True)
        sch.set_scope(block, 0, "shared")
    for block in results[1:]:
        sch.reverse_compute_at(block, row, preserve_unit_loops=True)
    sch.bind(row, "blockIdx.x")
    for block in [*statistics, *results]:
        _, thread = sch.split(sch.get_loops(block)[-1], [None, threads])
        sch.bind(thread, "threadIdx.x")


def _dots(
    sch: s_tir.Schedule,
    blocks: tuple[SBlockRV, SBlockRV],
    fused: list[SBlockRV],
    plan: TilePlan,
    warp: int,
) -> None:
    """Schedule one projection as dot products, with the norm of a row in shared memory."""
    row, partial = dot_products(sch, *blocks, plan, warp)
    for block in [*fused[:1], *reversed(fused[1:])]:  # the rows, then the last of the statistics
        sch.compute_at(block, row, preserve_unit_loops=True)
        sch.set_scope(block, 0, "shared")
        spread_over_block(sch, block, plan, warp)
    finish(sch, partial)
    _inline_parts(sch, blocks[0])


def _inline_parts(sch: s_tir.Schedule, acc: SBlockRV) -> None:
    """Dissolve the stacked parts of a weight into the copies of their tiles."""
    name = sch.get(acc).name_hint.replace("acc", "w_parts")
    if name in verbs.block_names(sch.mod["main"]):
        sch.compute_inline(sch.get_sblock(name))


def _tile(
    sch: s_tir.Schedule, blocks: tuple[SBlockRV, SBlockRV], plan: TilePlan, staged: bool
) -> None:
    """Tile one projection over thread blocks, with both operands in shared memory if `staged`.

    Neighbouring blocks share their columns, and so their tile of the weight in L2.  The columns of
    a thread lie as far apart as there are threads: with the rows of a staged tile one word longer
    than they need to be, the threads of a warp then read from different banks.
    """
    acc, out = blocks
    threads = plan.block_m // plan.reg_m, plan.block_n // plan.reg_n
    i, j, *inner = sch.get_loops(out)
    block_i, thread_i, reg_i = sch.split(i, [None, threads[0], plan.reg_m])
    block_j, reg_j, thread_j = sch.split(j, [None, plan.reg_n, threads[1]])
    sch.reorder(block_i, block_j, reg_j, thread_i, thread_j, reg_i)
    axes = ("blockIdx.x", "blockIdx.y", "vthread.x", "threadIdx.y", "threadIdx.x")
    for loop, axis in zip((block_i, block_j, reg_j, thread_i, thread_j), axes, strict=True):
        sch.bind(loop, axis)
    sch.compute_at(acc, thread_j, preserve_unit_loops=True)
    sch.set_scope(acc, 0, "local")
    p, ai, aj, k = sch.get_loops(acc)[-4:]
    k_outer, k_inner = sch.split(k, [None, plan.block_k])
    sch.reorder(k_outer, k_inner, p, ai, aj)
    verbs.unroll_all(sch, [p, ai, aj, reg_i, *inner])
    if staged:
        _stage(sch, acc, k_outer, plan)
    else:
        _inline_parts(sch, acc)
    sch.decompose_reduction(acc, k_outer)


def _stage(sch: s_tir.Schedule, acc: SBlockRV, k_outer: LoopRV, plan: TilePlan) -> None:
    """Let all threads of a block bring a step of both operands into shared memory.

    rewrite: ``for ko: acc += x[ko] * w[ko]`` -> ``for ko: xs = x[ko]; ws = w[ko]; acc += xs * ws``
    """
    threads = plan.block_m // plan.reg_m, plan.block_n // plan.reg_n
    copies = [sch.cache_read(acc, index, "shared", [acc]) for index in (0, 1)]
    for block in copies:
        sch.compute_at(block, k_outer, preserve_unit_loops=True)
    _inline_parts(sch, acc)
    # Only now: where threads outnumber a tile's elements, its rows would seem to be more.
    x_fits = plan.block_m * plan.block_k % (threads[0] * threads[1]) == 0
    for block, fits in zip(copies, (x_fits, True), strict=True):
        _pad_rows(sch, block)
        loops = verbs.loops_below(sch, block, k_outer)
        if fits:
            verbs.bind_flat(sch, loops, threads)
        else:  # TVM sizes the tile by its indices, which must not mix rows and k under a condition
            _bind_each(sch, loops[-2:], threads)


def _pad_rows(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Lengthen the rows of a staged tile by one word of shared memory, so that they shift banks.

    rewrite: ``shared[row * k + c]`` -> ``shared[row * (k + pad) + c]``
    """
    buffer = sch.get(block).writes[0].source.ty
    word = 4 // DTYPE_BYTES[str(buffer.dtype)]
    sch.storage_align(block, 0, len(buffer.shape) - 2, 2 * word, word)  # an odd number of words


def _bind_each(sch: s_tir.Schedule, loops: Sequence[LoopRV], threads: Threads) -> None:
    """Spread two loops over the threads, the outer over ``threadIdx.y``, the inner over x."""
    for loop, count, axis in zip(loops, threads, "yx", strict=True):
        _, thread = sch.split(loop, [None, count])
        sch.bind(thread, f"threadIdx.{axis}")
