"""Price of a chain of two matmuls as one kernel on a CPU."""

from __future__ import annotations

from dataclasses import replace

from ....hardware import DeviceSpec
from ....workload import MatmulChain, extent
from ...cpu_cost import (
    CROWDING,
    FMA_LATENCY_CYCLES,
    L1_STREAMS,
    L2_SPEED,
    L3_CYCLES_PER_BYTE,
    LOADS_PER_CYCLE,
    TILE_CYCLES,
    Traffic,
    finish,
    matmul_on_cpu,
)
from ...prediction import Prediction, ceil_div, in_a_row, repeated
from ...shape import PRICED_BATCH, matmul_shape
from ...tile_plan import TilePlan
from ..panels.cost import COPY_CYCLES_PER_VECTOR, STORE_CYCLES_PER_VECTOR, pack_cycles
from ..panels.tiles import FAMILY as PANELS
from .tiles import is_packed, panel_columns, sum_parts


def matrices(work: MatmulChain) -> int:
    """Return how many matrices a batch is priced at."""
    return 1 if work.batch is None else extent(work.batch, PRICED_BATCH)


def predict(work: MatmulChain, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    """Return what the fused kernel costs at `rows` rows."""
    if plan.family == PANELS:
        return _in_blocks(work, plan, dev, rows)
    parts = [
        matmul_on_cpu(matmul_shape(part), replace(plan, block_k=part.k), dev, rows)
        for part in work.matmuls
    ]
    return in_a_row([repeated(p, matrices(work), dev) for p in parts])


def _in_blocks(work: MatmulChain, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    tiles = plan.block_m // plan.reg_m
    width = panel_columns(plan, work, 0)
    inner = tiles * ceil_div(work.r, width) * _tile(work.k, width, plan, dev)
    outer = tiles * ceil_div(work.n, plan.reg_n) * _tile(work.r, plan.reg_n, plan, dev)
    if work.dtype != "float32":
        inner += plan.block_m * work.k / plan.lanes * COPY_CYCLES_PER_VECTOR
    count = matrices(work)
    tasks = count * ceil_div(rows, plan.block_m)
    cycles = ceil_div(tasks, dev.sm_count) * (inner + outer + _streamed(work, plan, dev))
    packed = [which for which in range(2) if is_packed(work, plan, which)]
    cycles += sum(_pack(work, plan, which, dev) for which in packed)
    moved = work.bytes(rows=rows, batch=count)
    traffic = Traffic(cycles, float(sum(moved.values())), 0.0, 1 + len(packed), tasks)
    return finish(traffic, dev, work.flops(rows=rows, batch=count))


def _tile(depth: int, width: int, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return the cycles of one register tile, whose operands come from L2 unless they are small."""
    vectors = width // plan.lanes
    sums, loads = plan.reg_m * vectors, plan.reg_m + vectors
    walked = (plan.reg_m + width) * 4
    streamed = walked if walked * depth > dev.l1_bytes else 0
    crowding = max(1.0, (plan.reg_m + 1) / L1_STREAMS) ** CROWDING
    step = max(
        sums / dev.fma_per_cycle,
        loads / LOADS_PER_CYCLE,
        FMA_LATENCY_CYCLES,
        streamed * _l2_cycles_per_byte(dev) * crowding,
    )
    stored = sum_parts(plan, depth) * sums * STORE_CYCLES_PER_VECTOR
    return depth * step + stored + TILE_CYCLES


def _pack(work: MatmulChain, plan: TilePlan, which: int, dev: DeviceSpec) -> float:
    """Return the cycles in which the busiest core packs its part of a weight."""
    part, width = work.matmuls[which], panel_columns(plan, work, which)
    panel = replace(plan, block_n=width, reg_n=width)
    parts = sum_parts(plan, part.k)
    tasks = matrices(work) * ceil_div(part.n, width) * parts
    each = pack_cycles(matmul_shape(part), panel, width // plan.lanes) / parts
    return ceil_div(tasks, dev.sm_count) * each


def _streamed(work: MatmulChain, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return the cycles in which a task waits for the panels of B, once for each block of rows."""
    panels = work.r * work.n * 4
    fits = panels + work.k * work.r * 4 <= dev.l2_bytes
    return panels * (_l2_cycles_per_byte(dev) if fits else L3_CYCLES_PER_BYTE)


def _l2_cycles_per_byte(dev: DeviceSpec) -> float:
    return dev.sm_count * dev.clock_hz / (dev.l2_bytes_per_s * L2_SPEED)
