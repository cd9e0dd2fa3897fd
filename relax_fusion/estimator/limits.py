"""What a plan may not ask of any device: registers, memory, threads, vectors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..hardware import STATIC_SMEM_BYTES, DeviceSpec
from ..workload import DTYPE_BYTES
from .prediction import Footprint
from .shape import Problem, dtypes_of
from .tile_plan import TilePlan

STACK_LIMIT_BYTES = 1024
"""TVM's LLVM lowering keeps buffers of 1024 bytes at most on the stack (its `kMaxStackAlloca`)."""

VECTOR_LOAD_BYTES = 16
"""A GPU thread loads 16 bytes at once at most (CUDA guide: 1, 2, 4, 8 or 16 bytes)."""

SYSTEM_SMEM_BYTES = 1 << 10
"""The system keeps 1024 bytes of shared memory for itself in each thread block."""

GRID_YZ = 65535
"""A grid has at most 65,535 blocks along its second and its third dimension, on CUDA
(CUDA C++ Programming Guide, table of technical specifications) and, at least, on every Vulkan
device (``maxComputeWorkGroupCount``)."""


def grid_limits(blocks: Mapping[str, int]) -> Iterator[str]:
    """Yield which dimension of a grid would be too long, by what lies along it.

    Kernels have along the first dimension what may be many; these are the others.
    """
    for what, count in blocks.items():
        if count > GRID_YZ:
            yield f"needs {count} blocks along {what}, a launch has at most {GRID_YZ}"


def core_limits(foot: Footprint, plan: TilePlan, dev: DeviceSpec) -> Iterator[str]:
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


def one_stage(plan: TilePlan) -> Iterator[str]:
    """Yield what kernels have not that load, multiply and store, and do so once."""
    if plan.num_stages != 1:
        yield f"num_stages is {plan.num_stages}, backend 'tir' loads in 1 stage"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, backend 'tir' reduces in 1 part"


def block_limits(
    foot: Footprint, plan: TilePlan, problem: Problem[Any], *, is_static: bool = False
) -> Iterator[str]:
    """Yield what `plan` needs and a thread block of `dev` has not.

    `is_static`: whether the kernel declares its shared memory statically.
    """
    dev = problem.dev
    missing = sorted(dtypes_of(problem.work).intersection(dev.missing_dtypes))
    if missing:
        yield f"kernels for the {dev.label} cannot hold {' or '.join(missing)}"
    if foot.smem_bytes > dev.smem_per_block_bytes:
        yield (
            f"needs {foot.smem_bytes} B of shared memory, a block of the {dev.label} has "
            f"{dev.smem_per_block_bytes} B"
        )
    elif foot.smem_bytes > STATIC_SMEM_BYTES and is_static:
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


def vector_loads(plan: TilePlan, dtype: str, extents: Mapping[str, int]) -> Iterator[str]:
    """Yield why loads of ``plan.lanes`` elements do not fit what lies side by side."""
    most = VECTOR_LOAD_BYTES // DTYPE_BYTES[dtype]
    if plan.lanes & (plan.lanes - 1) or plan.lanes > most:
        yield (
            f"lanes is {plan.lanes}, must be a power of two and at most {most}, the {dtype} "
            f"elements of a load of {VECTOR_LOAD_BYTES} B"
        )
    for name, value in extents.items():
        if value % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide {name}={value}"


def tile_extents(plan: TilePlan, layouts: Collection[str]) -> dict[str, int]:
    """Return the sizes of a tile along which weights of these layouts lie."""
    along_k = {"block_k": plan.block_k} if "nk" in layouts else {}
    return along_k | ({"block_n": plan.block_n} if "kn" in layouts else {})
