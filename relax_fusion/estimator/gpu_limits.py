"""What a plan may not ask of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ..hardware import STATIC_SMEM_BYTES, DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention, GatedFFN, MatmulChain, NormMatmul, Workload
from .footprint import VECTOR_LOAD_BYTES, Footprint, is_gemv
from .shape import dtypes_of, matmul_shape


def gpu_limits(foot: Footprint, plan: TilePlan, work: Workload, dev: DeviceSpec) -> Iterator[str]:
    """Yield what `plan` needs and a thread block of `dev` has not."""
    missing = sorted(dtypes_of(work).intersection(dev.missing_dtypes))
    if missing:
        yield f"kernels for the {dev.label} cannot hold {' or '.join(missing)}"
    yield from _block_limits(foot, plan, dev)
    if isinstance(work, MatmulChain):
        return
    yield from _lanes(plan, work)
    if isinstance(work, Attention):
        return
    if work.k == 1:
        # TVM 0.27 mixes index types when it simplifies a bound reduction of one element.
        yield "the reduction has 1 element, backend 'tir' needs 2 on a GPU"
    if is_gemv(plan, matmul_shape(work).layouts):
        yield from _gemv_groups(plan, work.k, dev)


def _block_limits(foot: Footprint, plan: TilePlan, dev: DeviceSpec) -> Iterator[str]:
    if foot.smem_bytes > dev.smem_per_block_bytes:
        yield (
            f"needs {foot.smem_bytes} B of shared memory, a block of the {dev.label} has "
            f"{dev.smem_per_block_bytes} B"
        )
    elif foot.smem_bytes > STATIC_SMEM_BYTES and not plan.family:
        yield (
            f"needs {foot.smem_bytes} B of shared memory, backend 'tir' declares it statically "
            f"and has {STATIC_SMEM_BYTES} B"
        )
    if foot.threads > dev.max_threads_per_block:
        yield (
            f"needs {foot.threads} threads, a block of the {dev.label} has "
            f"{dev.max_threads_per_block}"
        )
    if foot.threads % dev.wave_size:
        yield f"needs {foot.threads} threads, which is no multiple of a warp's {dev.wave_size}"
    if plan.num_warps * dev.warp_size != foot.threads:
        yield (
            f"num_warps is {plan.num_warps}, the tile needs {foot.threads} threads in warps of "
            f"{dev.warp_size}"
        )
    if foot.registers_per_thread > dev.max_registers_per_thread:
        yield (
            f"needs {foot.registers_per_thread} registers per thread, the {dev.label} has "
            f"{dev.max_registers_per_thread}"
        )
    elif foot.registers_per_thread * foot.threads > dev.registers_per_sm:
        yield (
            f"needs {foot.registers_per_thread * foot.threads} registers per block, a "
            f"multiprocessor of the {dev.label} has {dev.registers_per_sm}"
        )


def _lanes(plan: TilePlan, work: NormMatmul | GatedFFN | Attention) -> Iterator[str]:
    most = VECTOR_LOAD_BYTES // DTYPE_BYTES[work.dtype]
    if plan.lanes & (plan.lanes - 1) or plan.lanes > most:
        yield (
            f"lanes is {plan.lanes}, must be a power of two and at most {most}, the {work.dtype} "
            f"elements of a load of {VECTOR_LOAD_BYTES} B"
        )
    if isinstance(work, Attention):
        extents = {"head_dim": work.head_dim, "v_dim": work.v_dim}
    else:
        layouts = matmul_shape(work).layouts
        extents = {"block_k": plan.block_k} if "nk" in layouts else {}
        extents |= {"block_n": plan.block_n} if "kn" in layouts else {}
    for name, value in extents.items():
        if value % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide {name}={value}"


def _gemv_groups(plan: TilePlan, k: int, dev: DeviceSpec) -> Iterator[str]:
    """Check that the threads of a GEMV form groups of whole warps along k."""
    threads, groups = plan.num_warps * dev.warp_size, plan.block_n // plan.reg_n
    if threads % (groups * dev.warp_size):
        yield (
            f"{plan.num_warps} warps do not form {groups} equal groups, one for each "
            f"reg_n={plan.reg_n} of block_n={plan.block_n}"
        )
    elif plan.block_k % (threads // groups * plan.lanes):
        yield (
            f"block_k is {plan.block_k}, no multiple of the {threads // groups * plan.lanes} "
            f"elements that a group of {threads // groups} threads loads at once"
        )
    if k % plan.lanes:
        yield f"lanes is {plan.lanes}, does not divide k={k}"
    elif k % plan.block_k:
        # A last step of fewer elements would multiply registers that were never loaded.
        yield f"block_k is {plan.block_k}, does not divide k={k}"
