"""What a plan of the family "mma" costs: the norm in front, and waves of tiles.

A wave is bound by memory (weights come once, as the tiles of a wave share them in L2), by what one
multiprocessor fetches from L2, or by its matrix units.
"""

from __future__ import annotations

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import GatedFFN, NormMatmul
from .footprint import Footprint
from .gpu_cost import resident_blocks
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from .shape import matmul_shape

HOPPER_RATE = 0.62
"""Part of the tensor cores' peak of sm_90 that ``mma.sync`` reaches; its own instructions work on
operands in shared memory."""

FILL_S = 3.0e-6
"""From the start of a kernel to its full stride, and from there to its last store."""

WAVE_S = 1.5e-6
"""What a further wave of thread blocks adds: they begin and end as the first did."""

FEED_BYTES_PER_CLOCK = 60.0
"""What one multiprocessor fetches from L2, at most."""

OVERLAP = 0.2
"""Part of the second longest of the times that the longest does not hide."""


def predict(
    work: NormMatmul | GatedFFN, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Return what the launches of `plan` cost at `rows` rows."""
    shape = matmul_shape(work)
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    side = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    slots = dev.sm_count * resident_blocks(foot, dev)
    columns = plan.block_n * shape.parts
    depth = ceil_div(shape.k, plan.block_k) * plan.block_k
    rate = dev.tensor_flops_per_s(shape.dtype) / dev.sm_count * _reached(plan, shape.parts, dev)
    tile_compute = 2.0 * plan.block_m * columns * depth / rate
    fetched = (plan.block_m + columns) * depth * shape.in_bytes
    tile_feed = fetched / (FEED_BYTES_PER_CLOCK * dev.clock_hz)
    seconds, waves = dev.launch_s * len(shape.n_parts) + FILL_S, 0
    terms: dict[Bound, float] = {"launch": seconds, "dram": 0.0, "l2": 0.0, "compute": 0.0}
    for n in shape.n_parts:
        tiles = ceil_div(rows, plan.block_m) * ceil_div(n, plan.block_n)
        dram = n * shape.parts * shape.k * shape.in_bytes / bandwidth
        busiest = ceil_div(tiles, dev.sm_count)
        times: tuple[tuple[Bound, float], ...] = (
            ("dram", dram),
            ("l2", busiest * tile_feed),
            ("compute", busiest * tile_compute),
        )
        for name, value in times:
            terms[name] += value
        *_, second, longest = sorted(value for _, value in times)
        count = ceil_div(tiles, slots)
        seconds += longest + OVERLAP * second + (count - 1) * WAVE_S
        waves += count
    if shape.has_norm:
        moved = rows * (shape.x_row_bytes + shape.k * shape.in_bytes)
        seconds += dev.launch_s + moved / bandwidth
    seconds += side / bandwidth
    return Prediction(seconds, shape.weight_bytes + side, shape.flops(rows), waves, largest(terms))


def _reached(plan: TilePlan, parts: int, dev: DeviceSpec) -> float:
    """Return the part of the tensor cores' peak that the tiles of `plan` reach."""
    whole = HOPPER_RATE if dev.arch.startswith("sm_90") else 0.9
    loads = plan.reg_m + plan.reg_n * parts
    # Operand words that a warp loads for each of its multiply-adds, against the largest tile's.
    return whole * min(1.0, plan.reg_m * plan.reg_n * parts / loads / 32.0) ** 0.25
