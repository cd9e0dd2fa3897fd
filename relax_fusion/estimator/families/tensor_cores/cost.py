"""What a plan for tensor cores on the TIR path asks for, and what its kernels reach."""

from __future__ import annotations

from math import log2

from ....hardware import DeviceSpec
from ....hardware.instructions import SLICE_BYTES
from ....workload import INTEGER_DTYPES
from ...gpu_cost import Rates, resident_blocks
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import Footprint
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from ..matmuls import Tile, group_clocks
from . import tiles as mma

RATES = {
    mma.FAMILY: Rates(
        tensor=0.529,
        feed=108,
        latency_s=0.751e-6,
        start_s=3.24e-6,
        wave_s=5.68e-6,
        out_s=67.5e-12,
        meet_s=0.0104e-6,
    ),
    mma.WARP_GROUPS: Rates(
        tensor=0.981,
        feed=50.5,
        latency_s=0.835e-6,
        start_s=2.87e-6,
        wave_s=5.11e-6,
        out_s=51.6e-12,
        meet_s=0.0317e-6,
    ),
}
"""What the kernels reach on an H200, by family."""

NATIVE_TENSOR = 0.83
"""Part of the rate of tensor cores that ``mma`` reaches on devices whose own instruction it is.
Assumed, from what libraries reach there."""

INTEGER_PART, TF32_PART = 0.8, 0.9
"""Parts of that which integers reach, and tf32 by ``mma``, whose operands are rounded in registers:
seven and six plans at 4096 rows of 4096 x 4096 (`2026-11-22-integer_and_tf32.log`)."""

FRAGMENT_CLOCKS = 1.9 / 128
"""Clocks in which shared memory gives a byte of the operands that warps load into registers."""

REWORK_CLOCKS = 8.0
"""A warp takes 8 clocks for each register of operands that it rounds to tf32, or transposes, in
front of a product: 5 to 12 where it has a scheduler to itself (the same log)."""

ROUNDED_BYTES_PER_CLOCK = 110.0
"""A multiprocessor reads and writes so many bytes of its shared memory in a clock to round tiles to
tf32 in place, for ``wgmma``, which reads them from there: 85 to 130 with seven plans."""

SCHEDULERS = 4
"""A multiprocessor has 4 schedulers, each with matrix units of its own."""

MERGED = 4
"""Each sum of parts of k takes as long as 4 that are stored: it changes hands as float32."""

UNPAIRED = 10
"""Clusters of more than two blocks leave 10 multiprocessors idle: their number in each part of the
device is no multiple of the blocks.  Seen in that 128 blocks did not run at once."""


def tile_of(plan: TilePlan, shape: MatmulShape, foot: Footprint, dev: DeviceSpec) -> Tile:
    """Return what a plan asks for."""
    columns, groups = plan.block_n * shape.parts, plan.family == mma.WARP_GROUPS
    flops = 2.0 * plan.block_m * columns * plan.block_k
    weight_bytes = columns * plan.block_k * shape.in_bytes
    sums = plan.block_m * columns
    return Tile(
        rows=plan.block_m,
        columns=plan.block_n,
        blocks=plan.split_k,
        residents=resident_blocks(foot, dev, SYSTEM_SMEM_BYTES),
        multiprocessors=dev.sm_count - (UNPAIRED if plan.split_k > 2 else 0),
        depth=plan.block_k * plan.split_k,
        ahead=plan.num_stages - (2 if groups else 1),
        tensor_s=flops * dev.sm_count / dev.tensor_flops_per_s(shape.dtype),
        clocks=_clocks(plan, shape),
        weight_bytes=weight_bytes,
        row_bytes=plan.block_k * shape.in_bytes,
        asked_bytes=weight_bytes,
        sums=sums * (1 / plan.split_k + MERGED * (plan.split_k > 1)),
        elements=plan.block_m * plan.block_n / plan.split_k,
        meetings=log2(plan.split_k),
        in_front=shape.has_norm,
        copied=shape.unpacked_bytes > 0,
        aligned=False,
    )


def rates_of(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Rates:
    """Return what the kernel of a plan reaches."""
    rates = RATES[plan.family]
    if not dev.capabilities.warp_group_mma:
        rates = rates._replace(tensor=NATIVE_TENSOR)
    part = INTEGER_PART if shape.dtype in INTEGER_DTYPES else 1.0
    if shape.dtype == "float32" and plan.family == mma.FAMILY:
        part = TF32_PART
    return rates._replace(tensor=part * rates.tensor)


def _clocks(plan: TilePlan, shape: MatmulShape) -> float:
    """Return the clocks in which the operands of a step come from shared memory, or are changed."""
    columns, slices = plan.reg_n * shape.parts, plan.block_k * shape.in_bytes / SLICE_BYTES
    if plan.family == mma.WARP_GROUPS:
        fetched = (plan.block_m + columns) * plan.block_k * shape.in_bytes
        rounding = 2 * fetched / ROUNDED_BYTES_PER_CLOCK if shape.dtype == "float32" else 0.0
        return plan.block_m / mma.GROUP_ROWS * slices * group_clocks(columns) + rounding
    lines = (plan.reg_m + columns) * plan.block_k * shape.in_bytes
    reworked = 0
    if shape.dtype == "float32":
        reworked = (plan.reg_m + columns) // 4
    elif shape.in_bytes == 1 and "kn" in shape.layouts:
        reworked = columns // 4
    rework = slices * reworked * REWORK_CLOCKS / SCHEDULERS
    return plan.num_warps * (lines * FRAGMENT_CLOCKS + rework)
