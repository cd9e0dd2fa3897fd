"""What one task of a plan occupies."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ..hardware import STATIC_SMEM_BYTES, DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention, MatmulChain, Workload
from . import chain, mma, mma_attention, mma_chain, skinny
from .panels import FAMILY as PANELS
from .panels import registers as panel_registers
from .prediction import ceil_div
from .shape import MatmulShape, matmul_shape

VECTOR_LOAD_BYTES = 16
"""Widest global load of a GPU thread (CUDA guide: 1, 2, 4, 8 or 16 bytes)."""

THREAD_OVERHEAD_REGISTERS = 32
"""Addresses, loop counters and staged loads of a GPU thread.  Assumed: what nvcc reports for a
matmul kernel, less its accumulators and operands, lies between 20 and 40."""

OPERAND_REGISTERS = 2
"""Vector registers of a CPU tile besides accumulators and row operands: a weight and a spare."""

STATISTICS = 64
"""Words of shared memory beside a GEMV's row: mean, mean square, and one per warp to add up."""

FEW_ROWS = 16
"""Rows up to which an attention tile of a CPU adds up each score by itself and reads keys and
values where they lie.  Measured on Zen 4 with 1024 keys of 128 features: 1 row takes 0.25 of the
time that it takes with staged keys and values, 8 rows take 0.55, 16 rows 0.8 and 32 rows 1.1."""

ROW_VECTORS = 4
"""Numbers per query row of an online softmax: maximum, new maximum, sum, scale."""


@dataclass(frozen=True)
class Footprint:
    """What one task occupies.

    Parameters
    ----------
    smem_bytes : int
        Shared memory of a GPU thread block.
    registers_per_thread : int
        32-bit registers of a GPU thread, vector registers of a CPU tile.
    threads : int
        Threads of a GPU thread block; 1 on a CPU.
    stack_bytes : int
        The accumulator buffer of a CPU tile, as it is before registers are allocated.
    scratch_bytes : int
        What a CPU task goes over again and again, so should lie in its core's L2 cache.
    """

    smem_bytes: int
    registers_per_thread: int
    threads: int
    stack_bytes: int = 0
    scratch_bytes: int = 0


def footprint(work: Workload, plan: TilePlan, dev: DeviceSpec) -> Footprint:
    """Return what one task of `plan` occupies on `dev`."""
    if isinstance(work, Attention) and plan.family == mma.FAMILY:
        threads = plan.num_warps * dev.warp_size
        smem = mma_attention.smem_bytes(plan, work)
        return Footprint(smem, mma_attention.registers(plan, work), threads)
    if isinstance(work, Attention):
        return _attention(work, plan, dev)
    if isinstance(work, MatmulChain):
        return _chain(work, plan, dev)
    shape = matmul_shape(work)
    return _matmul_cpu(shape, plan) if dev.kind == "cpu" else _matmul_gpu(shape, plan, dev)


def _chain(work: MatmulChain, plan: TilePlan, dev: DeviceSpec) -> Footprint:
    if dev.kind == "cpu":
        stack, scratch = chain.stack_bytes(plan, work), chain.scratch_bytes(plan, work)
        return Footprint(0, chain.registers(plan, work), 1, stack, scratch)
    smem = plan.num_stages * mma_chain.stage_bytes(plan, work)
    return Footprint(smem, mma_chain.registers(plan, work), plan.num_warps * dev.warp_size)


