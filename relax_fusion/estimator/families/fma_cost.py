"""Price of a fused norm and matmul on plain FMAs of a GPU, in tiles or as dot products."""

from __future__ import annotations

from dataclasses import replace

from ...hardware import DeviceSpec
from ..family import Footprint
from ..gpu_cost import (
    ISSUE_PER_CLOCK,
    L2_SHARE,
    MEMORY_LATENCY_S,
    Kernel,
    latency_hidden,
    load_rounds,
    price_kernel,
    resident_blocks,
    simt_clocks,
)
from ..prediction import DRAM_EFFICIENCY, Prediction, ceil_div
from ..shape import MatmulShape
from ..tile_plan import TilePlan

NORM_FLOPS_PER_ELEMENT = 4
"""Square and add for the statistics, scale and gamma to apply them; counted."""

GEMV_DRAM_EFFICIENCY = 0.95 * DRAM_EFFICIENCY
"""Reached part of the peak bandwidth by dot products of one row: 4.1 TB/s on 235 MB of weights,
measured on an H200."""

GEMV_INSTRUCTIONS_PER_WEIGHT = 2.5
"""Convert, multiply-add, and a share of the loads and of converting x.  Counted."""

GEMV_PROLOGUE_LOADS = 10
"""Dependent trips to memory or through barriers before the first weight is asked for, with a norm:
5 us, what a norm of 4096 features in front of 50 MB of weights added on an H200."""

GEMV_FILL_LOADS = 4
"""The same without a norm: the start of a kernel, and the sums of its threads.  13.4 to 14.3 us for
34 MB, measured on an H200 (`2026-11-21-skinny_plans.log`)."""

WORKSPACE_BYTES = 4
"""Of a normalised element between the two kernels: float32."""

NORM_CHAIN_LOADS = 4
"""Dependent trips of a row through the norm kernel: x, the statistics, x again, gamma.  Counted."""


def tiles_on_gpu(
    shape: MatmulShape, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Price the fused norm and matmul at `rows` rows.

    Neighbouring blocks are taken to share their columns (the row tile is the fastest index of the
    grid), so weights come from DRAM once, and x once per wave where L2 cannot hold it.
    """
    tiles_m = ceil_div(rows, plan.block_m)
    tiles_n = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
    blocks = tiles_m * tiles_n
    waves = ceil_div(blocks, dev.sm_count * resident_blocks(foot, dev))
    x_bytes = rows * shape.x_row_bytes
    missing = max(0.0, 1 - dev.l2_bytes * L2_SHARE / x_bytes)
    x_reads = 1 + (waves - 1) * missing
    stores = rows * (shape.out_row_bytes + shape.side_row_bytes)
    if shape.has_norm:  # by a kernel of its own
        x_bytes = rows * shape.k * WORKSPACE_BYTES
    steps = ceil_div(shape.k, plan.block_k)
    k_padded = steps * plan.block_k
    lines = plan.block_m + plan.block_n * shape.parts
    chain = steps * load_rounds(foot, lines * plan.block_k * shape.in_bytes)
    flops = 2.0 * plan.block_m * plan.block_n * shape.parts * k_padded
    block_s = flops / _matmul_rate(shape, plan, foot, dev, blocks)
    kernel = Kernel(
        blocks=blocks,
        block_compute_s=block_s,
        longest_block_s=block_s,
        chain_s=(chain / plan.num_stages + 2) * MEMORY_LATENCY_S,
        dram_bytes=shape.weight_bytes + x_bytes * x_reads + stores,
        l2_bytes=tiles_m * shape.weight_bytes + tiles_n * x_bytes + stores,
    )
    whole = price_kernel(kernel, plan, foot, dev, shape.flops(rows))
    return _after_norm(whole, shape, dev, rows) if shape.has_norm else whole


def _after_norm(rest: Prediction, shape: MatmulShape, dev: DeviceSpec, rows: int) -> Prediction:
    """Add a kernel that writes normalised rows in float32, one thread block a row."""
    moved = rows * (shape.x_row_bytes + shape.k * WORKSPACE_BYTES)
    streamed = moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    waves = ceil_div(rows, dev.sm_count * 2)
    seconds = dev.launch_s + max(streamed, waves * NORM_CHAIN_LOADS * MEMORY_LATENCY_S)
    return replace(rest, seconds=rest.seconds + seconds, dram_bytes=rest.dram_bytes + moved)


def dot_products_on_gpu(
    shape: MatmulShape, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Price dot products; each row goes through all weights again, from L2 where they fit."""
    tiles_n = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
    steps = ceil_div(shape.k, plan.block_k)
    weights = steps * plan.block_k * plan.block_n * shape.parts
    issued = weights * GEMV_INSTRUCTIONS_PER_WEIGHT / dev.warp_size
    block_s = issued / (ISSUE_PER_CLOCK * dev.clock_hz)
    # Sums are float32 FMAs on at most as many lanes as there are.
    block_s = max(block_s, 2.0 * weights * dev.sm_count / dev.fma_float32_flops_per_s)
    if shape.has_norm:
        norm_s = shape.k * NORM_FLOPS_PER_ELEMENT * dev.sm_count / dev.fma_float32_flops_per_s
        block_s += norm_s
    moved = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    missing = max(0.0, 1 - dev.l2_bytes * L2_SHARE / shape.weight_bytes)
    x_reads = tiles_n * (2 if shape.has_norm else 1)
    kernel = Kernel(
        blocks=rows * tiles_n,
        block_compute_s=block_s,
        longest_block_s=block_s,
        chain_s=(steps + 1) * MEMORY_LATENCY_S,
        dram_bytes=shape.weight_bytes * (1 + (rows - 1) * missing) + moved,
        l2_bytes=rows * (shape.weight_bytes + x_reads * shape.x_row_bytes) + moved,
        dram_efficiency=GEMV_DRAM_EFFICIENCY,
    )
    rest = price_kernel(kernel, plan, foot, dev, shape.flops(rows))
    prologue = GEMV_PROLOGUE_LOADS if shape.has_norm else GEMV_FILL_LOADS
    return replace(rest, seconds=rest.seconds + prologue * MEMORY_LATENCY_S)


def _matmul_rate(
    shape: MatmulShape, plan: TilePlan, foot: Footprint, dev: DeviceSpec, blocks: int
) -> float:
    """Return the flop/s of one multiprocessor."""
    columns = plan.block_n * shape.parts
    words, filled = plan.reg_m + plan.reg_n * shape.parts, plan.block_m + columns
    tile = plan.reg_m * plan.reg_n * shape.parts
    clocks = simt_clocks(foot.threads, tile, words, filled, dev)
    hidden = latency_hidden(tile, foot, dev, blocks)
    return hidden * 2.0 * plan.block_m * columns * dev.clock_hz / clocks
