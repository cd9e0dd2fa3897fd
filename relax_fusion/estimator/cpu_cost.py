"""Price of one fused kernel on a CPU: register tiles, walked by parallel tasks.

The time is the parallel regions, and then the larger of two: DRAM traffic, which the prefetchers
overlap with everything else; and arithmetic on the busiest core plus what it loads from its second
level cache, which are added, because out-of-order execution hides only part of those loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention
from .causal import visible_blocks
from .footprint import Footprint, attention_width
from .gpu_cost import attention_qo_bytes
from .prediction import DRAM_EFFICIENCY, HALF_DTYPES, Bound, Prediction, ceil_div, largest
from .shape import AttentionSize, MatmulShape

LOADS_PER_CYCLE = 2
"""Vector loads that a core starts each cycle (Zen and Skylake: two load ports)."""

FMA_LATENCY_CYCLES = 4
"""Cycles until an accumulator can be added to again (Zen and Skylake)."""

CONVERT_CYCLES = 1
"""Cycles that turning a vector of 16-bit floats into float32 adds (Zen: two micro-operations)."""

REDUCE_CYCLES_PER_LEVEL = 2
"""Cycles per halving when the lanes of one accumulator are added up.  Counted: shuffle and add."""

NORM_CYCLES_PER_VECTOR = 4
"""Cycles per vector of x: load, square-add, scale, store.  Counted."""

EXP_CYCLES = 20
"""Cycles of one exponential.  Assumed: a scalar call of the C library's expf."""

STAGE_CYCLES = 1
"""Cycles per key or value feature copied into its tile.  Assumed: a scalar load and store, as keys
are transposed on the way."""

RESCALE_CYCLES_PER_VECTOR = 2
"""Cycles per vector of the result that a key tile's new maximum rescales: load, multiply, store."""


@dataclass(frozen=True)
class _Traffic:
    """Cycles of the busiest core and bytes of all of them."""

    cycles: float
    dram_bytes: float
    l2_bytes: float
    regions: int
    tasks: int


def matmul_on_cpu(
    shape: MatmulShape, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Price the fused norm and matmul at `rows` rows."""
    tasks = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
    row_tiles = ceil_div(rows, plan.reg_m)
    column_tiles = ceil_div(plan.block_n, plan.reg_n)
    tile_cycles = max(_tile_cycles(shape, plan, dev, layout) for layout in shape.layouts)
    cycles = ceil_div(tasks, dev.sm_count) * row_tiles * column_tiles * tile_cycles
    norm_vectors = ceil_div(rows, dev.sm_count) * shape.k * 4 / dev.vector_bytes
    regions = 1
    if shape.has_norm:
        regions = 2
        cycles += norm_vectors * NORM_CYCLES_PER_VECTOR
    dram, l2 = _matmul_bytes(shape, plan, foot, dev, rows)
    traffic = _Traffic(cycles, dram, l2, regions, tasks)
    return _finish(traffic, dev, shape.flops(rows))


def _tile_cycles(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, layout: str) -> float:
    """Return the cycles of one register tile over all of k."""
    along_k = layout == "nk"
    columns = plan.reg_n * shape.parts
    weight_vectors = columns if along_k else columns / plan.lanes
    sums = plan.reg_m * weight_vectors
    loads = plan.reg_m + weight_vectors
    convert = weight_vectors * CONVERT_CYCLES if shape.dtype in HALF_DTYPES else 0
    step = max(sums / dev.fma_per_cycle, loads / LOADS_PER_CYCLE + convert, FMA_LATENCY_CYCLES)
    if not along_k:
        return shape.k * step
    levels = math.log2(plan.lanes) if plan.lanes > 1 else 0
    return shape.k / plan.lanes * step + sums * levels * REDUCE_CYCLES_PER_LEVEL


def _matmul_bytes(
    shape: MatmulShape, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> tuple[float, float]:
    """Return the bytes that come from DRAM and those that come from the second-level caches."""
    row_blocks = ceil_div(rows, plan.block_m)
    task_weight_bytes = plan.block_n * shape.k * shape.parts * shape.in_bytes
    walks = 1 if task_weight_bytes <= dev.l2_bytes else row_blocks
    moved = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    dram = float(shape.weight_bytes * walks + moved)
    column_tiles = sum(ceil_div(n, plan.reg_n) for n in shape.n_parts)
    panel_bytes = rows * shape.k * 4.0
    l2 = float(shape.weight_bytes * row_blocks)
    if foot.scratch_bytes > dev.l1_bytes:
        # Each column tile streams the rows again, each row tile the weights of the column tile.
        again = panel_bytes * column_tiles
        if foot.scratch_bytes > dev.l2_bytes:
            dram += again
        else:
            l2 += again
    return dram, l2


def attention_on_cpu(
    work: Attention, plan: TilePlan, foot: Footprint, dev: DeviceSpec, size: AttentionSize
) -> Prediction:
    """Price the fused attention at `size`; tiles that a causal mask hides are skipped."""
    b, d = DTYPE_BYTES[work.dtype], work.head_dim + work.v_dim
    tasks = size.batch * work.q_heads * ceil_div(size.q_len, plan.block_m)
    mean_steps, most_steps = visible_blocks(work, plan, size)
    scores = plan.block_m * plan.block_n
    vectors = attention_width(plan) / plan.lanes
    sums, loads = plan.reg_m * vectors, plan.reg_m + vectors
    tile = max(sums / dev.fma_per_cycle, loads / LOADS_PER_CYCLE, FMA_LATENCY_CYCLES)
    step = scores * d / plan.lanes * tile / sums + scores * EXP_CYCLES
    step += plan.block_n * d * STAGE_CYCLES
    # Each key tile rescales the rows' results and computes one more exponential per row.
    step += plan.block_m * (work.v_dim / plan.lanes * RESCALE_CYCLES_PER_VECTOR + EXP_CYCLES)
    cycles = step * max(ceil_div(tasks, dev.sm_count) * mean_steps, most_steps)
    kv_bytes = size.batch * work.kv_heads * size.kv_len * d * b
    moved = attention_qo_bytes(work, size)
    kv_loads = tasks * mean_steps * plan.block_n * d * b
    # The query tiles of a head follow each other: its keys stay in L2 where they fit.
    head_bytes = size.kv_len * d * b + foot.scratch_bytes
    dram = moved + (kv_bytes if head_bytes <= dev.l2_bytes else max(kv_bytes, kv_loads))
    return _finish(_Traffic(cycles, dram, kv_loads, 1, tasks), dev, work.flops(*size))


def _finish(traffic: _Traffic, dev: DeviceSpec, flops: float) -> Prediction:
    terms: dict[Bound, float] = {
        "dram": traffic.dram_bytes / (dev.dram_bytes_per_s * DRAM_EFFICIENCY),
        "l2": traffic.l2_bytes / dev.l2_bytes_per_s,
        "compute": traffic.cycles / dev.clock_hz,
        "launch": traffic.regions * dev.launch_s,
    }
    seconds = terms["launch"] + max(terms["dram"], terms["l2"] + terms["compute"])
    waves = ceil_div(traffic.tasks, dev.sm_count)
    return Prediction(seconds, traffic.dram_bytes, flops, waves, largest(terms))
