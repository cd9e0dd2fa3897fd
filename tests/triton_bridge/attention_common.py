"""Attention as the pass that emits Triton kernels sees it."""

from __future__ import annotations

from tvm import ir, relax

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator.families.triton_attention.tiles import padded
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.launch.arguments import is_number
from relax_fusion.workload import Attention

H200 = device("h200")


def plan_of(work: Attention, split_k: int = 1, **fields: int) -> TilePlan:
    """Return a plan of small pointer tiles."""
    block = fields.pop("block_m", 32), fields.pop("block_n", 32), padded(work.head_dim)
    return TilePlan(
        *block, split_k=split_k, num_stages=2, num_warps=4, backend="triton", family="pointer"
    )


def parameters(work: Attention, plan: TilePlan) -> list[ir.Expr]:
    """Return the inputs of the PrimFunc of `work` as the pass sees them."""
    func = build_prim_func(work, PlanTable.single(plan))
    return [
        p if is_number(p) else relax.Var(p.name, relax.TensorType(list(p.ty.shape), p.ty.dtype))
        for p in func.params[:-1]
    ]
