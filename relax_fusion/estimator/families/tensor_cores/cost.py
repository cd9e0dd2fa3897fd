"""What a plan for tensor cores costs on the TIR path: the norm in front, and waves of tiles.

A step of a tile along k lasts as long as the matrix units need for it, or as its operands take from
L2 on their way into one multiprocessor, or as the next operands take to arrive at all, of which so
many stages are on their way; and it has a least time.  Constants were fitted to 246 timings of 71
plans of ``wgmma`` on one H200, float16, 64 to 1024 rows, which they meet to 7 % (root mean square):
`2026-11-21-mma_trials.json`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....hardware import DeviceSpec
from ....hardware.instructions import SLICE_BYTES
from ....workload import INTEGER_DTYPES
from ...arrays import overlapping, summed
from ...gpu_cost import resident_blocks
from ...limits import VECTOR_LOAD_BYTES
from ...prediction import DRAM_EFFICIENCY, ceil_div, power_dividing
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
registers.  It falls with the square root of the products for each operand loaded: to half for
16 x 16, whose operands shared memory gives at no more than half the rate either."""

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
"""Of a multiprocessor, each with matrix units of its own: the warps of all of its blocks are dealt
to them, and the one with most of them is the last to end."""

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

MEMORY_POWER = 4
"""How well all steps overlap with memory (`overlapping`); the parts of a step do by power 6."""

CLUSTER_S = 0.57e-6
"""What the barriers of a cluster cost, and that its blocks end together."""

EXCHANGED_BYTES_PER_CLOCK = 9.7
"""What a block stores of its sums, and loads of the others' at the same time."""

UNPAIRED = 10
"""Multiprocessors that clusters of more than two blocks leave idle: their number in each part of
the device is no multiple of the blocks.  Seen in that 128 blocks did not run at once."""

UNALIGNED_STORES_PER_CLOCK = 0.65
"""Of a multiprocessor, where rows of results are no multiples of 16 bytes: threads store what lies
far apart.  Measured: 0.55 to 0.85, of 2305 to 50257 columns that are stored alone or in pairs
(`2026-11-28-unaligned_rows.json`)."""

FILL_S = 1.8e-6
"""From the start of a kernel to its full stride, and from there to its last store."""


class Tile(NamedTuple):
    """What a plan asks for on its own, whatever the number of rows is.

    Each field is a number, or an array with an element for each of many plans.
    """

    rows: Any  # and columns of each part
    columns: Any
    split: Any
    depth: Any  # elements of k of a step
    residents: Any  # blocks of a multiprocessor
    usable: Any  # multiprocessors
    warps: Any
    warp_s: Any  # of a step of a warp alone on a scheduler, as what follows up to `least_s`
    least_s: Any  # the same where it reworks operands, which others hide
    feed_s: Any  # of the operands of a block
    rounding_s: Any  # of the same, in place
    latency_s: Any
    joining_s: Any  # of a block, once


class Launch(NamedTuple):
    """How long the launches for some weights take, and their parts: numbers or arrays."""

    seconds: Any
    waves: Any
    joining: Any
    dram: Any
    compute: Any
    l2: Any
    latency: Any


def tile_of(plan: TilePlan, shape: MatmulShape, foot: Footprint, dev: DeviceSpec) -> Tile:
    """Return the tile of a plan."""
    columns, warps = plan.block_n * shape.parts, plan.num_warps
    rate = dev.tensor_flops_per_s(shape.dtype) / dev.sm_count * _reached(plan, shape, dev)
    flops = 2.0 * plan.block_m * columns * plan.block_k
    warp_s = SCHEDULERS * flops / warps / rate
    slices = plan.block_k * shape.in_bytes // SLICE_BYTES
    reworking = slices * _reworked_registers(plan, shape) * REWORK_CLOCKS / dev.clock_hz
    fetched = (plan.block_m + columns) * plan.block_k * shape.in_bytes
    groups, rounding = plan.family == mma.WARP_GROUPS, 0.0
    if groups and shape.dtype == "float32":
        rounding = 2 * fetched / (ROUNDED_BYTES_PER_CLOCK * dev.clock_hz)
    return Tile(
        rows=plan.block_m,
        columns=plan.block_n,
        split=plan.split_k,
        depth=plan.block_k,
        residents=resident_blocks(foot, dev, mma.SYSTEM_SMEM_BYTES),
        usable=dev.sm_count - (UNPAIRED if plan.split_k > 2 else 0),
        warps=warps,
        warp_s=warp_s,
        least_s=warp_s + reworking if reworking else 0.0,
        feed_s=fetched / (FEED_BYTES_PER_CLOCK * dev.clock_hz),
        rounding_s=rounding,
        latency_s=LATENCY_S / (plan.num_stages - (2 if groups else 1)),
        joining_s=_joining_s(plan, shape, dev),
    )


