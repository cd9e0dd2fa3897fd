"""What each workload computes, as unscheduled PrimFuncs."""

from __future__ import annotations

from tvm import tirx

from ..errors import RelaxFusionError
from ..estimator.registry import table_of
from ..estimator.tile_plan import PLAN_ATTR, PlanTable
from ..workload import Workload
from ..workload.json import WORKLOAD_ATTR, from_json
from .attention import attention_prim_func
from .contraction import contraction_prim_func
from .reference import build_prim_func, dims_of, reference_prim_func, within

__all__ = [
    "attention_prim_func",
    "build_prim_func",
    "contraction_prim_func",
    "description",
    "dims_of",
    "reference_prim_func",
    "within",
]


def description(func: object) -> tuple[Workload, PlanTable] | None:
    """Return what a PrimFunc of a fused chain computes, and its plans; None for any other."""
    attrs = func.attrs if isinstance(func, tirx.PrimFunc) else None
    if attrs is None or WORKLOAD_ATTR not in attrs or PLAN_ATTR not in attrs:
        return None
    try:
        return from_json(str(attrs[WORKLOAD_ATTR])), table_of(attrs[PLAN_ATTR])
    except RelaxFusionError:  # somebody else's, of these names
        return None
