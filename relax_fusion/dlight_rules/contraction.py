"""Schedules of norm -> matmul(s) -> epilogue and of the gated pair, by the plan they carry."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from ..compute.contraction import FAMILY, WORKLOAD_ATTR
from ..compute.ranges import stitch, unstitch
from ..target import is_gpu
from ..tile_plan import PLAN_ATTR, PlanTable, TilePlan
from . import steps

_PROLOGUE = ("x_sum", "mean_sum", "square_sum", "x_norm", "norm_out")


class ContractionRule(ScheduleRule):
    """Schedule the PrimFuncs of `relax_fusion.compute.contraction`; leave every other one.

    On a CPU: a parallel loop normalises the rows; then, for each projection, panels of ``block_n``
    columns run in parallel.  In each, ``block_m`` rows stay in cache while the panel passes over
    them in register tiles of ``reg_m x reg_n`` accumulators.  Weights in ``[n, k]`` become dot products with one partial sum per lane, so that
    neither operand has to be repacked; weights in ``[k, n]`` are vectorised along n.

    On a GPU: thread blocks of ``block_m x block_n`` outputs with both operands staged in shared
    memory, ``block_k`` at a time, and the row statistics recomputed by each block.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Return the schedule, or None if the function is not of this family."""
        if func.attrs.get(WORKLOAD_ATTR) != FAMILY or PLAN_ATTR not in func.attrs:
            return None
        table = PlanTable.from_attr(func.attrs[PLAN_ATTR])
        schedule = _schedule_gpu if is_gpu(target) else _schedule_cpu
        bodies = unstitch(func, len(table.entries))
        variants = [
            (upper, schedule(body, plan))
            for (upper, plan), body in zip(table.entries, bodies, strict=True)
        ]
        if len(variants) == 1:
            return s_tir.Schedule(variants[0][1])
        return s_tir.Schedule(stitch(variants, func.params[0].ty.shape[0]))


def _projections(sch: s_tir.Schedule, names: list[str]) -> list[tuple[SBlockRV, SBlockRV]]:
    """Return the (accumulation, epilogue) blocks of every projection."""
    count = sum(name.startswith("acc") for name in names)
    return [(sch.get_sblock(f"acc{i}"), sch.get_sblock(f"out{i}")) for i in range(count)]


# --- CPU -------------------------------------------------------------------------------------


def _schedule_cpu(func: tirx.PrimFunc, plan: TilePlan) -> tirx.PrimFunc:
    sch = s_tir.Schedule(func)
    names = steps.block_names(func)
    present = [sch.get_sblock(n) for n in _PROLOGUE if n in names]
    if present:
        _rows_cpu(sch, present, plan)
    for acc, out in _projections(sch, names):
        _panel_cpu(sch, acc, out, plan)
    return sch.mod["main"]


def _rows_cpu(sch: s_tir.Schedule, blocks: list[SBlockRV], plan: TilePlan) -> None:
    """Normalise rows in parallel, each with vectorised partial sums."""
    ordered: list[SBlockRV] = []
    partials: list[SBlockRV] = []
    for block in blocks:
        if _is_reduction(sch, block) and plan.lanes > 1:
            partials.append(steps.split_lanes(sch, block, plan.lanes))
            ordered.append(partials[-1])
        ordered.append(block)
    row = sch.get_loops(ordered[0])[0]
    steps.chain_rows(sch, ordered[1:], row)
    sch.parallel(row)  # before reductions are decomposed: their halves alone are no valid blocks
    for block in ordered:
        loops = sch.get_loops(block)[1:]
        if block in partials:
            # A moved block has its loops in the order of its block variables: lanes first.
            outer, lane = loops if block is ordered[0] else (loops[-1], loops[0])
            sch.reorder(outer, lane)
            sch.set_scope(block, 0, "local")
            sch.vectorize(lane)
            sch.decompose_reduction(block, outer)
        elif not _is_reduction(sch, block):
            steps.vectorise_inner(sch, loops[-1], plan.lanes)


def _is_reduction(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    return sch.get(block).init is not None


def _panel_cpu(sch: s_tir.Schedule, acc: SBlockRV, out: SBlockRV, plan: TilePlan) -> None:
    """Tile one projection into panels of columns and register tiles."""
    dot = _is_dot(sch, acc)
    lanes = plan.lanes
    partial = steps.split_lanes(sch, acc, lanes) if dot and lanes > 1 else acc
    i, j = sch.get_loops(out)
    i_block, i_tile, i_reg = sch.split(i, [None, plan.block_m // plan.reg_m, plan.reg_m])
    panel, j_tile, j_reg = sch.split(j, [None, plan.block_n // plan.reg_n, plan.reg_n])
    sch.reorder(panel, i_block, j_tile, i_tile, i_reg, j_reg)
    sch.parallel(panel)
    sch.compute_at(acc, i_tile, preserve_unit_loops=True)
    if partial is not acc:
        sch.compute_at(partial, i_tile, preserve_unit_loops=True)
        _register_tile(sch, partial, reduced_last=True)
        steps.unroll_all(sch, sch.get_loops(acc)[-4:])
    else:
        _register_tile(sch, acc, reduced_last=False, lanes=lanes)
    sch.unroll(i_reg)
    steps.unroll_all(sch, [j_reg])


def _is_dot(sch: s_tir.Schedule, acc: SBlockRV) -> bool:
    """Tell whether the weight is contiguous along the reduction (``[n, k]``)."""
    block = sch.get(acc)
    reduced = block.iter_vars[-1].var
    weight = block.reads[-1].region
    return weight[-1].min.same_as(reduced)


def _register_tile(
    sch: s_tir.Schedule, block: SBlockRV, reduced_last: bool, lanes: int = 1
) -> None:
    """Keep a tile of accumulators in vector registers over the whole reduction.

    rewrite: ``for l, p, i, j, k: acc += x * w`` -> ``init; for k: unrolled p, i, j: vector l:``
    """
    if reduced_last:
        lane, p, i, j, k = sch.get_loops(block)[-5:]
        sch.reorder(k, p, i, j, lane)
    else:
        p, i, j, k = sch.get_loops(block)[-4:]
        j, lane = sch.split(j, [None, lanes])
        sch.reorder(k, p, i, j, lane)
    sch.set_scope(block, 0, "local")
    sch.vectorize(lane)
    steps.unroll_all(sch, [p, i, j])
    sch.decompose_reduction(block, k)


# --- GPU -------------------------------------------------------------------------------------


def _schedule_gpu(func: tirx.PrimFunc, plan: TilePlan) -> tirx.PrimFunc:
    sch = s_tir.Schedule(func)
    names = steps.block_names(func)
    projections = _projections(sch, names)
    statistics = [sch.get_sblock(n) for n in ("mean_sum", "square_sum") if n in names]
    in_block = len(projections) == 1 and "norm_out" not in names
    if "x_sum" in names:
        _kernel_gpu(sch, sch.get_sblock("x_sum"), plan)
    pad = sch.get_sblock("x_pad")
    if not in_block and statistics:
        _norm_kernel_gpu(sch, statistics, names, plan)
    accumulate = []
    for acc, out in projections:
        k_outer = _tile_gpu(sch, acc, out, plan)
        if "w_parts" in names:
            sch.compute_inline(sch.get_sblock("w_parts"))
        if in_block and "x_norm" in names:
            sch.compute_inline(sch.get_sblock("x_norm"))
        if in_block:
            _statistics_in_block(sch, statistics, out, plan)
        accumulate.append((acc, k_outer))
    sch.compute_inline(pad)
    for acc, k_outer in accumulate:
        sch.decompose_reduction(acc, k_outer)
    return sch.mod["main"]


def _threads(plan: TilePlan) -> tuple[int, int]:
    return plan.block_m // plan.reg_m, plan.block_n // plan.reg_n


def _kernel_gpu(sch: s_tir.Schedule, block: SBlockRV, plan: TilePlan) -> None:
    """Give an element-wise block a kernel of its own."""
    y, x = _threads(plan)
    fused = sch.fuse(*sch.get_loops(block))
    grid, thread = sch.split(fused, [None, y * x])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")


def _norm_kernel_gpu(
    sch: s_tir.Schedule, statistics: list[SBlockRV], names: list[str], plan: TilePlan
) -> None:
    """Normalise in a kernel of its own: one thread block per row."""
    y, x = _threads(plan)
    x_norm = sch.get_sblock("x_norm")
    row = sch.get_loops(x_norm)[0]
    for block in reversed(statistics):
        sch.compute_at(block, row, preserve_unit_loops=True)
        sch.set_scope(block, 0, "shared")
    if "norm_out" in names:
        sch.reverse_compute_at(sch.get_sblock("norm_out"), row, preserve_unit_loops=True)
    sch.bind(row, "blockIdx.x")
    spread = [*statistics, x_norm]
    spread += [sch.get_sblock("norm_out")] if "norm_out" in names else []
    for block in spread:
        _, thread = sch.split(sch.get_loops(block)[-1], [None, y * x])
        sch.bind(thread, "threadIdx.x")


def _tile_gpu(
    sch: s_tir.Schedule, acc: SBlockRV, out: SBlockRV, plan: TilePlan
) -> LoopRV:
    """Tile one projection over thread blocks, both operands in shared memory, and return its k."""
    y, x = _threads(plan)
    i, j = sch.get_loops(out)
    block_i, thread_i, reg_i = sch.split(i, [None, y, plan.reg_m])
    block_j, thread_j, reg_j = sch.split(j, [None, x, plan.reg_n])
    sch.reorder(block_i, block_j, thread_i, thread_j, reg_i, reg_j)
    sch.bind(block_i, "blockIdx.y")
    sch.bind(block_j, "blockIdx.x")
    sch.bind(thread_i, "threadIdx.y")
    sch.bind(thread_j, "threadIdx.x")
    sch.compute_at(acc, thread_j, preserve_unit_loops=True)
    sch.set_scope(acc, 0, "local")
    p, ai, aj, k = sch.get_loops(acc)[-4:]
    k_outer, k_inner = sch.split(k, [None, plan.block_k])
    sch.reorder(k_outer, k_inner, p, ai, aj)
    for index in range(_operands(sch, acc)):
        staged = sch.cache_read(acc, index, "shared", [acc])
        sch.compute_at(staged, k_outer, preserve_unit_loops=True)
        steps.bind_flat(sch, _loops_below(sch, staged, k_outer), (y, x))
    return k_outer


def _operands(sch: s_tir.Schedule, acc: SBlockRV) -> int:
    """Return how many distinct buffers a reduction reads, its own accumulator left out."""
    block = sch.get(acc)
    written = block.writes[0].source
    return sum(not r.source.same_as(written) for r in block.reads)


def _loops_below(sch: s_tir.Schedule, block: SBlockRV, outer: LoopRV) -> list[LoopRV]:
    """Return the loops of `block` inside `outer`."""
    loops = sch.get_loops(block)
    variables = [sch.get(loop).loop_var for loop in loops]
    position = next(n for n, v in enumerate(variables) if v.same_as(sch.get(outer).loop_var))
    return loops[position + 1 :]


def _statistics_in_block(
    sch: s_tir.Schedule, statistics: list[SBlockRV], out: SBlockRV, plan: TilePlan
) -> None:
    """Compute the row statistics of a tile in its own thread block, in shared memory."""
    y, x = _threads(plan)
    block_j = sch.get_loops(out)[1]
    for block in reversed(statistics):
        sch.compute_at(block, block_j, preserve_unit_loops=True)
        sch.set_scope(block, 0, "shared")
        row, r = sch.get_loops(block)[-2:]
        _, row = sch.split(row, [None, y])
        _, r = sch.split(r, [None, x])
        sch.bind(row, "threadIdx.y")
        sch.bind(r, "threadIdx.x")
