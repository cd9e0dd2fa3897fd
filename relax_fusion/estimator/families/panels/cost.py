"""Price of a kernel that repacks weights into panels, on a CPU."""

from __future__ import annotations

import math

from ....hardware import DeviceSpec
from ...cpu_cost import (
    FMA_LATENCY_CYCLES,
    L2_SPEED,
    L3_CYCLES_PER_BYTE,
    LOADS_PER_CYCLE,
    TILE_CYCLES,
    Traffic,
    finish,
    norm_cycles,
)
from ...prediction import Prediction, ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan

STORE_CYCLES_PER_VECTOR = 4
"""Cycles per accumulator and part of k: set to zero, stored, and read to be added up.  Counted."""

COPY_CYCLES_PER_VECTOR = 2
"""Cycles per packed vector that is loaded, converted and stored.  Counted; transposing adds a
shuffle for each halving of the lanes.  Measured on Zen 4 for 16 lanes: 9 with the time that the
weight takes from the third-level cache, where this and `L3_CYCLES_PER_BYTE` give 8.7."""

TILE_CYCLES_PER_ELEMENT = 1
"""Cycles per element of x that is copied into its tile.  Counted for squares of 4: 8 shuffles, 4
loads and 4 stores for 16 elements, at one a cycle."""


def price_panels(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    """Price the fused norm and matmul at `rows` rows, padded to whole tiles."""
    tiles = ceil_div(rows, plan.reg_m)
    tasks = sum(ceil_div(n, plan.reg_n) for n in shape.n_parts) * plan.split_m
    vectors = plan.reg_n // plan.lanes * shape.parts
    tile = shape.k * _step_cycles(shape, plan, dev, vectors)
    sums = plan.reg_m * vectors * STORE_CYCLES_PER_VECTOR + TILE_CYCLES
    tile += shape.k // plan.block_k * sums
    task = pack_cycles(shape, plan, vectors) + ceil_div(tiles, plan.split_m) * tile
    cycles = ceil_div(tasks, dev.sm_count) * task + norm_cycles(shape, dev, rows)
    copied = ceil_div(tiles, dev.sm_count) * plan.reg_m * shape.k
    cycles += copied * TILE_CYCLES_PER_ELEMENT
    moved = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    regions = len(shape.n_parts) + 1 + int(shape.has_norm)
    traffic = Traffic(cycles, float(shape.weight_bytes + moved), 0.0, regions, tasks)
    return finish(traffic, dev, shape.flops(rows))


def _step_cycles(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, vectors: int) -> float:
    """Return the cycles of one element of k; prefetchers load while the core computes."""
    sums, loads = plan.reg_m * vectors, plan.reg_m + vectors
    streamed = (plan.reg_m + vectors * plan.lanes) * 4
    panel, tile = shape.k * vectors * plan.lanes * 4, shape.k * plan.reg_m * 4
    fits = panel + tile <= dev.l2_bytes
    l2_cycles_per_byte = dev.sm_count * dev.clock_hz / (dev.l2_bytes_per_s * L2_SPEED)
    return max(
        sums / dev.fma_per_cycle,
        loads / LOADS_PER_CYCLE,
        FMA_LATENCY_CYCLES,
        streamed * (l2_cycles_per_byte if fits else L3_CYCLES_PER_BYTE),
    )


def pack_cycles(shape: MatmulShape, plan: TilePlan, vectors: int) -> float:
    """Return the cycles in which a task packs its panel, which streams by once."""
    shuffles = math.log2(plan.lanes) if "nk" in shape.layouts else 0
    read = plan.reg_n * shape.parts * shape.in_bytes * L3_CYCLES_PER_BYTE
    return shape.k * (vectors * (COPY_CYCLES_PER_VECTOR + shuffles) + read)
