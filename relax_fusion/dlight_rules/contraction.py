"""Schedules of norm -> matmul(s) -> epilogue and of the gated pair, by the plan they carry."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..compute import description
from ..compute.ranges import stitch, unstitch
from ..target import is_gpu
from ..tile_plan import TilePlan
from ..workload import Attention
from . import steps
from .contraction_gpu import is_dot, schedule_gpu
from .total import TotalRule

_PROLOGUE = ("x_sum", "mean_sum", "square_sum", "x_norm", "norm_out")


class ContractionRule(TotalRule):
    """Schedule the PrimFuncs of `relax_fusion.compute.contraction`; leave every other one.

    On a CPU: a parallel loop normalises the rows; then, for each projection, panels of ``block_n``
    columns run in parallel.  In each, ``block_m`` rows stay in cache while the panel passes over
    them in register tiles of ``reg_m x reg_n`` accumulators.  Weights in ``[n, k]`` become dot
    products with one partial sum per lane, so that neither operand has to be repacked; weights in
    ``[k, n]`` are vectorised along n.

    On a GPU: thread blocks of ``block_m x block_n`` outputs with both operands staged in shared
    memory, ``block_k`` at a time, and the row statistics recomputed by each block.  With
    ``block_m`` 1 and weights in ``[n, k]``, dot products instead (a GEMV): the ``num_warps`` warps
    of a block are ``block_n / reg_n`` groups, each group shares ``reg_n`` columns, its threads lie
    along k and load vectors of ``lanes`` weights, and a group takes ``block_k`` elements of k in
    one unrolled step.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the schedule, or None if the function is not of this family or not for TIR."""
        described = description(func)
        if described is None or isinstance(described[0], Attention):
            return None
        table = described[1]
        if any(plan.backend != "tir" for _, plan in table.entries):
            return None
        bodies = unstitch(func, len(table.entries))
        variants = [
            (upper, _schedule(body, plan, target))
            for (upper, plan), body in zip(table.entries, bodies, strict=True)
        ]
        if len(variants) == 1:
            return s_tir.Schedule(variants[0][1])
        return s_tir.Schedule(stitch(variants, func.params[0].ty.shape[0]))


def _schedule(func: tirx.PrimFunc, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    if not is_gpu(target):
        return _schedule_cpu(func, plan)
    sch = s_tir.Schedule(func)
    return schedule_gpu(sch, _projections(sch, steps.block_names(func)), plan, target)


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
        # Only an even split: moving a block under the row loop drops the guard of an uneven one.
        width = steps.extent(sch, sch.get_loops(block)[-1]) or 1
        lanes = math.gcd(width, plan.lanes)
        if _is_reduction(sch, block) and lanes > 1:
            partials.append(steps.split_lanes(sch, block, lanes))
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
    dot = is_dot(sch, acc)
    lanes = plan.lanes
    partial = steps.split_lanes(sch, acc, lanes) if dot and lanes > 1 else acc
    i, j, *inner = sch.get_loops(out)
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
    steps.unroll_all(sch, [j_reg, *inner])


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
