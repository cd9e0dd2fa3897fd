"""The dlight rule of what `relax_fusion.compute.attention` makes."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from ..compute import description
from ..compute.attention import range_suffix
from ..compute.attention_tile import WARP
from ..errors import LoweringError
from ..estimator.families.tensor_cores import tiles as mma
from ..estimator.tile_plan import TilePlan
from ..hardware.target import device_of, is_gpu
from ..workload import Attention
from . import attention_steps as step
from .safe_rule import SafeRule
from .steps import block_names
from .tensor_cores.attention import with_mma_attention

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


class AttentionRule(SafeRule):
    """Schedule an attention PrimFunc of this library from the plans that it carries.

    rewrite (CPU)::

        for b, h, t in T.grid(...):      ->    for bht in T.parallel(...):
            tile                                   tile, inner loops vectorised by `lanes`

    rewrite (GPU)::

        for b, h, t in T.grid(...):      ->    for h, (b, t) in blockIdx.y, x:
            tile                                   tile, each block spread over threadIdx.x;
                                                   scratch shared, results in registers

    Plans of family "mma" become kernels for tensor cores (`with_mma_attention`).

    declines when: a plan asks for threads on a CPU, has none on a GPU, or more than the target
    allows; the function is not what `relax_fusion.compute.attention` makes of its workload.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the scheduled function, or None where it is not this rule's."""
        described = description(func)
        if described is None or not isinstance(described[0], Attention):
            return None
        sch = s_tir.Schedule(func, enable_check=False)
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
        tiles = {sch.get(block).name_hint for block in blocks}
        names = set(block_names(func))
        for index, (_, plan) in enumerate(described[1].entries):
            suffix = range_suffix(index)
            if "tile" + suffix not in tiles or plan.family == mma.FAMILY:
                continue
            missing = [n for n in (*REGISTER_TILES, *VECTORS) if n + suffix not in names]
            if missing:
                raise LoweringError(f"attention: block {missing[0] + suffix!r} is missing")
            if is_gpu(target):
                _schedule_gpu(sch, plan, suffix, device_of(target).max_threads_per_block)
            else:
                _schedule_cpu(sch, plan, suffix)
        func = with_mma_attention(sch.mod["main"], described[0], described[1])
        return sch if func.same_as(sch.mod["main"]) else s_tir.Schedule(func)


def _schedule_cpu(sch: s_tir.Schedule, plan: TilePlan, suffix: str) -> None:
    """Run the tiles in parallel, and what is inside of them on vectors."""
    if plan.num_warps:
        raise LoweringError(f"attention: a plan of {plan.num_warps} warps was given to a CPU")
    step.parallel_tiles(sch, sch.get_sblock("tile" + suffix))
    there = block_names(sch.mod["main"])
    optional = [name for name in (*SOMETIMES, *FOLDS) if name + suffix in there]
    for name in (*VECTORS, *optional):
        step.vectorise_inner(sch, sch.get_sblock(name + suffix), plan.lanes)
    for name in REGISTER_TILES:
        step.register_tile(sch, sch.get_sblock(name + suffix), plan.lanes)


def _schedule_gpu(sch: s_tir.Schedule, plan: TilePlan, suffix: str, limit: int) -> None:
    """Make a thread block of each tile, with its scratch in shared memory."""
    threads = plan.num_warps * WARP
    if not 0 < threads <= limit:
        raise LoweringError(
            f"attention: a plan of {plan.num_warps} warps of {WARP} threads was given to a GPU, "
            f"which runs 1 to {limit} threads in a block"
        )
    step.block_per_tile(sch, sch.get_sblock("tile" + suffix))
    for name in SHARED:
        step.set_scope(sch, sch.get_sblock(name + suffix), "shared")
    for name in SPREAD:
        step.spread_over_threads(sch, sch.get_sblock(name + suffix), threads)
    for name in OWNED:
        step.bind_owners(sch, sch.get_sblock(name + suffix))
    step.set_scope(sch, sch.get_sblock("acc_init" + suffix), "local")
    step.skew_rows(sch, sch.get_sblock("exp" + suffix))
    for name in REGISTER_TILES:
        step.register_tile(sch, sch.get_sblock(name + suffix), lanes=1)
