"""The schedule of a contraction of few rows on a GPU: one dot product per column and row.

Read as a matrix, a thread block is ``y`` columns by ``x`` threads along k.  Neighbouring threads
read neighbouring vectors of `lanes` weights, so that a warp reads whole lines; each thread keeps a
partial sum for `reg_n` columns, and the partial sums of a column's threads are added by shuffles.
"""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV

from ..estimator.limits import VECTOR_LOAD_BYTES
from ..estimator.tile_plan import TilePlan
from ..tvm_ir import SBlockRV
from ..workload import DTYPE_BYTES
from . import steps


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

    Returns
    -------
    LoopRV, SBlockRV
        The loop of a thread block, for what its threads share; and the partial sums, whose
        reduction `finish` splits from its start.
    """
    y, x = threads_of(plan, warp)
    partial = _partial_sums(sch, acc, plan, x)
    i, j, *inner = sch.get_loops(out)
    steps.unroll_all(sch, inner)
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
    steps.unroll_all(sch, [k_step, p, i, j, lane])
    sch.decompose_reduction(partial, k_outer)


def _load_vectors(sch: s_tir.Schedule, copy: SBlockRV, loop: LoopRV) -> None:
    """Copy what one iteration of `loop` reads, with the widest loads there are.

    rewrite::

        for a, l in (1, 16): S    ->    unrolled a, l in 2: vector l in 8: S
    """
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    loops = steps.loops_below(sch, copy, loop)
    element = DTYPE_BYTES[str(sch.get(copy).writes[0].source.ty.dtype)]
    lanes = steps.extent(sch, loops[-1]) or 1
    outer, inner = sch.split(loops[-1], [None, min(lanes, VECTOR_LOAD_BYTES // element)])
    sch.vectorize(inner)
    steps.unroll_all(sch, [*loops[:-1], outer])
