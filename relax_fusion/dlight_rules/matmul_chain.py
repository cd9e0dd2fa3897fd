"""The dlight rule of what `relax_fusion.compute.matmul_chain` makes."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from ..compute import description
from ..compute.ranges import stitch, unless_empty, unstitch
from ..errors import LoweringError
from ..estimator.families.panels.tiles import FAMILY as PANELS
from ..estimator.families.tensor_cores import tiles as mma
from ..estimator.tile_plan import TilePlan
from ..hardware.target import is_gpu
from ..workload import MatmulChain
from .cpu.contraction import schedule_cpu
from .cpu.matmul_chain import schedule_blocks
from .safe_rule import SafeRule
from .steps import projections
from .tensor_cores.chain import with_mma_chain


class MatmulChainRule(SafeRule):
    """Schedule the PrimFunc of a chain of two matmuls from the plans that it carries.

    rewrite (family "panels")::

        for i, j, k: acc0                ->    for block of rows in parallel:
        for i, j: out0                             for tile: acc0 in registers; out0
        for i, j, k: acc1                          for tile: acc1 in registers; out1
        for i, j: out1

    Other plans, for few rows, schedule one matmul after the other, over columns in parallel.

    On a GPU, a thread block takes a tile of rows through both on tensor cores.

    declines when: a plan for a CPU was given to a GPU, or the other way round.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the scheduled function, or None where it is not this rule's."""
        described = description(func)
        if described is None or not isinstance(described[0], MatmulChain):
            return None
        table = described[1]
        if any((plan.family == mma.FAMILY) != is_gpu(target) for _, plan in table.entries):
            raise LoweringError(f"matmul chain: a plan is not for {target}")
        bodies = unstitch(func, len(table.entries))
        variants = [
            (upper, _scheduled(body, described[0], plan))
            for (upper, plan), body in zip(table.entries, bodies, strict=True)
        ]
        *lead, rows, _ = func.params[0].ty.shape
        whole = stitch(variants, rows)
        if is_gpu(target):
            whole = unless_empty(whole, lead[0] * rows if lead else rows)
        return s_tir.Schedule(whole)


def _scheduled(func: tirx.PrimFunc, work: MatmulChain, plan: TilePlan) -> tirx.PrimFunc:
    if plan.family == mma.FAMILY:
        return with_mma_chain(func, work, plan)
    sch = s_tir.Schedule(func)
    if plan.family == PANELS:
        return schedule_blocks(sch, work, plan)
    return schedule_cpu(sch, projections(sch), plan)
