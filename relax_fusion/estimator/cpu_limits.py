"""What a plan may not ask of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from ..hardware import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import Attention, MatmulChain, Workload
from .footprint import Footprint
from .panels import FAMILY as PANELS
from .shape import matmul_shape

STACK_LIMIT_BYTES = 1024
"""Largest buffer that TVM's LLVM lowering keeps on the stack (its `kMaxStackAlloca`)."""


def cpu_limits(foot: Footprint, plan: TilePlan, work: Workload, dev: DeviceSpec) -> Iterator[str]:
    """Yield what `plan` needs and a core of `dev` has not."""
    if plan.num_warps:
        yield f"num_warps is {plan.num_warps}, a CPU task has 0"
    if plan.lanes & (plan.lanes - 1) or plan.lanes * 4 > dev.vector_bytes:
        yield (
            f"lanes is {plan.lanes}, must be a power of two and at most {dev.vector_bytes // 4}, "
            f"the float32 elements of a vector of {dev.vector_bytes} B"
        )
    if foot.registers_per_thread > dev.vector_registers:
        yield (
            f"needs {foot.registers_per_thread} vector registers, a core of the {dev.label} has "
            f"{dev.vector_registers}"
        )
    if foot.stack_bytes > STACK_LIMIT_BYTES:
        yield (
            f"needs {foot.stack_bytes} B of accumulators, a stack buffer may have "
            f"{STACK_LIMIT_BYTES} B"
        )
    if isinstance(work, MatmulChain):
        return
    if isinstance(work, Attention):
        if foot.scratch_bytes > dev.l2_bytes:
            yield (
                f"needs {foot.scratch_bytes} B of cache, a core of the {dev.label} has "
                f"{dev.l2_bytes} B of L2"
            )
        for name, value in (("block_n", plan.block_n), ("v_dim", work.v_dim)):
            if value % plan.lanes:
                yield f"lanes is {plan.lanes}, does not divide {name}={value}"
        return
    if plan.family == PANELS:
        return
    if work.k % plan.block_k:
        yield f"block_k is {plan.block_k}, does not divide k={work.k}"
    layouts = matmul_shape(work).layouts
    if "nk" in layouts and plan.block_k % plan.lanes:
        yield f"lanes is {plan.lanes}, does not divide block_k={plan.block_k}"
    if "kn" in layouts and plan.reg_n % plan.lanes:
        yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n}"
