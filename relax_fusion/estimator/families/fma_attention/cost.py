"""Price of a fused attention on plain FMAs of a GPU."""

from __future__ import annotations

import math

from ....hardware import DeviceSpec
from ....workload import DTYPE_BYTES, Attention
from ...causal import visible_blocks, visible_keys
from ...family import Footprint
from ...gpu_cost import (
    L2_SHARE,
    MEMORY_LATENCY_S,
    SFU_PER_CLOCK,
    SOFTMAX_FLOPS_PER_SCORE,
    Kernel,
    latency_hidden,
    load_rounds,
    price_kernel,
    resident_blocks,
    simt_clocks,
)
from ...prediction import Prediction, ceil_div
from ...shape import AttentionSize, attention_qo_bytes
from ...tile_plan import TilePlan
from ..attention_tiles import attention_width


def attention_on_gpu(
    work: Attention, plan: TilePlan, foot: Footprint, dev: DeviceSpec, size: AttentionSize
) -> Prediction:
    """Price the fused attention at `size`; tiles that a causal mask hides are skipped."""
    b, d = DTYPE_BYTES[work.dtype], work.head_dim + work.v_dim
    group = work.q_heads // work.kv_heads  # whose rows share tiles
    tiles_m = ceil_div(size.q_len * group, plan.block_m)
    blocks = size.batch * work.kv_heads * tiles_m
    mean_steps, most_steps = visible_blocks(work, plan, size, max(1, plan.block_m // group))
    scores = plan.block_m * plan.block_n
    # The matrix units, the exponentials and the rest of the softmax take turns within a block.
    step_s = _attention_products_s(work, plan, foot, dev, blocks)
    step_s += scores / (SFU_PER_CLOCK * dev.clock_hz)
    step_s += scores * SOFTMAX_FLOPS_PER_SCORE * dev.sm_count / dev.fma_float32_flops_per_s
    keys = visible_keys(work, size)
    kv_bytes = size.batch * work.kv_heads * keys * d * b
    qo_bytes = attention_qo_bytes(work, size)
    kv_loads = blocks * mean_steps * plan.block_n * d * b
    # Blocks of one wave share the keys of as many heads as the wave covers.
    slots = dev.sm_count * resident_blocks(foot, dev)
    heads = min(size.batch * work.kv_heads, ceil_div(slots, tiles_m))
    wave_kv = heads * keys * d * b
    miss = max(0.0, 1 - dev.l2_bytes * L2_SHARE / max(wave_kv, 1))
    # Keys and values are staged one after the other
    rounds = max(load_rounds(foot, plan.block_n * d * b), 2)
    kernel = Kernel(
        blocks=blocks,
        block_compute_s=step_s * mean_steps,
        longest_block_s=step_s * most_steps,
        chain_s=(most_steps * rounds / plan.num_stages + 2) * MEMORY_LATENCY_S,
        dram_bytes=qo_bytes + max(kv_bytes, kv_loads * miss),
        l2_bytes=qo_bytes + kv_loads,
    )
    flops = work.flops(**size._asdict())
    return price_kernel(kernel, plan, foot, dev, flops)


def _attention_products_s(
    work: Attention, plan: TilePlan, foot: Footprint, dev: DeviceSpec, blocks: int
) -> float:
    """Return the seconds that a block takes for the two products of one key tile."""
    bm, bn, d, dv = plan.block_m, plan.block_n, work.head_dim, work.v_dim
    width = attention_width(plan)
    columns = math.gcd(bn, width), math.gcd(dv, width)
    seconds = 0.0
    for extent, column, depth in zip((bn, dv), columns, (d, bn), strict=True):
        tile = plan.reg_m * column
        # A thread without a tile of its own waits for those that have one.
        tiles = ceil_div(bm * extent // tile, foot.threads) * foot.threads
        clocks = simt_clocks(tiles, tile, plan.reg_m + column, 0, dev)
        seconds += depth * clocks / dev.clock_hz / latency_hidden(tile, foot, dev, blocks)
    return seconds