def _matmul_cpu(shape: MatmulShape, plan: TilePlan) -> Footprint:
    if plan.family == PANELS:
        return Footprint(0, panel_registers(plan, shape), 1)
    tile = plan.reg_m * plan.reg_n * shape.parts
    vectors, stack = 0, 0
    if "nk" in shape.layouts:  # one vector along k per accumulator
        vectors, stack = tile, tile * plan.lanes * 4
    if "kn" in shape.layouts:  # one vector holds `lanes` columns
        vectors = max(vectors, -(-tile // plan.lanes))
        stack = max(stack, tile * 4)
    return Footprint(
        smem_bytes=0,
        registers_per_thread=vectors + plan.reg_m + OPERAND_REGISTERS,
        threads=1,
        stack_bytes=stack,
        scratch_bytes=plan.block_k * (plan.block_m * 4 + plan.reg_n * shape.parts * shape.in_bytes),
    )


def is_gemv(plan: TilePlan, layouts: Collection[str]) -> bool:
    """Tell whether a GPU computes dot products under `plan`, not tiles."""
    return plan.block_m == 1 and set(layouts) == {"nk"}


def stages_norm(k: int, dev: DeviceSpec) -> bool:
    """Tell whether a GEMV holds its normalised row, and its statistics, in shared memory."""
    return (k + STATISTICS) * 4 <= min(STATIC_SMEM_BYTES, dev.smem_per_block_bytes)


def _gemv(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec) -> Footprint:
    """Return what a block of dot products occupies: the row, and a step of operands in flight."""
    threads = plan.num_warps * dev.warp_size
    columns = plan.reg_n * shape.parts
    x_bytes = 4 if shape.has_norm else shape.in_bytes
    elements = plan.block_k * (plan.block_n // plan.reg_n) // threads
    held = ceil_div(elements * (columns * shape.in_bytes + x_bytes), 4)
    staged = shape.has_norm and len(shape.n_parts) == 1 and stages_norm(shape.k, dev)
    return Footprint(
        smem_bytes=(shape.k + STATISTICS) * 4 if staged else 0,
        registers_per_thread=columns + held + THREAD_OVERHEAD_REGISTERS,
        threads=threads,
    )


def _matmul_gpu(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec) -> Footprint:
    if is_gemv(plan, shape.layouts):
        return _gemv(shape, plan, dev)
    if plan.family in mma.FAMILIES:
        threads = plan.num_warps * dev.warp_size
        return Footprint(mma.smem_bytes(plan, shape), mma.registers(plan, shape), threads)
    if plan.family == skinny.FAMILY:
        threads = plan.num_warps * dev.warp_size
        return Footprint(skinny.smem_bytes(plan, shape), skinny.registers(plan, shape), threads)
    lines = plan.block_m + shape.parts * plan.block_n
    sums = plan.reg_m * plan.reg_n * shape.parts
    operands = plan.reg_m + plan.reg_n * shape.parts
    smem = lines * (plan.block_k + 1) * 4 * plan.num_stages  # rows padded by a word
    return Footprint(
        smem_bytes=smem if dev.smem_per_block_bytes else 0,  # else operands are not staged
        registers_per_thread=sums + operands + THREAD_OVERHEAD_REGISTERS,
        threads=(plan.block_m // plan.reg_m) * (plan.block_n // plan.reg_n),
    )


def attention_width(plan: TilePlan) -> int:
    """Return the columns of an attention's register tile: whole vectors."""
    return plan.reg_n if plan.reg_n % plan.lanes == 0 else plan.lanes


def _attention(work: Attention, plan: TilePlan, dev: DeviceSpec) -> Footprint:
    """Return the tiles of queries, of keys or values (in turn), of scores, and four row vectors."""
    b, bm, bn, d, dv = (
        DTYPE_BYTES[work.dtype],
        plan.block_m,
        plan.block_n,
        work.head_dim,
        work.v_dim,
    )
    staged = bm * d + bn * max(d, dv)
    width = attention_width(plan)
    if dev.kind == "cpu":
        vectors = plan.reg_m * ceil_div(width, plan.lanes)
        registers = vectors + plan.reg_m + OPERAND_REGISTERS
        # In float32, beside the result so far
        if bm <= FEW_ROWS:
            staged = bm * d
        scratch_bytes = 4 * (staged + bm * bn + bm * dv + ROW_VECTORS * bm)
        return Footprint(0, registers, 1, plan.reg_m * width * 4, scratch_bytes)
    threads = max(plan.num_warps, 1) * dev.warp_size
    # A row of scores is one longer than its keys, against bank conflicts.
    smem = staged * b + 4 * (bm * (bn + 1) + ROW_VECTORS * bm)
    tile = plan.reg_m * math.gcd(dv, width)
    kept = ceil_div(bm * dv // tile, threads) * tile
    operands = plan.reg_m * width + plan.reg_m + width
    return Footprint(smem, kept + operands + THREAD_OVERHEAD_REGISTERS, threads)
