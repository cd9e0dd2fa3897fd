"""Tiles of fused multiply-adds in shared memory, for many rows on any GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...hardware import DeviceSpec
from ..family import OWN_BASELINE_ERROR, Launches, Offer
from ..gpu_cost import ISSUE_PER_CLOCK, L2_SHARE, MEMORY_LATENCY_S, resident_blocks
from ..limits import VECTOR_LOAD_BYTES, grid_limits, one_stage
from ..prediction import Footprint, Step, ceil_div, next_power, power_dividing, powers
from ..shape import MatmulShape, Size, rows_at
from ..tile_plan import TilePlan
from .matmuls import (
    DOT_PRODUCTS,
    FMA_TILES,
    THREAD_OVERHEAD_REGISTERS,
    GpuMatmul,
    MatmulProblem,
    columns_fit,
    matmul_limits,
    refuses_integers,
    refuses_scattered,
)

MAX_BLOCK_M = 128
"""Beyond 128 rows a block gains no reuse that shared memory could hold."""

THREADS = (32, 64, 128, 256)

WORKSPACE_BYTES = 4
"""A normalised element has 4 bytes between the two kernels: float32."""

NORM_BLOCKS = 2
"""A multiprocessor holds 2 blocks of the norm kernel.  Assumed."""

NORM_CHAIN_LOADS = 4
"""A row makes 4 dependent trips through the norm kernel: x, the statistics, x again, gamma.
Counted."""

SIMT_EFFICIENCY = 0.55
"""Kernels reach this part of what issue slots, FMA pipes and shared memory allow together.  With
`LATENCY_WARPS` fitted to ten plans measured on an H200 (16 to 1024 rows, float16), whose times the
model gives to within a factor of 1.2 (root mean square).  Loads are not wide, nor done ahead."""

IN_FLIGHT_BYTES_PER_THREAD = 4 * VECTOR_LOAD_BYTES
"""A thread loads so many bytes before it waits.  Assumed: four vector loads, held in registers."""

LATENCY_WARPS = 32
"""So many independent warp instructions hide latency.  Arithmetic alone needs 16 (4 schedulers * 4
cycles); 32, which covers loads from shared memory too, fits the plans of `SIMT_EFFICIENCY`."""

SMEM_WORDS_PER_CLOCK = 32
"""Shared memory delivers 32 words of four bytes per clock and SM (CUDA guide: 32 banks)."""


class FmaTiles(GpuMatmul):
    """Norm, matmul or gated projections, by FMAs on tiles in shared memory."""

    names = (FMA_TILES,)
    emitter = "relax_fusion.dlight_rules.contraction_gpu:emit"
    error = OWN_BASELINE_ERROR
    fallback = True

    def refuses(self, problem: MatmulProblem) -> str | None:
        """Refuse integers, which would be added up as float32, and words across k."""
        return refuses_scattered(problem) or refuses_integers(problem, "tiles of FMAs")

    def plans(self, problem: MatmulProblem) -> Iterator[Offer]:
        """Yield register tiles not far from square, in blocks of one to eight warps."""
        shape, rows = problem.shape, problem.work.rows
        most_m, first_m = MAX_BLOCK_M, 2 if shape.layouts == {"nk"} else 1
        if isinstance(rows, int):
            most_m = max(first_m, min(most_m, next_power(rows)))
        blocks_k = _block_k(shape.k)
        for block_m, reg_m, reg_n, threads in _tiles(first_m, most_m):
            block_n = threads // (block_m // reg_m) * reg_n
            if not 16 <= block_n <= 256 or not columns_fit(shape, block_n):
                continue
            for block_k in blocks_k:
                plan = TilePlan(
                    *(block_m, block_n, block_k),
                    reg_m=reg_m,
                    reg_n=reg_n,
                    lanes=_lanes(shape, block_n, block_k),
                    num_warps=threads // 32,
                    family=FMA_TILES,
                )
                yield Offer(plan)

    def violations(self, plan: TilePlan, problem: MatmulProblem) -> Iterator[str]:
        """Yield what a block has not; shared memory is declared statically."""
        shape = problem.shape
        yield from one_stage(plan)
        if plan.block_m == 1 and shape.layouts == {"nk"}:
            yield f"block_m is 1, which is for family {DOT_PRODUCTS!r} where weights are [n, k]"
        if plan.block_k > shape.k:
            yield f"block_k is {plan.block_k}, the reduction has {shape.k} elements"
        foot = _footprint(plan, shape, problem.dev)
        yield from matmul_limits(foot, plan, problem, is_static=True)
        # Rows lie along the first dimension
        yield from grid_limits({"the columns": max(-(-n // plan.block_n) for n in shape.n_parts)})

    def price(self, plan: TilePlan, problem: MatmulProblem) -> Launches:
        """Price the norm's launch, if there is one, and the matmul's."""
        foot = _footprint(plan, problem.shape, problem.dev)
        return Launches(problem.dev, foot, partial(_steps, plan, foot, problem))


def _footprint(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Footprint:
    """Return both tiles in shared memory, and a thread's sums and operands."""
    lines = plan.block_m + shape.parts * plan.block_n
    sums = plan.reg_m * plan.reg_n * shape.parts
    operands = plan.reg_m + plan.reg_n * shape.parts
    smem = lines * (plan.block_k + 1) * 4 * plan.num_stages  # rows padded by a word
    return Footprint(
        smem_bytes=smem if dev.smem_per_block_bytes else 0,  # else operands are not staged
        registers_per_thread=sums + operands + THREAD_OVERHEAD_REGISTERS,
        threads=(plan.block_m // plan.reg_m) * (plan.block_n // plan.reg_n),
    )


def _steps(plan: TilePlan, foot: Footprint, problem: MatmulProblem, size: Size) -> Iterator[Step]:
    """Yield the launches.

    Neighbouring blocks are taken to share their columns (the row tile is the fastest index of the
    grid), so weights come from DRAM once, and x once per wave where L2 cannot hold it.
    """
    shape, dev, rows = problem.shape, problem.dev, rows_at(size)
    tiles_m = ceil_div(rows, plan.block_m)
    tiles_n = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
    blocks = tiles_m * tiles_n
    waves = ceil_div(blocks, dev.sm_count * resident_blocks(foot, dev))
    x_bytes = rows * shape.x_row_bytes
    missing = max(0.0, 1 - dev.l2_bytes * L2_SHARE / x_bytes)
    x_reads = 1 + (waves - 1) * missing
    stores = rows * (shape.out_row_bytes + shape.side_row_bytes)
    if shape.has_norm:
        yield _norm_step(shape, dev, rows)
        x_bytes = rows * shape.k * WORKSPACE_BYTES
    steps = ceil_div(shape.k, plan.block_k)
    k_padded = steps * plan.block_k
    lines = plan.block_m + plan.block_n * shape.parts
    chain = steps * load_rounds(foot, lines * plan.block_k * shape.in_bytes)
    flops = 2.0 * plan.block_m * plan.block_n * shape.parts * k_padded
    yield Step(
        blocks=blocks,
        foot=foot,
        block_s=flops / _matmul_rate(shape, plan, foot, dev, blocks),
        chain_s=(chain / plan.num_stages + 2) * MEMORY_LATENCY_S,
        dram_bytes=shape.weight_bytes + x_bytes * x_reads + stores,
        l2_bytes=tiles_m * shape.weight_bytes + tiles_n * x_bytes + stores,
        flops=shape.flops(rows),
    )


def _tiles(first_m: int, most_m: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (block_m, reg_m, reg_n, threads) with register tiles not far from square."""
    for block_m in powers(first_m, most_m):
        for reg_m in powers(1, min(block_m, 8)):
            for reg_n in powers(1, 8):
                # Oblong tiles load more words per FMA; they pay only where there are no more rows.
                if (reg_n > 2 * reg_m and reg_m < block_m) or reg_m > 2 * reg_n:
                    continue
                # One warp alone waits at each barrier for its own loads; one row can feed no more.
                for threads in THREADS if block_m == 1 else THREADS[1:]:
                    if threads % (block_m // reg_m) == 0:
                        yield block_m, reg_m, reg_n, threads


def _block_k(k: int) -> list[int]:
    """Return the powers of two that divide k, else any divisors, else a tail for the last step."""
    wanted = [b for b in (8, 16, 32, 64, 128) if k % b == 0]
    if wanted:
        return wanted[-4:]
    divisors = [b for b in range(4, 65) if k % b == 0]
    return divisors[-3:] or ([min(k, 16)] if k < 64 else [16, 32])


def _lanes(shape: MatmulShape, block_n: int, block_k: int) -> int:
    """Return the widest vector load that the contiguous extents of tile and weights allow."""
    lanes = VECTOR_LOAD_BYTES // shape.in_bytes
    if "nk" in shape.layouts:
        lanes = min(lanes, power_dividing(block_k, lanes), power_dividing(shape.k, lanes))
    if "kn" in shape.layouts:
        lanes = min(power_dividing(n, lanes) for n in (block_n, *shape.contiguous))
    return lanes


def _norm_step(shape: MatmulShape, dev: DeviceSpec, rows: int) -> Step:
    """Return a launch that writes normalised rows in float32, one thread block a row."""
    return Step(
        blocks=rows,
        foot=Footprint(0, 1, dev.max_threads_per_sm // NORM_BLOCKS),
        block_s=0.0,
        dram_bytes=rows * (shape.x_row_bytes + shape.k * WORKSPACE_BYTES),
        chain_s=NORM_CHAIN_LOADS * MEMORY_LATENCY_S,
    )


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


def load_rounds(foot: Footprint, tile_bytes: int) -> int:
    """Return the dependent rounds of loads that bring a tile."""
    return ceil_div(tile_bytes, foot.threads * IN_FLIGHT_BYTES_PER_THREAD)


def simt_clocks(tiles: int, tile: int, words: int, filled: int, dev: DeviceSpec) -> float:
    """Return the clocks in which a block takes its register tiles one reduction step further.

    Each of `tiles` does `tile` FMAs on `words` operands that its thread loads from shared memory,
    where the block put `filled` words for the step.
    """
    warps = tiles / dev.warp_size
    pipes = dev.fma_float32_flops_per_s / (dev.sm_count * dev.clock_hz * 2)
    smem = (tiles * words + filled) / SMEM_WORDS_PER_CLOCK
    clocks = max(tiles * tile / pipes, warps * (tile + words) / ISSUE_PER_CLOCK, smem)
    return clocks / SIMT_EFFICIENCY


def latency_hidden(tile: int, foot: Footprint, dev: DeviceSpec, blocks: int) -> float:
    """Return the part of the rate that the independent FMAs of the resident warps sustain."""
    active = min(resident_blocks(foot, dev), ceil_div(blocks, dev.sm_count))
    return min(1.0, active * foot.threads / dev.warp_size * min(tile, 4) / LATENCY_WARPS)
