"""What the launches of a plan of the Triton back end cost.

Tiles run in waves, as many at a time as the multiprocessors hold.  A wave is bound by memory (the
weights, or as many as are in flight), by what one multiprocessor can fetch (tiles share operands
only through L2), or by its matrix units; the kernels overlap the three but not wholly.  Constants
were fitted to timings of the kernels on an H200, float16, each replay of a CUDA graph with a cold
L2: `2026-11-21-judge_estimator.json`.

Dot products of one row are bound by memory, by how fast blocks are launched, or by what a block
waits for, one block after the other; those constants are from `2026-11-28-dot_products.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log2
from typing import Any, NamedTuple

import numpy as np

from ....hardware import DeviceSpec
from ...arrays import summed
from ...prediction import DRAM_EFFICIENCY, ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from .tiles import accumulators, smem_bytes

READ_EFFICIENCY = 0.935
"""Reached part of the peak bandwidth where all but nothing is written: weights."""

FILL_S = {"gemv": 2.1e-6, "pointer": 3.4e-6}
"""From the start of a kernel to its full stride, and from there to its last store."""

NORM_S = {"gemv": 0.95e-6, "pointer": 0.78e-6}
"""What a norm kernel in front adds beside its bytes: it begins, and the matmul waits, while both
are launched."""

NORM_INSIDE_S_PER_ROW = 0.05e-6
"""What statistics in the loop over k add: the operand passes through registers."""

REDUCE_S, REDUCE_S_PER_ROW = 2.4e-6, 11e-9
"""What the kernel that adds the parts of a split matmul costs."""

WAVE_S = 3.7e-6
"""What a further wave of thread blocks adds to their sums: they begin and end as the first did.  It
is hidden where memory is what all wait for."""

NEXT_LAUNCH_S = 2.0e-6
"""What a further launch for other projections of the same rows costs; it follows without a gap."""

EARLY_S = {"pointer": 1.8e-6}
"""What a kernel of few rows has done before the kernel in front of it ends: it is launched early,
and asks for weights before it waits.  Measured on an H200 for the second matmuls of MCFuser's G1 to
G9: 1.4 to 3.6 us, beside what of launching overlaps (`2026-11-23-bench_chains.json`)."""

LATENCY_S = 0.9e-6
"""Between asking for memory and having it.  Bytes in flight over this is bandwidth."""

FEED_BYTES_PER_CLOCK = 66.0
"""What one multiprocessor fetches from L2 for pointer tiles, at most (64, by the width of its port,
at boost clock)."""

TENSOR_EFFICIENCY = {64: 0.70, 128: 0.95}
"""Reached part of the tensor cores' peak, by columns of a tile (of both products, where gated),
before what overlaps badly."""

WIDE_LINE_BYTES, NARROW_LINES, IN_STEP = 256, {"pointer": 0.05}, 0.7
"""`WIDE_LINE_BYTES`: a tile that reads at least so many bytes of a weight's row at once loses no
time in memory.  `NARROW_LINES`: the part that reading fewer adds to that time.  `IN_STEP`: the part
of this addition that falls away where all programs run in one wave: they go through k together, and
so open the same pages of memory; those of several waves drift apart."""

SYSTEM_SMEM_BYTES = 1 << 10
"""Shared memory that the system keeps for itself in each thread block."""

BLOCK_S = 1.05e-9
"""Between the launches of two blocks of dot products, wherever they run: 50,257 blocks take 65 us
if they read 1.5 KB each, whatever their number of warps."""

PART_S, PRODUCT_S, WARPS_S = 0.20e-6, 3e-9, 0.18e-6
"""How long a block of dot products takes, beside what memory gives: for each of its parts of k, for
each product of a thread, and for each time that its warps double, as they wait for one another."""

NORM_WAIT_S, LAYER_S_PER_PART = 0.28e-6, 0.92e-6
"""The same for a norm inside: a LayerNorm walks over the row twice for its statistics, before any
product."""

IDLE_LANES = 0.15
"""What lanes beyond the end of a row add, as a part of what as many others take: they load
nothing."""

REOPENED = 0.015
"""What doubling the number of parts adds to the time in memory: each opens pages anew."""

DOTS_REGISTERS = 32
"""Registers of a thread beside the weights that it holds at once."""

SLOTS_PART = 0.65
"""Part of its instruction slots in which a multiprocessor issues activations."""

CODE_BYTES, CODE_S_PER_BYTE, SLOT_BYTES, OTHER_SLOTS = 64 << 10, 0.28e-9, 16, 20
"""What a multiprocessor keeps of a kernel's instructions, of `SLOT_BYTES` each, and how long it
takes to get more: an epilogue is unrolled for all elements of a thread, with `OTHER_SLOTS` beside
its activation, and runs through once.  Measured for GELU and its tanh approximation, whose tiles of
256 columns take 7 and 5 us longer where L2 was flushed (`2026-11-23-gelu_tiles.log`)."""

OVERLAP = 0.2
"""Part of the second longest of the times that the longest does not hide."""

ACCUMULATOR_OVERHEAD = 17
"""Registers of a thread beside its accumulators (Triton keeps operands in shared memory)."""


class Tile(NamedTuple):
    """What a plan asks for, whatever the number of rows is.

    Each field is a number, or an array with an element for each of many plans.
    """

    dots: Any  # of one row each, which read all weights: how often, as pages are opened again
    life_s: Any  # of a block of dot products
    rows: Any
    columns: Any
    splits: Any
    slots: Any  # tiles that run at once
    in_flight: Any  # bytes of weights
    narrow: Any  # part that reading few bytes of a row at once adds, where programs drift apart
    line_bytes: Any  # of a row or a column of a tile
    lines: Any  # columns
    feed_per_s: Any  # bytes that a multiprocessor fetches
    compute_s: Any  # of a tile
    wave_s: Any
    start_s: Any
    code_s: Any
    norm_s: Any
    norm_row_s: Any


def tile_of(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec, inside: bool) -> Tile:
    """Return the tile of a plan; `inside` tells whether its matmul normalises."""
    family, dots = plan.family, plan.family == "gemv"
    k = ceil_div(ceil_div(shape.k, plan.block_k), plan.split_k) * plan.block_k
    is_narrow = plan.block_k * shape.in_bytes < WIDE_LINE_BYTES
    norm_s, norm_row_s = 0.0, 0.0
    if shape.has_norm and inside:
        norm_row_s = NORM_INSIDE_S_PER_ROW if family == "pointer" else 0.0
    elif shape.has_norm:
        written = 2 * shape.k * shape.in_bytes
        norm_s = NORM_S[family]
        norm_row_s = written / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    return Tile(
        dots=_read(plan, shape) if dots else 0.0,
        life_s=_life_s(plan, shape, inside) if dots else 0.0,
        rows=plan.block_m,
        columns=plan.block_n,
        splits=plan.split_k,
        slots=dev.sm_count * _resident(plan, shape, dev),
        in_flight=shape.parts * plan.block_n * plan.num_stages * plan.block_k * shape.in_bytes,
        narrow=NARROW_LINES.get(family, 0.0) if is_narrow else 0.0,
        line_bytes=0 if dots else k * shape.in_bytes,
        lines=plan.block_n * shape.parts,
        feed_per_s=inf if dots else FEED_BYTES_PER_CLOCK * dev.clock_hz,
        compute_s=0.0 if dots else _compute_s(plan, shape, dev, k),
        wave_s=WAVE_S if family == "pointer" else 0.0,
        start_s=FILL_S[family],
        code_s=_code_s(shape, plan),
        norm_s=norm_s,
        norm_row_s=norm_row_s,
    )


def _read(plan: TilePlan, shape: MatmulShape) -> float:
    """Return how long reading the weights for dot products takes, by its least."""
    parts = ceil_div(shape.k, plan.block_k)
    idle = parts * plan.block_k / shape.k - 1
    return 1 + REOPENED * log2(parts) + IDLE_LANES * (idle if parts > 1 else 0.0)


def _life_s(plan: TilePlan, shape: MatmulShape, inside: bool) -> float:
    """Return how long a block of dot products takes, if memory is no limit."""
    parts = ceil_div(shape.k, plan.block_k)
    products = shape.k * plan.block_n * shape.parts / (32 * plan.num_warps)
    life = PART_S * parts + PRODUCT_S * products + WARPS_S * log2(plan.num_warps)
    if shape.has_norm and inside:
        life += NORM_WAIT_S + (LAYER_S_PER_PART * parts if shape.norm == "layer" else 0.0)
    return life


def _compute_s(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec, k: int) -> float:
    """Return how long one multiprocessor takes to multiply one tile, and for its activations."""
    columns = plan.block_n * shape.parts
    reached = TENSOR_EFFICIENCY[128 if columns >= 128 else 64]
    per_sm = dev.tensor_flops_per_s(shape.dtype) / dev.sm_count * reached
    slots_per_s = SLOTS_PART * dev.fma_float32_flops_per_s / 2 / dev.sm_count
    compute = 2.0 * plan.block_m * columns * k / per_sm
    return compute + plan.block_m * plan.block_n * shape.slots / slots_per_s


def _code_s(shape: MatmulShape, plan: TilePlan) -> float:
    """Return how long a kernel waits for instructions that are fetched while it runs."""
    if plan.family == "gemv" or not shape.slots:
        return 0.0
    code = accumulators(plan, shape) * (shape.slots + OTHER_SLOTS) * SLOT_BYTES
    return max(0.0, code - CODE_BYTES) * CODE_S_PER_BYTE


def _resident(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    threads = 32 * plan.num_warps
    registers = accumulators(plan, shape) + ACCUMULATOR_OVERHEAD
    if plan.family == "gemv":
        held = min(shape.k, plan.block_k) * plan.block_n * shape.parts // threads
        by_registers = dev.registers_per_sm // ((held + DOTS_REGISTERS) * threads)
        most = min(dev.max_blocks_per_sm, dev.max_threads_per_sm // threads)
        return max(1, min(most, by_registers))
    by_smem = dev.smem_per_sm_bytes // (smem_bytes(plan, shape) + SYSTEM_SMEM_BYTES)
    by_registers = dev.registers_per_sm // (registers * threads)
    return max(1, min(by_smem, by_registers, dev.max_threads_per_sm // threads))


class Launch(NamedTuple):
    """How long launches take, beside starting, and what of it each of four is: numbers, arrays."""

    seconds: Any
    waves: Any
    dram: Any
    l2: Any
    compute: Any
    latency: Any


def _launch(
    tile: Tile, shape: MatmulShape, dev: DeviceSpec, rows: Any, columns: Sequence[int]
) -> Launch:
    """Return what a launch takes for weights of so many columns.

    Its last wave, which may fill only a part of the device, has times of its own.
    """
    weight_bytes = sum(columns) * shape.parts * shape.k * shape.in_bytes
    across = sum(ceil_div(c, tile.columns) for c in columns)
    tiles: Any = np.where(tile.dots, 1, ceil_div(rows, tile.rows) * across * tile.splits)
    full, rest = tiles // tile.slots, tiles % tile.slots
    waves = ceil_div(tiles, tile.slots)
    read = dev.dram_bytes_per_s * READ_EFFICIENCY
    alone = weight_bytes * tile.dots * rows / read
    blocks = across * rows
    launched, lived = blocks * BLOCK_S, np.maximum(1, blocks / tile.slots) * tile.life_s
    dots_s = np.cbrt(sum(s * s * s for s in (alone, launched, lived)))
    read = read / (1 + tile.narrow * (1 - IN_STEP / waves))
    feed = tile.line_bytes * (np.minimum(tile.rows, rows) + tile.lines) / tile.feed_per_s
    compute = tile.compute_s + tile.wave_s * (1 - 1 / waves)
    found = Launch(0.0, waves, 0.0, 0.0, 0.0, 0.0)
    for count, wide in ((full, tile.slots), (rest > 0, np.maximum(rest, 1))):
        # The nearer to what memory can give, the more in flight a little more takes
        memory, waiting = 1 / read, LATENCY_S / (wide * tile.in_flight)
        slowness = np.cbrt(memory * memory * memory + waiting * waiting * waiting)
        dram = np.where(tile.dots, dots_s, weight_bytes * wide / tiles * slowness)
        share = ceil_div(wide, dev.sm_count)  # of the busiest multiprocessor
        l2, products = share * feed, share * compute
        found = found._replace(
            seconds=found.seconds + count * _together(dram, l2, products),
            dram=found.dram + count * dram,
            l2=found.l2 + count * l2,
            compute=found.compute + count * products,
        )
    return found._replace(
        waves=np.where(tile.dots, ceil_div(blocks, tile.slots), waves),
        dram=np.where(tile.dots, alone, found.dram),
        latency=np.where(tile.dots, np.maximum(launched, lived), 0.0),
    )


def _together(a: Any, b: Any, c: Any) -> Any:
    """Return the longest of three times, and what it does not hide of the second longest."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.maximum(high, c) + OVERLAP * np.maximum(low, np.minimum(high, c))