def _joining_s(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> float:
    """Return how long a block takes to add up its share of the sums of its cluster."""
    if plan.split_k == 1:
        return 0.0
    sum_bytes = plan.block_m * plan.block_n * shape.parts * mma.SUM_BYTES
    return CLUSTER_S + sum_bytes / (EXCHANGED_BYTES_PER_CLOCK * dev.clock_hz)


def launches(tile: Tile, shape: MatmulShape, dev: DeviceSpec, rows: Any) -> Launch:
    """Return what the launches of a workload cost, with that of its norm.

    Parameters
    ----------
    tile : Tile
        Of one plan, or of many.
    rows : int or array
        Rows of x; of many sizes an array of shape ``(sizes, 1)``.

    Returns
    -------
    Launch
        `seconds` are from launch to end; of many they have the shape ``(sizes, plans)``.
    """
    found = summed([_launch(tile, shape, dev, rows, n) for n in shape.n_parts])
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    seconds = len(shape.n_parts) * (dev.launch_s + FILL_S) + found.joining + found.seconds
    if shape.has_norm:
        moved = rows * (shape.x_row_bytes + shape.k * shape.in_bytes)
        seconds = seconds + dev.launch_s + moved / bandwidth
    seconds = seconds + rows * _unaligned_s(shape, dev)
    moved = shape.weight_bytes + rows * shape.row_bytes
    seconds = np.maximum(seconds, dev.launch_s + moved / bandwidth)
    if shape.unpacked_bytes:  # by a kernel in front, which writes them
        unpacked = (shape.weight_bytes + shape.unpacked_bytes) / bandwidth
        seconds = seconds + dev.launch_s + unpacked
    return found._replace(seconds=seconds)


def _unaligned_s(shape: MatmulShape, dev: DeviceSpec) -> float:
    """Return what the stores of a row of results take where it is no multiple of 16 bytes."""
    most = VECTOR_LOAD_BYTES // shape.out_bytes
    stores = sum(n // power_dividing(n, most) for n in shape.unaligned)
    return stores / (UNALIGNED_STORES_PER_CLOCK * dev.clock_hz * dev.sm_count)


def _launch(tile: Tile, shape: MatmulShape, dev: DeviceSpec, rows: Any, n: int) -> Launch:
    """Return what the launch for a weight of `n` columns takes behind its start."""
    blocks = ceil_div(rows, tile.rows) * ceil_div(n, tile.columns) * tile.split
    full = blocks // (tile.usable * tile.residents)
    rest = blocks - full * tile.usable * tile.residents
    left = ceil_div(rest, tile.usable)  # of the busiest multiprocessor, in the last wave
    ragged = np.where(n % tile.columns > 0, RAGGED, 1.0)
    steps = ragged * ceil_div(shape.k, tile.depth * tile.split)
    whole, last = _step(tile, tile.residents), _step(tile, left)
    inside, compute, l2, latency = (
        steps * (full * a + (rest > 0) * b) for a, b in zip(whole, last, strict=True)
    )
    joining = (full * tile.residents + left) * tile.joining_s
    read = dev.dram_bytes_per_s * READ_EFFICIENCY
    dram = n * shape.parts * shape.k * shape.in_bytes / read
    seconds = overlapping(MEMORY_POWER, dram, inside)
    return Launch(seconds, full + (rest > 0), joining, dram, compute, l2, latency)


def _step(tile: Tile, blocks: Any) -> tuple[Any, Any, Any, Any]:
    """Return the time of one step of `blocks` tiles of a multiprocessor, and what determines it.

    Its parts are the products, what comes from L2, and the way of the operands.
    """
    rounding = blocks * tile.rounding_s
    products = ceil_div(blocks * tile.warps, SCHEDULERS) * tile.warp_s
    compute = np.maximum(products, tile.least_s) + rounding
    l2 = blocks * tile.feed_s + rounding
    latency = tile.latency_s + rounding
    cubes = (time * time * time for time in (compute, l2, latency, STEP_S))
    return np.cbrt(overlapping(2, *cubes)), compute, l2, latency


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
