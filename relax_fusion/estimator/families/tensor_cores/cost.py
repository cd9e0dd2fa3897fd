"""What a plan for tensor cores costs on the TIR path: the norm in front, and waves of tiles.

A step of a tile along k lasts as long as the matrix units need for it, or as its operands take from
L2 on their way into one multiprocessor, or as the next operands take to arrive at all, of which so
many stages are on their way; and it has a least time.  Constants were fitted to 246 timings of 71
plans of ``wgmma`` on one H200, float16, 64 to 1024 rows, which they meet to 7 % (root mean square):
`2026-11-21-mma_trials.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....hardware import DeviceSpec
from ....hardware.instructions import SLICE_BYTES
from ....workload import INTEGER_DTYPES
from ...gpu_cost import resident_blocks
from ...prediction import Bound, ceil_div
from ...shape import MatmulShape
from ...steps import Footprint
from ...tile_plan import TilePlan
from . import tiles as mma

GROUP_RATE = {64: 0.8, 128: 0.81, 192: 0.92, 256: 0.89}
"""Part of the tensor cores' peak that ``wgmma`` reaches by itself, by columns of a tile.  That of
64 is assumed: other things take longer there."""

CROWDED_RATE = 0.73
"""The same with four groups in a block, which wait for each other at every step (256 x 128)."""

HOPPER_RATE = 0.45
"""The same for ``mma.sync`` on sm_90 with 64 x 64 results a warp: its operands pass through
registers.  It falls with the square root of the products for each operand loaded."""

NATIVE_RATE = 0.83
"""The same on devices whose own instruction it is.  Assumed, from what libraries reach there."""

BEST_INTENSITY = 32.0
"""Products for each operand loaded, of 64 x 64 results."""

INTEGER_RATE = 0.8
"""Part of these parts that integers reach, in operations: 0.78 to 0.85 with seven plans at 4096
rows of 4096 x 4096."""

TF32_RATE = 0.9
"""The same of tf32 by ``mma.sync``, whose operands are rounded in registers: six plans."""

REWORK_CLOCKS = 8.0
"""Of a warp, for each register of operands that it rounds to tf32, or transposes, in front of a
product: 5 to 12 where it has a scheduler to itself."""

ROUNDED_BYTES_PER_CLOCK = 110.0
"""What a multiprocessor reads and writes of its shared memory to round tiles to tf32 in place, for
``wgmma``, which reads them from there meanwhile: 85 to 130 with seven plans."""

SCHEDULERS = 4
"""Of a multiprocessor, each with matrix units of its own."""

FEED_BYTES_PER_CLOCK = 49.0
"""What one multiprocessor fetches from L2: 97 GB/s."""

LATENCY_S = 0.88e-6
"""From asking for the operands of a step to multiplying them, on a busy device."""

STEP_S = 0.2e-6
"""The least time of a step: waits, a barrier, and the copies that are asked for."""

RAGGED = 1.19
"""What the steps of all tiles take longer where the last has columns beyond n: copies look where
they are."""

READ_EFFICIENCY = 0.87
"""Reached part of the peak bandwidth, of weights."""

OVERLAP = {"step": 6.0, "memory": 4.0}
"""Exponents of the means: how well the parts of a step overlap, and all steps with memory."""

CLUSTER_S = 0.57e-6
"""What the barriers of a cluster cost, and that its blocks end together."""

EXCHANGED_BYTES_PER_CLOCK = 9.7
"""What a block stores of its sums, and loads of the others' at the same time."""

UNPAIRED = 10
"""Multiprocessors that clusters of more than two blocks leave idle: their number in each part of
the device is no multiple of the blocks.  Seen in that 128 blocks did not run at once."""

FILL_S = 1.8e-6
"""From the start of a kernel to its full stride, and from there to its last store."""


