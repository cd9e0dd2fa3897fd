"""What the launches of a plan of the Triton back end cost.

Tiles run in waves, as many at a time as the multiprocessors hold.  A wave is bound by memory (the
weights, or as many as are in flight), by what one multiprocessor can fetch (tiles share operands
only through L2), or by its matrix units; the kernels overlap the three but not wholly.  Constants
were fitted to timings of the kernels on an H200, float16, each replay of a CUDA graph with a cold
L2: `2026-11-21-judge_estimator.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....hardware import DeviceSpec
from ...prediction import ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from .tiles import accumulators, smem_bytes

READ_EFFICIENCY = 0.935
"""Reached part of the peak bandwidth where all but nothing is written: weights."""

FILL_S = {"gemv": 2.4e-6, "pointer": 3.4e-6, "stream": 3.7e-6, "persistent": 2.8e-6}
"""From the start of a kernel to its full stride, and from there to its last store."""

NORM_S = {"gemv": 0.95e-6, "pointer": 0.78e-6, "stream": 0.28e-6, "persistent": 0.32e-6}
"""What a norm kernel in front adds beside its bytes: it begins, and the matmul waits, while both
are launched.  The ring of a streaming matmul is filled with weights in the meantime."""

NORM_INSIDE_S_PER_ROW = 0.05e-6
"""What statistics in the loop over k add: the operand passes through registers."""

REDUCE_S, REDUCE_S_PER_ROW = 2.4e-6, 11e-9
"""What the kernel that adds the parts of a split matmul costs."""

WAVE_S = 3.7e-6
"""What a further wave of thread blocks adds to their sums: they begin and end as the first did.  It
is hidden where memory is what all wait for."""

STEP_S = {"pointer": 0.0, "stream": 0.037e-6, "persistent": 0.0}
"""What a step along k adds to the time of its products.  A consumer of the ring waits for them
before it gives the slot back.  In persistent programs the other warp group multiplies meanwhile."""

NEXT_LAUNCH_S = 2.0e-6
"""What a further launch for other projections of the same rows costs; it follows without a gap."""

EARLY_S = {"pointer": 1.8e-6}
"""What a kernel of few rows has done before the kernel in front of it ends: it is launched early,
and asks for weights before it waits.  Measured on an H200 for the second matmuls of MCFuser's G1 to
G9: 1.4 to 3.6 us, beside what of launching overlaps (`2026-11-23-bench_chains.json`)."""

LATENCY_S = 0.9e-6
"""Between asking for memory and having it.  Bytes in flight over this is bandwidth."""

FEED_BYTES_PER_CLOCK = {"pointer": 66.0, "stream": 70.0, "persistent": 125.0}
"""What one multiprocessor fetches from L2, at most (64, by the width of its port, at boost clock).
For persistent programs it is in their efficiency."""

EMPTY_BYTES_PER_CLOCK = 10.0
"""What the copy engine writes of rows beyond the last, which are zeros."""

TENSOR_EFFICIENCY = {
    "pointer": {64: 0.70, 128: 0.95},
    "stream": {64: 0.77, 128: 0.91},
    "persistent": {64: 0.65, 96: 0.74, 128: 0.84, 160: 0.79, 192: 0.865, 256: 0.89},
}
"""Reached part of the tensor cores' peak, by columns of a tile (of both products, where gated),
before what overlaps badly.  With the widest, an H200 is at the limit of its power."""

WIDE_LINE_BYTES, NARROW_LINES, IN_STEP = 256, {"pointer": 0.05, "stream": 0.025}, 0.7
"""`WIDE_LINE_BYTES`: a tile that reads at least so many bytes of a weight's row at once loses no
time in memory.  `NARROW_LINES`: the part that reading fewer adds to that time.  `IN_STEP`: the part
of this addition that falls away where all programs run in one wave: they go through k together, and
so open the same pages of memory; those of several waves drift apart."""

SYSTEM_SMEM_BYTES = 1 << 10
"""Shared memory that the system keeps for itself in each thread block."""

IDLE_LANES = 0.07
"""What lanes beyond the end of a row add, as a part of what as many others take: they load
nothing."""

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

STREAM_THREADS, STREAM_REGISTERS = 256, 128
"""Threads of a streaming block, with its copying warp group, and the registers of each."""


def waves(
    shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, rows: int, columns: Sequence[int]
) -> Iterator[tuple[int, float, float, float]]:
    """Yield how many waves a launch has, and their times in memory, L2 and tensor cores.

    The last, which may fill only a part of the device, comes by itself.  `columns` are those of
    each product.
    """
    n = sum(columns)
    read = dev.dram_bytes_per_s * READ_EFFICIENCY
    weight_bytes = n * shape.parts * shape.k * shape.in_bytes
    if plan.family == "gemv":
        idle = ceil_div(shape.k, plan.block_k) * plan.block_k / shape.k - 1
        yield 1, weight_bytes * (1 + IDLE_LANES * idle) * rows / read, 0.0, 0.0
        return
    column_tiles = sum(ceil_div(c, plan.block_n) for c in columns)
    tiles = ceil_div(rows, plan.block_m) * column_tiles * plan.split_k
    slots = dev.sm_count * _resident(plan, shape, dev)
    full, rest = divmod(tiles, slots)
    in_flight = shape.parts * plan.block_n * plan.num_stages * plan.block_k * shape.in_bytes
    waves = ceil_div(tiles, slots)
    if plan.family in NARROW_LINES and plan.block_k * shape.in_bytes < WIDE_LINE_BYTES:
        read /= 1 + NARROW_LINES[plan.family] * (1 - IN_STEP / waves)
    feed, compute = _tile_seconds(shape, plan, dev, rows)
    if plan.family != "persistent":  # whose programs go on to their next tile without a pause
        compute += WAVE_S * (1 - 1 / waves)
    for count, wide in ((full, slots), (1, rest)):
        if count and wide:
            # The nearer to what memory can give, the more in flight a little more takes
            slowness = ((1 / read) ** 3 + (LATENCY_S / (wide * in_flight)) ** 3) ** (1 / 3)
            share = ceil_div(wide, dev.sm_count)  # of the busiest multiprocessor
            yield count, weight_bytes * wide / tiles * slowness, share * feed, share * compute


def _tile_seconds(
    shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, rows: int
) -> tuple[float, float]:
    """Return how long one multiprocessor takes to fetch and to multiply one tile."""
    columns = plan.block_n * shape.parts
    k = ceil_div(ceil_div(shape.k, plan.block_k), plan.split_k) * plan.block_k
    line = k * shape.in_bytes  # of one row or column
    feed = line * (min(plan.block_m, rows) + columns) / FEED_BYTES_PER_CLOCK[plan.family]
    if plan.family != "pointer":
        feed = max(feed, line * max(0, plan.block_m - rows) / EMPTY_BYTES_PER_CLOCK)
    efficiency = TENSOR_EFFICIENCY[plan.family]
    reached = efficiency[max(c for c in efficiency if c <= max(columns, min(efficiency)))]
    per_sm = dev.tensor_flops_per_s(shape.dtype) / dev.sm_count * reached
    compute = 2.0 * plan.block_m * columns * k / per_sm + k / plan.block_k * STEP_S[plan.family]
    return feed / dev.clock_hz, compute + _activation_s(shape, plan, dev)


def _activation_s(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return how long one multiprocessor takes for the activations of one tile."""
    per_sm = SLOTS_PART * dev.fma_float32_flops_per_s / 2 / dev.sm_count
    return plan.block_m * plan.block_n * shape.slots / per_sm


def code_s(shape: MatmulShape, plan: TilePlan) -> float:
    """Return how long a kernel waits for instructions that are fetched while it runs."""
    if plan.family == "gemv" or not shape.slots:
        return 0.0
    code = accumulators(plan, shape) * (shape.slots + OTHER_SLOTS) * SLOT_BYTES
    return max(0.0, code - CODE_BYTES) * CODE_S_PER_BYTE


def _resident(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    if plan.family == "persistent":
        return 1
    threads = 32 * plan.num_warps
    registers = accumulators(plan, shape) + ACCUMULATOR_OVERHEAD
    if plan.family == "stream":
        threads, registers = STREAM_THREADS, STREAM_REGISTERS
    by_smem = dev.smem_per_sm_bytes // (smem_bytes(plan, shape) + SYSTEM_SMEM_BYTES)
    by_registers = dev.registers_per_sm // (registers * threads)
    return max(1, min(by_smem, by_registers, dev.max_threads_per_sm // threads))
