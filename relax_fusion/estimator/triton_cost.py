"""What the launches of a plan of the Triton back end cost.

A matmul is bound by memory (the weights, or as many as are in flight), by what one multiprocessor
can fetch (tiles share operands only through L2), or by its matrix units; the kernels overlap the
three but not wholly.  Constants were fitted to timings of the kernels on an H200, float16, each
replay of a CUDA graph with a cold L2: `2026-11-21-judge_estimator.json`.
"""

from __future__ import annotations

from math import hypot

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import GatedFFN, NormMatmul
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from .shape import MatmulShape, matmul_shape
from .triton import accumulators, norm_inside, smem_bytes

FILL_S = {"gemv": 2.4e-6, "pointer": 0.3e-6, "stream": 0.36e-6, "persistent": 0.16e-6}
"""From the start of a kernel to its full stride, and from there to its last store; where tiles are
in flight, most of that is in their latency."""

NORM_S = {"gemv": 0.95e-6, "pointer": 0.95e-6, "stream": 0.42e-6, "persistent": 0.25e-6}
"""What a norm kernel in front adds beside its bytes: it begins, and the matmul waits, while both
are launched.  The ring of a streaming matmul is filled with weights in the meantime."""

NORM_INSIDE_S_PER_ROW = 0.18e-6
"""What statistics in the loop over k add: the operand passes through registers."""

REDUCE_S, REDUCE_S_PER_ROW = 3.4e-6, 4.0e-9
"""What the kernel that adds the parts of a split matmul costs."""

WAVE_S = 3.8e-6
"""What a further wave of thread blocks adds to their sums: they begin and end as the first did.  It
is hidden where memory is what all wait for."""

NEXT_PROJECTION_S = 2.0e-6
"""What the launch of another projection of the same rows costs."""

LATENCY_S = 0.91e-6
"""Between asking for memory and having it.  Bytes in flight over this is bandwidth."""

IDLE_STAGES = 0.04
"""Stages of a ring that are not in flight, on average: the one that is multiplied."""

FEED_BYTES_PER_CLOCK = {"pointer": 66.0, "stream": 60.0, "persistent": 177.0}
"""What one multiprocessor fetches from L2, at most (64, by the width of its port, at boost clock).
For persistent programs it is in their efficiency."""

EMPTY_BYTES_PER_CLOCK = 16.0
"""What the copy engine writes of rows beyond the last, which are zeros."""

TENSOR_EFFICIENCY = {
    "pointer": {64: 0.63, 128: 0.74},
    "stream": {64: 0.71, 128: 0.93},
    "persistent": {64: 0.60, 96: 0.73, 128: 0.84, 192: 0.865, 256: 0.90},
}
"""Reached part of the tensor cores' peak, by columns of a tile (of both products, where gated),
before what overlaps badly.  With the widest, an H200 is at the limit of its power."""

OVERLAP = 0.31
"""Part of the second longest of the times that the longest does not hide."""

ACCUMULATOR_OVERHEAD = 17
"""Registers of a thread beside its accumulators (Triton keeps operands in shared memory)."""

STREAM_THREADS, STREAM_REGISTERS = 256, 128
"""Threads of a streaming block, with its copying warp group, and the registers of each."""


def predict(work: NormMatmul | GatedFFN, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    """Return what the launches of `plan` cost at `rows` rows."""
    shape = matmul_shape(work, pairs=False)
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    side = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    moved = shape.weight_bytes + side
    # One launch for each projection; they follow one another without a gap
    seconds = dev.launch_s + FILL_S[plan.family] + (len(shape.n_parts) - 1) * NEXT_PROJECTION_S
    terms: dict[Bound, float] = {"launch": seconds}
    waves = 0
    for n in shape.n_parts:
        times, more = _matmul(shape, plan, dev, (rows, n))
        for bound, time in times.items():
            terms[bound] = terms.get(bound, 0.0) + time
        waves += more
        longest, second, *_ = sorted(times.values(), reverse=True)
        seconds += longest + OVERLAP * second
    if plan.split_k > 1:
        seconds += len(shape.n_parts) * (REDUCE_S + REDUCE_S_PER_ROW * rows)
    if work.norm is not None:
        if norm_inside(work, plan):
            seconds += NORM_INSIDE_S_PER_ROW * rows if plan.family == "pointer" else 0.0
        else:
            seconds += NORM_S[plan.family] + 2 * rows * shape.k * shape.in_bytes / bandwidth
    seconds += side / bandwidth
    return Prediction(seconds, moved, shape.flops(rows), waves, largest(terms))


def _matmul(
    shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, size: tuple[int, int]
) -> tuple[dict[Bound, float], int]:
    """Return the times by bound, and the waves, of one projection at (rows, columns)."""
    rows, n = size
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    weight_bytes = n * shape.parts * shape.k * shape.in_bytes
    if plan.family == "gemv":
        padding = ceil_div(shape.k, plan.block_k) * plan.block_k / shape.k
        return {"dram": weight_bytes * padding * rows / bandwidth, "compute": 0.0}, 1
    tiles = ceil_div(rows, plan.block_m) * ceil_div(n, plan.block_n) * plan.split_k
    columns = plan.block_n * shape.parts
    slots = dev.sm_count * _resident(plan, shape, dev)
    ahead = max(0.5, plan.num_stages - IDLE_STAGES) * plan.block_k * shape.in_bytes
    in_flight = min(tiles, slots) * columns * ahead
    # The nearer to what memory can give, the more in flight a little more takes
    memory = weight_bytes * hypot(1 / bandwidth, LATENCY_S / in_flight)
    share = ceil_div(tiles, dev.sm_count)  # of the busiest multiprocessor
    k = ceil_div(ceil_div(shape.k, plan.block_k), plan.split_k) * plan.block_k
    line = share * k * shape.in_bytes  # of one row or column of its tiles
    feed = line * (min(plan.block_m, rows) + columns) / FEED_BYTES_PER_CLOCK[plan.family]
    if plan.family != "pointer":
        feed += line * max(0, plan.block_m - rows) / EMPTY_BYTES_PER_CLOCK
    efficiency = TENSOR_EFFICIENCY[plan.family]
    reached = efficiency[max(c for c in efficiency if c <= max(columns, min(efficiency)))]
    per_sm = dev.tensor_flops_per_s(shape.dtype) / dev.sm_count * reached
    compute = share * 2.0 * plan.block_m * columns * k / per_sm
    waves = ceil_div(tiles, slots)
    if plan.family != "persistent":  # whose programs go on to their next tile without a pause
        compute += max(0.0, tiles / slots - 1) * WAVE_S
    return {"dram": memory, "l2": feed / dev.clock_hz, "compute": compute}, waves


def _resident(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    if plan.family == "persistent":
        return 1
    threads = 32 * plan.num_warps
    registers = accumulators(plan, shape) + ACCUMULATOR_OVERHEAD
    if plan.family == "stream":
        threads, registers = STREAM_THREADS, STREAM_REGISTERS
    by_smem = dev.smem_per_sm_bytes // max(1, smem_bytes(plan, shape))
    by_registers = dev.registers_per_sm // (registers * threads)
    return max(1, min(by_smem, by_registers, dev.max_threads_per_sm // threads))
