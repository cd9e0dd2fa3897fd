"""Price of one fused kernel on a GPU.

A kernel is a number of equal blocks.  Its time is the launch, and then the larger of

- the roofline: memory (DRAM or L2, the slower) against arithmetic on the busiest multiprocessor.
  They overlap as well as the load pipeline and the other blocks of the multiprocessor allow;
- the chain of dependent loads that a single block waits for, once per wave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention
from .causal import visible_blocks, visible_keys
from .footprint import VECTOR_LOAD_BYTES, Footprint, attention_width, is_gemv
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from .shape import AttentionSize, MatmulShape

L2_EFFICIENCY = 0.85
"""Reached part of the L2 peak.  Measured on an H200: 8.1 to 9.5 of the derived 10.1 TB/s, reading
16 and 32 MB again and again."""

TENSOR_EFFICIENCY = 0.8
"""Reached part of the tensor-core peak.  Measured on an H200: 790 of 989 Tflop/s."""

SIMT_EFFICIENCY = 0.55
"""Reached part of what issue slots, FMA pipes and shared memory allow together.  With
`LATENCY_WARPS` fitted to ten plans measured on an H200 (16 to 1024 rows, float16), whose times the
model gives to within a factor of 1.2 (root mean square).  Loads are not wide, nor done ahead."""

ISSUE_PER_CLOCK = 4
"""Warp instructions that a multiprocessor starts each clock (CUDA guide: four schedulers)."""

MEMORY_LATENCY_S = 0.5e-6
"""One load from DRAM and the barrier behind it.  A chain of dependent loads on an idle H200 takes
0.15e-6 each from L2 and 0.33e-6 where half of them miss it (measured); the rest, for a device
under load, is assumed."""

IN_FLIGHT_BYTES_PER_THREAD = 4 * VECTOR_LOAD_BYTES
"""What a thread loads before it waits.  Assumed: four vector loads, held in registers."""

LATENCY_WARPS = 32
"""Independent warp instructions that hide latency.  Arithmetic alone needs 16 (4 schedulers * 4
cycles); 32, which covers loads from shared memory too, fits the plans of `SIMT_EFFICIENCY`."""

SMEM_WORDS_PER_CLOCK = 32
"""Four-byte words that shared memory delivers per clock and SM (CUDA guide: 32 banks)."""

SFU_PER_CLOCK = 16
"""Exponentials per clock and SM (CUDA guide, throughput of native arithmetic instructions)."""

SOFTMAX_FLOPS_PER_SCORE = 8
"""Scale, mask, maximum, subtract, sum, convert, rescale.  Counted; with `SFU_PER_CLOCK` it gives
81 us for BERT-base at batch 32 on an H200, where Triton's FlexAttention measured 85 us."""

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

WORKSPACE_BYTES = 4
"""Of a normalised element between the two kernels: float32."""

NORM_CHAIN_LOADS = 4
"""Dependent trips of a row through the norm kernel: x, the statistics, x again, gamma.  Counted."""

L2_SHARE = 0.5
"""Part of L2 that data to be read again can count on.  Assumed: the rest is streamed through."""


@dataclass(frozen=True)
class _Kernel:
    """A kernel as its blocks: what one computes and waits for, and what all of them move."""

    blocks: int
    block_compute_s: float
    longest_block_s: float
    chain_s: float
    dram_bytes: float
    l2_bytes: float
    dram_efficiency: float = DRAM_EFFICIENCY


