"""What each workload computes, as unscheduled PrimFuncs."""

from __future__ import annotations

from tvm import tirx

from ..errors import RelaxFusionError
from ..estimator.tile_plan import PLAN_ATTR, PlanTable
from ..workload import Attention, MatmulChain, Workload
from ..workload.json import WORKLOAD_ATTR, from_json
from .attention import attention_prim_func
from .contraction import contraction_prim_func
from .matmul_chain import matmul_chain_prim_func

__all__ = [
    "attention_prim_func",
    "build_prim_func",
    "contraction_prim_func",
    "description",
    "matmul_chain_prim_func",
]


def build_prim_func(work: Workload, table: PlanTable, *, gpu: bool) -> tirx.PrimFunc:
    """Build the PrimFunc of any workload, with `table` as its plan attribute.

    `gpu` tells which schedule it will get: the edges of its tiles are filled differently.
    """
    if isinstance(work, Attention):
        return attention_prim_func(work, table)
    if isinstance(work, MatmulChain):
        return matmul_chain_prim_func(work, table)
    return contraction_prim_func(work, table, "zero" if gpu else "clamp")


def description(func: object) -> tuple[Workload, PlanTable] | None:
    """Return what a PrimFunc made here computes, and its plans; None for any other function."""
    attrs = func.attrs if isinstance(func, tirx.PrimFunc) else None
    if attrs is None or WORKLOAD_ATTR not in attrs or PLAN_ATTR not in attrs:
        return None
    try:
        return from_json(str(attrs[WORKLOAD_ATTR])), PlanTable.from_attr(attrs[PLAN_ATTR])
    except RelaxFusionError:  # somebody else's, of these names
        return None
