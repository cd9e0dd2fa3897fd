"""What each workload computes, as unscheduled PrimFuncs."""

from __future__ import annotations

from tvm import tirx

from ..tile_plan import PlanTable
from ..workload import Attention, Workload
from .attention import attention_prim_func
from .contraction import contraction_prim_func

__all__ = ["attention_prim_func", "build_prim_func", "contraction_prim_func"]


def build_prim_func(work: Workload, table: PlanTable, *, gpu: bool) -> tirx.PrimFunc:
    """Build the PrimFunc of any workload, with `table` as its plan attribute.

    `gpu` tells which schedule it will get: the edges of its tiles are filled differently.
    """
    if isinstance(work, Attention):
        return attention_prim_func(work, table)
    return contraction_prim_func(work, table, "zero" if gpu else "clamp")