def matmul_on_gpu(
    shape: MatmulShape, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Price the fused norm and matmul at `rows` rows.

    Neighbouring blocks are taken to share their columns (the row tile is the fastest index of the
    grid), so weights come from DRAM once, and x once per wave where L2 cannot hold it.
    """
    if is_gemv(plan, shape.layouts):
        return _gemv_on_gpu(shape, plan, foot, dev, rows)
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
    chain = steps * _load_rounds(foot, lines * plan.block_k * shape.in_bytes)
    flops = 2.0 * plan.block_m * plan.block_n * shape.parts * k_padded
    block_s = flops / _matmul_rate(shape, plan, foot, dev, blocks)
    kernel = _Kernel(
        blocks=blocks,
        block_compute_s=block_s,
        longest_block_s=block_s,
        chain_s=(chain / plan.num_stages + 2) * MEMORY_LATENCY_S,
        dram_bytes=shape.weight_bytes + x_bytes * x_reads + stores,
        l2_bytes=tiles_m * shape.weight_bytes + tiles_n * x_bytes + stores,
    )
    whole = _finish(kernel, plan, foot, dev, shape.flops(rows))
    return _after_norm(whole, shape, dev, rows) if shape.has_norm else whole


def _after_norm(rest: Prediction, shape: MatmulShape, dev: DeviceSpec, rows: int) -> Prediction:
    """Add a kernel that writes normalised rows in float32, one thread block a row."""
    moved = rows * (shape.x_row_bytes + shape.k * WORKSPACE_BYTES)
    streamed = moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    waves = ceil_div(rows, dev.sm_count * 2)
    seconds = dev.launch_s + max(streamed, waves * NORM_CHAIN_LOADS * MEMORY_LATENCY_S)
    return replace(rest, seconds=rest.seconds + seconds, dram_bytes=rest.dram_bytes + moved)


def _gemv_on_gpu(
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
    kernel = _Kernel(
        blocks=rows * tiles_n,
        block_compute_s=block_s,
        longest_block_s=block_s,
        chain_s=(steps + 1) * MEMORY_LATENCY_S,
        dram_bytes=shape.weight_bytes * (1 + (rows - 1) * missing) + moved,
        l2_bytes=rows * (shape.weight_bytes + x_reads * shape.x_row_bytes) + moved,
        dram_efficiency=GEMV_DRAM_EFFICIENCY,
    )
    rest = _finish(kernel, plan, foot, dev, shape.flops(rows))
    prologue_s = GEMV_PROLOGUE_LOADS * MEMORY_LATENCY_S if shape.has_norm else 0.0
    return replace(rest, seconds=rest.seconds + prologue_s)


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
    rounds = max(_load_rounds(foot, plan.block_n * d * b), 2)
    kernel = _Kernel(
        blocks=blocks,
        block_compute_s=step_s * mean_steps,
        longest_block_s=step_s * most_steps,
        chain_s=(most_steps * rounds / plan.num_stages + 2) * MEMORY_LATENCY_S,
        dram_bytes=qo_bytes + max(kv_bytes, kv_loads * miss),
        l2_bytes=qo_bytes + kv_loads,
    )
    flops = work.flops(*size)
    return _finish(kernel, plan, foot, dev, flops)


def attention_qo_bytes(work: Attention, size: AttentionSize) -> int:
    """Return the bytes of the query, the result, the bias and the mask."""
    rows = size.batch * work.q_heads * size.q_len
    moved = rows * work.head_dim * DTYPE_BYTES[work.dtype]
    moved += rows * work.v_dim * DTYPE_BYTES[work.out_dtype]
    full = (size.batch, work.q_heads, size.q_len, size.kv_len)
    for dims, each in ((work.bias_dims, DTYPE_BYTES[work.bias_dtype]), (work.mask_dims, 1)):
        if dims is not None:
            sizes = zip(full, dims, strict=True)
            moved += each * math.prod(n for n, is_full in sizes if is_full)
    return moved


def resident_blocks(foot: Footprint, dev: DeviceSpec) -> int:
    """Return how many blocks a multiprocessor holds at once (at least 1)."""
    registers = foot.registers_per_thread * foot.threads
    return max(
        1,
        min(
            dev.max_blocks_per_sm,
            dev.smem_per_sm_bytes // max(foot.smem_bytes, 1),
            dev.max_threads_per_sm // foot.threads,
            dev.registers_per_sm // registers,
        ),
    )


def _load_rounds(foot: Footprint, tile_bytes: int) -> int:
    """Return the dependent rounds of loads that bring a tile."""
    return ceil_div(tile_bytes, foot.threads * IN_FLIGHT_BYTES_PER_THREAD)


def _matmul_rate(
    shape: MatmulShape, plan: TilePlan, foot: Footprint, dev: DeviceSpec, blocks: int
) -> float:
    """Return the flop/s of one multiprocessor."""
    columns = plan.block_n * shape.parts
    words, filled = plan.reg_m + plan.reg_n * shape.parts, plan.block_m + columns
    tile = plan.reg_m * plan.reg_n * shape.parts
    clocks = _simt_clocks(foot.threads, tile, words, filled, dev)
    hidden = _latency_hidden(tile, foot, dev, blocks)
    return hidden * 2.0 * plan.block_m * columns * dev.clock_hz / clocks


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
        clocks = _simt_clocks(tiles, tile, plan.reg_m + column, 0, dev)
        seconds += depth * clocks / dev.clock_hz / _latency_hidden(tile, foot, dev, blocks)
    return seconds


def _simt_clocks(tiles: int, tile: int, words: int, filled: int, dev: DeviceSpec) -> float:
    """Return the clocks in which a block takes its register tiles one reduction step further.

    Each of `tiles` does `tile` FMAs on `words` operands that its thread loads from shared memory,
    where the block put `filled` words for the step.
    """
    warps = tiles / dev.warp_size
    pipes = dev.fma_float32_flops_per_s / (dev.sm_count * dev.clock_hz * 2)
    smem = (tiles * words + filled) / SMEM_WORDS_PER_CLOCK
    clocks = max(tiles * tile / pipes, warps * (tile + words) / ISSUE_PER_CLOCK, smem)
    return clocks / SIMT_EFFICIENCY


def _latency_hidden(tile: int, foot: Footprint, dev: DeviceSpec, blocks: int) -> float:
    """Return the part of the rate that the independent FMAs of the resident warps sustain."""
    warps = _active_blocks(blocks, foot, dev) * foot.threads / dev.warp_size
    return min(1.0, warps * min(tile, 4) / LATENCY_WARPS)


def _active_blocks(blocks: int, foot: Footprint, dev: DeviceSpec) -> int:
    return min(resident_blocks(foot, dev), ceil_div(blocks, dev.sm_count))


def _finish(
    kernel: _Kernel, plan: TilePlan, foot: Footprint, dev: DeviceSpec, flops: float
) -> Prediction:
    """Put the terms together."""
    per_sm = ceil_div(kernel.blocks, dev.sm_count)
    resident = resident_blocks(foot, dev)
    waves = ceil_div(kernel.blocks, dev.sm_count * resident)
    dram = kernel.dram_bytes / (dev.dram_bytes_per_s * kernel.dram_efficiency)
    l2 = kernel.l2_bytes / (dev.l2_bytes_per_s * L2_EFFICIENCY)
    compute = max(per_sm * kernel.block_compute_s, kernel.longest_block_s)
    memory = max(dram, l2)
    exposed = min(memory, compute) / (plan.num_stages * resident)
    chain = waves * kernel.chain_s
    seconds = dev.launch_s + max(chain, max(memory, compute) + exposed)
    terms: dict[Bound, float] = {
        "dram": dram,
        "l2": l2,
        "compute": compute,
        "latency": chain,
        "launch": dev.launch_s,
    }
    return Prediction(seconds, kernel.dram_bytes, flops, waves, largest(terms))