def launches(
    tile: Tile,
    shape: MatmulShape,
    columns: Sequence[Sequence[int]],
    dev: DeviceSpec,
    rows: Any,
) -> Launch:
    """Return what the launches of a workload cost, that of a norm among them.

    Parameters
    ----------
    tile : Tile
        Of one plan, or of many.
    shape : MatmulShape
        The workload, with the columns of rotated projections as they are (``pairs=False``).
    columns : sequence of sequence of int
        Of the weights of each launch.
    dev : DeviceSpec
        The device.
    rows : int or array
        Rows of x; of many sizes an array of shape ``(sizes, 1)``.

    Returns
    -------
    Launch
        `seconds` are from launch to end; of many they have the shape ``(sizes, plans)``.
    """
    each = [_launch(tile, shape, dev, rows, some) for some in columns]
    found = summed(each)
    seconds = start_s(tile, columns, dev) + found.seconds
    seconds += len(columns) * (tile.splits > 1) * (REDUCE_S + REDUCE_S_PER_ROW * rows)
    seconds += tile.norm_s + tile.norm_row_s * rows
    seconds += rows * shape.row_bytes / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    return found._replace(seconds=seconds)


def start_s(tile: Tile, columns: Sequence[Sequence[int]], dev: DeviceSpec) -> Any:
    """Return what launching takes, getting into stride, and fetching instructions."""
    following = (len(columns) - 1) * NEXT_LAUNCH_S
    return dev.launch_s + tile.start_s + following + len(columns) * tile.code_s
