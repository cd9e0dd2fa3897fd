"""The CPU schedule of a chain of two matmuls whose intermediate stays in a core's cache."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from ...compute import matmul_chain_prim_func
from ...estimator.families.cpu_chain import PANELS, panel_columns, sum_parts
from ...estimator.tile_plan import TilePlan
from ...tvm_ir import SBlockRV
from ...workload import MatmulChain
from .. import steps
from .contraction import schedule_cpu
from .panels import vectorised


def emit(work: MatmulChain, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan: in blocks of rows, or one matmul after the other for few."""
    func = matmul_chain_prim_func(work, plan)
    return schedule_blocks(func, work, plan) if plan.family == PANELS else schedule_cpu(func, plan)


def schedule_blocks(func: tirx.PrimFunc, work: MatmulChain, plan: TilePlan) -> tirx.PrimFunc:
    """Pack both weights, then take blocks of rows through both matmuls.

    rewrite::

        for p, r, j: w_panels0, 1        ->    for p in parallel: r, j: w_panels0, 1
        for i, j, k: acc0                      for block of rows in parallel:
        for i, j: out0                             x_wide
        for i, j, k: acc1                          for panel, tile: acc0; out0
        for i, j: out1                             for panel, tile: acc1; out1
    """
    sch = s_tir.Schedule(func)
    names = steps.block_names(func)
    panels = [sch.get_sblock(n) for n in ("w_panels0", "w_panels1") if n in names]
    for packed in panels:
        panel, depth, _ = sch.get_loops(packed)
        parts = sum_parts(plan, steps.extent(sch, depth) or 1)
        part, _ = sch.split(depth, [parts, None])
        sch.parallel(sch.fuse(panel, part))
    (acc0, out0), (acc1, out1) = steps.projections(sch)
    *batch, i, j = sch.get_loops(out1)
    block, i = sch.split(i, [None, plan.block_m])
    sch.reorder(block, i, j)
    task = sch.fuse(*batch, block) if batch else block
    sch.parallel(task)
    sums = [_tiled(sch, (acc1, out1), (i, j), (plan, panel_columns(plan, work, 1)))]
    sch.compute_at(out0, task, preserve_unit_loops=True)
    i, j = sch.get_loops(out0)[-2:]
    sums.append(_tiled(sch, (acc0, out0), (i, j), (plan, panel_columns(plan, work, 0))))
    if "x_wide" in names:
        wide = sch.get_sblock("x_wide")
        sch.compute_at(wide, task, preserve_unit_loops=True)
        k = sch.get_loops(wide)[-1]
        steps.vectorise_inner(sch, k, math.gcd(steps.extent(sch, k) or 1, plan.lanes))
    return vectorised(sch, panels, sums, plan.lanes)


def _tiled(
    sch: s_tir.Schedule,
    blocks: tuple[SBlockRV, SBlockRV],
    loops: tuple[LoopRV, LoopRV],
    tile: tuple[TilePlan, int],
) -> tuple[SBlockRV, SBlockRV | None]:
    """Walk the rows of a block in register tiles, for one panel of columns after the other.

    rewrite::

        for i, j, k: acc                 ->    for panel, tile:
        for i, j: out                              for k_part, i, j, k: partial
                                                   for i, j, k_part: acc += partial
                                                   for i: vectors j: out

    Returns
    -------
    tuple of SBlockRV and SBlockRV or None
        The sums, and the sums over parts of the reduction, where it is cut into such.
    """
    (acc, _), (plan, width) = blocks, tile
    partial = None
    if sum_parts(plan, steps.extent(sch, sch.get_loops(acc)[-1]) or 1) > 1:
        part, _ = sch.split(sch.get_loops(acc)[-1], [None, plan.block_k])
        partial = sch.rfactor(part, 0)
    row, i_reg = sch.split(loops[0], [None, plan.reg_m])
    panel, j_reg = sch.split(loops[1], [None, width])
    sch.reorder(panel, row, i_reg, j_reg)
    sch.compute_at(acc, row, preserve_unit_loops=True)
    if partial is not None:
        sch.compute_at(partial, row, preserve_unit_loops=True)
    sch.unroll(i_reg)
    sch.unroll(steps.vectorise_inner(sch, j_reg, plan.lanes))
    return acc, partial
