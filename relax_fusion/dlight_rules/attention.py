"""Schedules of attention by scalar instructions, on CPUs and GPUs."""

from __future__ import annotations

from math import gcd

from tvm import s_tir, tirx
from tvm.target import Target

from ..compute import attention_prim_func
from ..compute.attention_tile import WARP
from ..errors import LoweringError
from ..estimator.tile_plan import TilePlan
from ..hardware.target import device_of, is_gpu
from ..workload import Attention
from . import attention_steps as step
from .steps import block_names, vectorise_inner

REGISTER_TILES = (
    "acc_init",
    "scores_init",
    "scores_dot",
    "scores_store",
    "values_init",
    "values_dot",
    "values_store",
    "store",
)
"""Blocks whose last two loops run over a register tile."""

VECTORS = (
    "q_load",
    "max_init",
    "max_lanes",
    "sum_init",
    "sum_lanes",
    "exp",
)
"""Blocks whose last loop runs over neighbouring elements."""

SOMETIMES = ("k_load", "v_load", "mask", "mask_edge")
"""Such blocks, which are not in every function for a CPU."""

FOLDS = tuple(f"{name}_fold{1 << level}" for name in ("max", "sum", "scores") for level in range(8))
"""Such blocks, as many as partial results can be halved."""

SPREAD = (
    "q_load",
    "row_init",
    "k_load",
    "scores",
    "row_max",
    "exp",
    "row_sum",
    "row_keep",
    "v_load",
    "row_end",
)
"""Blocks whose iterations the threads of a GPU thread block take in turn."""

OWNED = ("acc_init", "values", "store")
"""Blocks over (slot, thread, ...): what a thread keeps to itself."""

SHARED = ("q_load", "k_load", "exp", "row_init", "row_max", "row_sum")
"""Blocks that write, between them, all scratch that the threads of a block share."""


def emit(work: Attention, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan for scalar instructions.

    rewrite (CPU)::

        for b, h, t in T.grid(...):      ->    for bht in T.parallel(...):
            tile                                   tile, inner loops vectorised by `lanes`

    rewrite (GPU)::

        for b, h, t in T.grid(...):      ->    for h, (b, t) in blockIdx.y, x:
            tile                                   tile, each block spread over threadIdx.x;
                                                   scratch shared, results in registers
    """
    sch = s_tir.Schedule(attention_prim_func(work, plan), enable_check=False)
    if is_gpu(target):
        _schedule_gpu(sch, plan, device_of(target).max_threads_per_block)
    else:
        _schedule_cpu(sch, plan)
    return sch.mod["main"]


def _schedule_cpu(sch: s_tir.Schedule, plan: TilePlan) -> None:
    """Run the tiles in parallel, and what is inside of them on vectors."""
    if plan.num_warps:
        raise LoweringError(f"attention: a plan of {plan.num_warps} warps was given to a CPU")
    sch.parallel(step.fuse_all(sch, sch.get_sblock("tile")))
    there = block_names(sch.mod["main"])
    optional = [name for name in (*SOMETIMES, *FOLDS) if name in there]
    for name in (*VECTORS, *optional):
        loop = sch.get_loops(sch.get_sblock(name))[-1]
        vectorise_inner(sch, loop, gcd(int(sch.get(loop).extent), plan.lanes))
    for name in REGISTER_TILES:
        step.register_tile(sch, sch.get_sblock(name), plan.lanes)


def _schedule_gpu(sch: s_tir.Schedule, plan: TilePlan, limit: int) -> None:
    """Make a thread block of each tile, with its scratch in shared memory."""
    threads = plan.num_warps * WARP
    if not 0 < threads <= limit:
        raise LoweringError(
            f"attention: a plan of {plan.num_warps} warps of {WARP} threads was given to a GPU, "
            f"which runs 1 to {limit} threads in a block"
        )
    step.block_per_tile(sch, sch.get_sblock("tile"))
    for name in SHARED:
        step.set_scope(sch, sch.get_sblock(name), "shared")
    for name in SPREAD:
        step.spread_over_threads(sch, sch.get_sblock(name), threads)
    for name in OWNED:
        step.bind_owners(sch, sch.get_sblock(name))
    step.set_scope(sch, sch.get_sblock("acc_init"), "local")
    step.skew_rows(sch, sch.get_sblock("exp"))
    for name in REGISTER_TILES:
        step.register_tile(sch, sch.get_sblock(name), lanes=1)
