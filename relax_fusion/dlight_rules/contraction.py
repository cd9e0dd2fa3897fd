"""Schedules of norm -> matmul(s) -> epilogue and of the gated pair, by the plan they carry."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from ..compute import description
from ..compute.ranges import stitch, unless_empty, unstitch
from ..estimator.tile_plan import TilePlan
from ..hardware.target import is_gpu
from ..workload import GatedFFN, NormMatmul
from .contraction_gpu import schedule_gpu
from .cpu.contraction import schedule_cpu
from .safe_rule import SafeRule
from .steps import projections
from .tensor_cores.dependent import launched_early


class ContractionRule(SafeRule):
    """Schedule the PrimFuncs of `relax_fusion.compute.contraction`; leave every other one.

    On a CPU: a parallel loop normalises the rows; then, for each projection, blocks of ``block_n``
    columns run in parallel, in register tiles of ``reg_m x reg_n`` results.  Few rows take the
    weights as they lie: in ``[n, k]`` by dot products with one partial sum per lane, in ``[k, n]``
    in vectors along n.  Many rows (family "panels") take columns that were packed for them.

    On a GPU: a kernel that normalises the rows, and thread blocks of ``block_m x block_n`` outputs
    with both operands staged in shared memory, ``block_k`` at a time.  Plans that name a family are
    for tensor cores (`tensor_cores`).  With ``block_m`` 1 and weights in ``[n, k]``, dot
    products instead (a GEMV): the ``num_warps`` warps of a block are ``block_n / reg_n`` groups,
    each group shares ``reg_n`` columns, its threads lie along k and load vectors of ``lanes``
    weights, and a group takes ``block_k`` elements of k in one unrolled step.

    Parameters
    ----------
    rows_may_be_none : bool
        Whether a function for dynamic rows does nothing without any; else the caller sees to it.
    """

    def __init__(self, rows_may_be_none: bool = True) -> None:
        self.rows_may_be_none = rows_may_be_none

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the schedule, or None if the function is not of this family or not for TIR."""
        described = description(func)
        if described is None or not isinstance(described[0], NormMatmul | GatedFFN):
            return None
        table = described[1]
        if any(plan.backend != "tir" for _, plan in table.entries):
            return None
        bodies = unstitch(func, len(table.entries))
        variants = [
            (upper, _schedule(body, plan, target))
            for (upper, plan), body in zip(table.entries, bodies, strict=True)
        ]
        guarded = is_gpu(target) and self.rows_may_be_none
        if len(variants) == 1 and not guarded:
            return s_tir.Schedule(launched_early(variants[0][1]))
        rows = func.params[0].ty.shape[0]
        whole = stitch(variants, rows) if len(variants) > 1 else variants[0][1]
        whole = launched_early(whole)
        return s_tir.Schedule(unless_empty(whole, rows) if guarded else whole)


def _schedule(func: tirx.PrimFunc, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    sch = s_tir.Schedule(func)
    if is_gpu(target):
        return schedule_gpu(sch, projections(sch), plan, target)
    return schedule_cpu(sch, projections(sch), plan)