def joining_seconds(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return how long a block takes to add up its share of the sums of its cluster."""
    if plan.split_k == 1:
        return 0.0
    sum_bytes = plan.block_m * plan.block_n * shape.parts * mma.SUM_BYTES
    return CLUSTER_S + sum_bytes / (EXCHANGED_BYTES_PER_CLOCK * dev.clock_hz)


def mean(times: Sequence[float], kind: str) -> float:
    """Return a little more than the longest of times that overlap."""
    exponent = OVERLAP[kind]
    return float(sum(time**exponent for time in times) ** (1 / exponent))


def waves(
    blocks: int, plan: TilePlan, foot: Footprint, dev: DeviceSpec
) -> Iterator[tuple[int, int]]:
    """Yield how many waves there are, and the blocks of the busiest multiprocessor in each."""
    usable = dev.sm_count - (UNPAIRED if plan.split_k > 2 else 0)
    resident = resident_blocks(foot, dev, mma.SYSTEM_SMEM_BYTES)
    full, rest = divmod(blocks, usable * resident)
    if full:
        yield full, resident
    if rest:
        yield 1, ceil_div(rest, usable)


def step(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, blocks: int) -> dict[Bound, float]:
    """Return what may determine the time of one step of `blocks` tiles of a multiprocessor."""
    columns = plan.block_n * shape.parts
    flops = 2.0 * plan.block_m * columns * plan.block_k
    rate = dev.tensor_flops_per_s(shape.dtype) / dev.sm_count * _reached(plan, shape, dev)
    products = blocks * flops / rate
    reworked = _reworked_registers(plan, shape)
    if reworked:  # a warp alone does not rework operands while it multiplies
        warp_flops = flops * plan.reg_m * plan.reg_n / (plan.block_m * plan.block_n)
        slices = plan.block_k * shape.in_bytes // SLICE_BYTES
        alone = SCHEDULERS * warp_flops / rate + slices * reworked * REWORK_CLOCKS / dev.clock_hz
        products = max(products, alone)
    fetched = (plan.block_m + columns) * plan.block_k * shape.in_bytes
    rounding = 0.0
    if plan.family == mma.WARP_GROUPS and shape.dtype == "float32":
        rounding = blocks * 2 * fetched / (ROUNDED_BYTES_PER_CLOCK * dev.clock_hz)
    ahead = plan.num_stages - (2 if plan.family == mma.WARP_GROUPS else 1)
    return {
        "compute": products + rounding,
        "l2": blocks * fetched / (FEED_BYTES_PER_CLOCK * dev.clock_hz) + rounding,
        "latency": LATENCY_S / ahead + rounding,
    }


def _reworked_registers(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the registers of operands of a slice that a warp changes before it multiplies them."""
    columns = plan.reg_n * shape.parts
    if plan.family == mma.WARP_GROUPS:
        return 0
    if shape.dtype == "float32":
        return (plan.reg_m + columns) // 4
    return columns // 4 if shape.in_bytes == 1 and "kn" in shape.layouts else 0


def _reached(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> float:
    """Return the part of the tensor cores' peak that the tiles of `plan` reach."""
    part = INTEGER_RATE if shape.dtype in INTEGER_DTYPES else 1.0
    if shape.dtype == "float32" and plan.family != mma.WARP_GROUPS:
        part = TF32_RATE
    return part * _reached_by_halves(plan, shape, dev)


def _reached_by_halves(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> float:
    """Return the same of two-byte types."""
    columns = plan.reg_n * shape.parts
    if plan.family == mma.WARP_GROUPS:
        if plan.num_warps > 2 * mma.GROUP_WARPS:
            return CROWDED_RATE
        return GROUP_RATE[max(n for n in GROUP_RATE if n <= max(columns, min(GROUP_RATE)))]
    intensity = plan.reg_m * columns / (plan.reg_m + columns)
    whole = HOPPER_RATE if dev.capabilities.warp_group_mma else NATIVE_RATE
    return whole * min(1.0, intensity / BEST_INTENSITY) ** 0.5
