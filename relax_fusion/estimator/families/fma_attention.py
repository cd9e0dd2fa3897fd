"""Attention by tiles of fused multiply-adds in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...hardware import DeviceSpec
from ...workload import DTYPE_BYTES, Attention
from .. import gpu_cost
from ..family import KernelFamily, Launches, Offer
from ..limits import block_limits, grid_limits, one_stage, vector_loads
from ..prediction import Footprint, Step, ceil_div, powers
from ..shape import Problem, Size, attention_qo_bytes, attention_size
from ..tile_plan import TilePlan
from . import attention_tiles
from .fma_tiles import latency_hidden, load_rounds, simt_clocks
from .matmuls import THREAD_OVERHEAD_REGISTERS

FAMILY = "fma_attention"
"""The name of the family of attention by FMAs."""

FMA_TILES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4))
"""Rows and columns of a thread's register tile."""


class FmaAttention(KernelFamily[Attention]):
    """A block has a tile of query rows in shared memory; FMAs multiply."""

    names = (FAMILY,)
    emitter = "relax_fusion.dlight_rules.attention:emit"
    error = 1.2
    fallback = True

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all whose keys are one tensor."""
        return problem.is_plain("gpu", Attention) and not problem.work.shared

    def plans(self, problem: Problem[Attention]) -> Iterator[Offer]:
        """Yield tiles whose register tiles keep at least half of the threads busy."""
        work = problem.work
        for block_m in powers(1, attention_tiles.most_q(work, 128)):
            for block_n in powers(16, attention_tiles.most_kv(work, 256)):
                for num_warps in (1, 2, 4, 8):
                    for reg_m, reg_n in FMA_TILES:
                        tiles = block_m * block_n // (reg_m * reg_n)
                        if block_m % reg_m == 0 and tiles >= num_warps * 16:
                            plan = TilePlan(
                                *(block_m, block_n, work.head_dim),
                                reg_m=reg_m,
                                reg_n=reg_n,
                                num_warps=num_warps,
                                family=FAMILY,
                            )
                            yield Offer(plan)

    def violations(self, plan: TilePlan, problem: Problem[Attention]) -> Iterator[str]:
        """Yield what a block has not; shared memory is declared statically."""
        work = problem.work
        yield from one_stage(plan)
        yield from attention_tiles.holds_features(plan, work)
        foot = _footprint(plan, work, problem.dev)
        yield from block_limits(foot, plan, problem, is_static=True)
        yield from vector_loads(plan, work.dtype, attention_tiles.head_extents(work))
        yield from grid_limits({"the heads": work.q_heads})  # queries lie along the first dimension

    def price(self, plan: TilePlan, problem: Problem[Attention]) -> Launches:
        """Price the launch; tiles that a causal mask hides are skipped."""
        foot = _footprint(plan, problem.work, problem.dev)
        return Launches(problem.dev, foot, partial(_steps, plan, foot, problem))


def _footprint(plan: TilePlan, work: Attention, dev: DeviceSpec) -> Footprint:
    """Return the tiles of queries, of keys or values (in turn), of scores, and row vectors."""
    bm, bn, d, dv = plan.block_m, plan.block_n, work.head_dim, work.v_dim
    width = attention_tiles.attention_width(plan)
    threads = max(plan.num_warps, 1) * dev.warp_size
    # A row of scores is one longer than its keys, against bank conflicts.
    scores = 4 * (bm * (bn + 1) + attention_tiles.ROW_VECTORS * bm)
    smem = (bm * d + bn * max(d, dv)) * DTYPE_BYTES[work.dtype] + scores
    tile = plan.reg_m * math.gcd(dv, width)
    kept = ceil_div(bm * dv // tile, threads) * tile
    operands = plan.reg_m * width + plan.reg_m + width
    return Footprint(smem, kept + operands + THREAD_OVERHEAD_REGISTERS, threads)


def _steps(
    plan: TilePlan, foot: Footprint, problem: Problem[Attention], of: Size
) -> Iterator[Step]:
    """Yield the launch."""
    work, dev = problem.work, problem.dev
    size = attention_size(work, of)
    b, d = DTYPE_BYTES[work.dtype], work.head_dim + work.v_dim
    group = work.q_heads // work.kv_heads  # whose rows share tiles
    tiles_m = ceil_div(size.q_len * group, plan.block_m)
    blocks = size.batch * work.kv_heads * tiles_m
    mean_steps, most_steps = attention_tiles.visible_blocks(
        work, plan, size, max(1, plan.block_m // group)
    )
    scores = plan.block_m * plan.block_n
    # The matrix units, the exponentials and the rest of the softmax take turns within a block.
    step_s = _attention_products_s(work, plan, foot, dev, blocks)
    step_s += scores / (gpu_cost.SFU_PER_CLOCK * dev.clock_hz)
    step_s += scores * gpu_cost.SOFTMAX_FLOPS_PER_SCORE * dev.sm_count / dev.fma_float32_flops_per_s
    keys = attention_tiles.visible_keys(work, size)
    kv_bytes = size.batch * work.kv_heads * keys * d * b
    qo_bytes = attention_qo_bytes(work, size)
    kv_loads = blocks * mean_steps * plan.block_n * d * b
    # Blocks of one wave share the keys of as many heads as the wave covers.
    slots = dev.sm_count * gpu_cost.resident_blocks(foot, dev)
    heads = min(size.batch * work.kv_heads, ceil_div(slots, tiles_m))
    wave_kv = heads * keys * d * b
    miss = max(0.0, 1 - dev.l2_bytes * gpu_cost.L2_SHARE / max(wave_kv, 1))
    # Keys and values are staged one after the other
    rounds = max(load_rounds(foot, plan.block_n * d * b), 2)
    yield Step(
        blocks=blocks,
        foot=foot,
        block_s=step_s * mean_steps,
        longest_block_s=step_s * most_steps,
        chain_s=(most_steps * rounds / plan.num_stages + 2) * gpu_cost.MEMORY_LATENCY_S,
        dram_bytes=qo_bytes + max(kv_bytes, kv_loads * miss),
        l2_bytes=qo_bytes + kv_loads,
        flops=work.flops(**size._asdict()),
    )


def _attention_products_s(
    work: Attention, plan: TilePlan, foot: Footprint, dev: DeviceSpec, blocks: int
) -> float:
    """Return the seconds that a block takes for the two products of one key tile."""
    bm, bn, d, dv = plan.block_m, plan.block_n, work.head_dim, work.v_dim
    width = attention_tiles.attention_width(plan)
    columns = math.gcd(bn, width), math.gcd(dv, width)
    seconds = 0.0
    for extent, column, depth in zip((bn, dv), columns, (d, bn), strict=True):
        tile = plan.reg_m * column
        # A thread without a tile of its own waits for those that have one.
        tiles = ceil_div(bm * extent // tile, foot.threads) * foot.threads
        clocks = simt_clocks(tiles, tile, plan.reg_m + column, 0, dev)
        seconds += depth * clocks / dev.clock_hz / latency_hidden(tile, foot, dev, blocks)
    return seconds
