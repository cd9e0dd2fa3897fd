"""What one task of a plan occupies, and the single statement of what a plan may not do."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..device import STATIC_SMEM_BYTES, DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention, Workload
from . import mma, skinny, triton, triton_attention
from .cpu_limits import cpu_limits
from .panels import FAMILY as PANELS
from .panels import registers as panel_registers
from .panels import violations as panel_violations
from .prediction import ceil_div
from .shape import MatmulShape, dtypes_of, matmul_shape

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
    if isinstance(work, Attention):
        return _attention(work, plan, dev)
    shape = matmul_shape(work)
    return _matmul_cpu(shape, plan) if dev.kind == "cpu" else _matmul_gpu(shape, plan, dev)


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


def violations(plan: TilePlan, work: Workload, dev: DeviceSpec) -> tuple[str, ...]:
    """Return why `plan` cannot run `work` on `dev`: one sentence each, with both numbers.

    This is the only statement of the constraint set: candidates are filtered by it and a user's
    own plan is refused by it.  Empty: the plan fits.
    """
    return tuple(_violations(plan, work, dev))


def fits(plan: TilePlan, work: Workload, dev: DeviceSpec) -> bool:
    """Tell whether `violations` is empty, without collecting it."""
    return next(_violations(plan, work, dev), None) is None


def _violations(plan: TilePlan, work: Workload, dev: DeviceSpec) -> Iterator[str]:
    if plan.split_m != 1 and plan.family != PANELS:
        yield f"split_m is {plan.split_m}, only family {PANELS!r} cuts rows into parts"
    if plan.backend == "triton":
        attends = isinstance(work, Attention)
        yield from (triton_attention if attends else triton).violations(plan, work, dev)
        return
    foot = footprint(work, plan, dev)
    if plan.family == PANELS and not isinstance(work, Attention):
        yield from panel_violations(plan, matmul_shape(work), dev)
        yield from cpu_limits(foot, plan, work, dev)
        return
    if plan.family:
        yield from _family(plan, work, dev)
    else:
        yield from _backend(plan)
    if isinstance(work, Attention):
        if plan.block_k != work.head_dim:
            yield f"block_k is {plan.block_k}, attention holds all {work.head_dim} of head_dim"
    elif plan.block_k > work.k and not (
        plan.family == skinny.FAMILY or _is_gemv_of(work, plan, dev)
    ):
        yield f"block_k is {plan.block_k}, the reduction has {work.k} elements"
    if dev.kind == "cpu":
        yield from cpu_limits(foot, plan, work, dev)
    else:
        missing = sorted(dtypes_of(work).intersection(dev.missing_dtypes))
        if missing:
            yield f"kernels for the {dev.label} cannot hold {' or '.join(missing)}"
        yield from _gpu_limits(foot, plan, dev)
        yield from _gpu_lanes(plan, work)
        if not isinstance(work, Attention) and work.k == 1:
            # TVM 0.27 mixes index types when it simplifies a bound reduction of one element.
            yield "the reduction has 1 element, backend 'tir' needs 2 on a GPU"
        if not isinstance(work, Attention) and _is_gemv_of(work, plan, dev):
            yield from _gemv_groups(plan, work.k, dev)


def _family(plan: TilePlan, work: Workload, dev: DeviceSpec) -> Iterator[str]:
    """Check a plan that names its kernel."""
    families = (*mma.FAMILIES, skinny.FAMILY)
    if isinstance(work, Attention) or plan.family not in families:
        known = " and ".join(map(repr, families))
        names = "no families for attention" if isinstance(work, Attention) else known
        yield f"family is {plan.family!r}, backend 'tir' has {names}"
    elif plan.family in mma.FAMILIES:
        yield from mma.violations(plan, matmul_shape(work), dev)
    else:
        yield from skinny.violations(plan, work, matmul_shape(work), dev)


def _is_gemv_of(work: Workload, plan: TilePlan, dev: DeviceSpec) -> bool:
    if isinstance(work, Attention) or dev.kind == "cpu":
        return False
    return is_gemv(plan, matmul_shape(work).layouts)


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


def _backend(plan: TilePlan) -> Iterator[str]:
    if plan.num_stages != 1:
        yield f"num_stages is {plan.num_stages}, backend 'tir' loads in 1 stage"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, backend 'tir' reduces in 1 part"


def _gpu_limits(foot: Footprint, plan: TilePlan, dev: DeviceSpec) -> Iterator[str]:
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


def _gpu_lanes(plan: TilePlan, work: Workload) -> Iterator[str]:
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
