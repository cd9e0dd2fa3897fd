"""Attention by register tiles of a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...hardware import DeviceSpec
from ...workload import DTYPE_BYTES, Attention
from ..cpu_cost import (
    FMA_LATENCY_CYCLES,
    LOADS_PER_CYCLE,
    REDUCE_CYCLES_PER_LEVEL,
    SOFTMAX_CYCLES_PER_VECTOR,
    Traffic,
    finish,
)
from ..family import KernelFamily, Offer
from ..limits import core_limits, one_stage
from ..prediction import Footprint, Formula, Prediction, ceil_div, power_dividing, powers
from ..shape import Problem, Size, attention_qo_bytes, attention_size
from ..tile_plan import TilePlan
from . import attention_tiles
from .cpu_tiles import OPERAND_REGISTERS

FAMILY = "cpu_attention"
"""The name of the family of attention on CPUs."""

ROW_CYCLES = 40
"""Cycles per row and key tile: partial maxima and sums are folded, and the sum is rescaled by one
exponential.  Counted: the latencies of two folds."""

STAGE_CYCLES = 1
"""A feature of a key takes 1 cycle to be copied into its tile.  Assumed: a scalar load and store,
as keys are transposed on the way."""

COPY_CYCLES_PER_VECTOR = 2
"""A vector of values takes 2 cycles to be copied into its tile: load, convert, store.  Counted."""

RESCALE_CYCLES_PER_VECTOR = 2
"""A vector of the result takes 2 cycles to be rescaled by a key tile's new maximum: load, multiply,
store."""


class CpuAttention(KernelFamily[Attention]):
    """A task has a tile of query rows, and goes through the keys in blocks."""

    names = (FAMILY,)
    emitter = "relax_fusion.dlight_rules.attention:emit"
    error = 1.0

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all."""
        return problem.is_plain("cpu", Attention)

    def plans(self, problem: Problem[Attention]) -> Iterator[Offer]:
        """Yield blocks of rows and keys in powers of two, in register tiles of whole vectors."""
        work = problem.work
        lanes = power_dividing(work.v_dim, problem.dev.vector_bytes // 4)
        for block_m in powers(1, attention_tiles.most_q(work, 128)):
            for block_n in powers(16, attention_tiles.most_kv(work, 256)):
                # Tall first: of equal prices, 4 rows x 2 vectors measured best (Zen 5).
                for reg_m in reversed([*powers(1, min(block_m, 4))]):
                    for reg_n in powers(lanes, min(block_n, 4 * lanes)):
                        tile = (block_m, block_n, work.head_dim)
                        plan = TilePlan(*tile, reg_m=reg_m, reg_n=reg_n, lanes=lanes, family=FAMILY)
                        yield Offer(plan)

    def violations(self, plan: TilePlan, problem: Problem[Attention]) -> Iterator[str]:
        """Yield what a core has not, and what vectors do not divide."""
        work, dev = problem.work, problem.dev
        yield from one_stage(plan)
        yield from attention_tiles.holds_features(plan, work)
        foot = _footprint(plan, work)
        yield from core_limits(foot, plan, dev)
        if foot.scratch_bytes > dev.l2_bytes:
            yield (
                f"needs {foot.scratch_bytes} B of cache, a core of the {dev.label} has "
                f"{dev.l2_bytes} B of L2"
            )
        for name, value in (("block_n", plan.block_n), ("v_dim", work.v_dim)):
            if value % plan.lanes:
                yield f"lanes is {plan.lanes}, does not divide {name}={value}"

    def price(self, plan: TilePlan, problem: Problem[Attention]) -> Formula:
        """Price the key tiles that a row sees, by the model of register tiles, fitted on CPUs."""
        foot = _footprint(plan, problem.work)
        return Formula(foot, partial(_predict, plan, foot, problem))


def _footprint(plan: TilePlan, work: Attention) -> Footprint:
    """Return a register tile, and queries, keys or values (in turn), scores and results."""
    bm, bn, d, dv = plan.block_m, plan.block_n, work.head_dim, work.v_dim
    width = attention_tiles.attention_width(plan)
    vectors = plan.reg_m * ceil_div(width, plan.lanes)
    registers = vectors + plan.reg_m + OPERAND_REGISTERS
    # In float32, beside the result so far
    staged = bm * d + (0 if bm <= attention_tiles.FEW_ROWS else bn * max(d, dv))
    scratch_bytes = 4 * (staged + bm * bn + bm * dv + attention_tiles.ROW_VECTORS * bm)
    return Footprint(0, registers, 1, plan.reg_m * width * 4, scratch_bytes)


def _predict(plan: TilePlan, foot: Footprint, problem: Problem[Attention], of: Size) -> Prediction:
    """Return what a plan costs at a size."""
    work, dev = problem.work, problem.dev
    size = attention_size(work, of)
    b, d = DTYPE_BYTES[work.dtype], work.head_dim + work.v_dim
    group = work.q_heads // work.kv_heads
    tasks = size.batch * work.kv_heads * ceil_div(size.q_len * group, plan.block_m)
    mean_steps, most_steps = attention_tiles.visible_blocks(
        work, plan, size, rows=max(1, plan.block_m // group)
    )
    step = _attention_step(work, plan, dev)
    cycles = step * max(ceil_div(tasks, dev.sm_count) * mean_steps, most_steps)
    keys = attention_tiles.visible_keys(work, size)
    kv_bytes = size.batch * keys * (work.kv_heads * (d - work.shared) + work.shared) * b
    moved = attention_qo_bytes(work, size)
    kv_loads = tasks * mean_steps * plan.block_n * d * b
    # The row tiles of a head follow each other: its keys stay in L2 where they fit.
    head_bytes = keys * d * b + foot.scratch_bytes
    dram = moved + (kv_bytes if head_bytes <= dev.l2_bytes else max(kv_bytes, kv_loads))
    return finish(Traffic(cycles, dram, kv_loads, 1, tasks), dev, work.flops(**size._asdict()))


def _attention_step(work: Attention, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return the cycles that a task takes for one tile of keys, with operands in the first level.

    Few rows take each score as a dot product, whose lanes are folded; others stage what they read.
    """
    scores, d = plan.block_m * plan.block_n, work.head_dim + work.v_dim
    vectors = attention_tiles.attention_width(plan) / plan.lanes
    sums, loads = plan.reg_m * vectors, plan.reg_m + vectors
    tile = max(sums / dev.fma_per_cycle, loads / LOADS_PER_CYCLE, FMA_LATENCY_CYCLES)
    step = scores * d / plan.lanes * tile / sums + scores / plan.lanes * SOFTMAX_CYCLES_PER_VECTOR
    kept = work.v_dim / plan.lanes * RESCALE_CYCLES_PER_VECTOR
    step += plan.block_m * (kept + ROW_CYCLES)
    if plan.block_m <= attention_tiles.FEW_ROWS:
        return step + scores * math.log2(plan.lanes) * REDUCE_CYCLES_PER_LEVEL
    copied = work.v_dim / plan.lanes * COPY_CYCLES_PER_VECTOR
    return step + plan.block_n * (work.head_dim * STAGE_CYCLES + copied)
