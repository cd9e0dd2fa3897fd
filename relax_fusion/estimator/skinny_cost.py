"""What a plan of the family "skinny" costs: weights stream by, and what delays them.

A kernel is bound by memory (each weight comes once), by what all multiprocessors fetch from L2 (the
rows come again for every tile of columns), or by how many copies are on their way at once.

Constants were fitted to 56 timings of products without a norm on an H200, at 4 and 16 rows of
LLaMA-8B (`2026-11-21-skinny_trials.log`): predictions err by 3.8 % (root mean square), and the
plans that they choose lose 1.9 % on average.
"""

from __future__ import annotations

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import GatedFFN, NormMatmul
from . import skinny
from .footprint import Footprint
from .gpu_cost import resident_blocks
from .prediction import Bound, Prediction, ceil_div, largest
from .shape import MatmulShape, matmul_shape

READ_EFFICIENCY = 0.94
"""Part of the peak bandwidth at which weights can be read."""

FETCH_EFFICIENCY = 0.95
"""Part of the peak bandwidth of L2 at which multiprocessors fetch; not fitted, as no trial was
bound by it."""

LATENCY_S = 0.7e-6
"""From asking for a line of weights to having it, under load."""

OVERLAP = 4.0
"""Exponent of the sum of these three: the larger, the better the shorter ones are hidden."""

FILL_S = 2.4e-6
"""From the start of a kernel to the first product, and from the last one to the last store."""

WAVE_S = 0.25e-6
"""What a further wave of thread blocks adds: they begin and end as the first did."""

NORM_S_PER_ROW = 0.8e-6
"""What it adds, for each row, that blocks gather the statistics of their rows first.  Assumed: a
trip to memory under load."""


def predict(
    work: NormMatmul | GatedFFN, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Return what the launches of `plan` cost at `rows` rows."""
    shape = matmul_shape(work)
    seconds, waves = 0.0, 0
    terms: dict[Bound, float] = {"dram": 0.0, "l2": 0.0, "latency": 0.0}
    slots = dev.sm_count * resident_blocks(foot, dev)
    for n in shape.n_parts:
        times = _times(shape, plan, dev, n, rows)
        tiles = ceil_div(rows, plan.block_m) * ceil_div(n, plan.block_n)
        asked = skinny.step_bytes(plan, shape) * (plan.num_stages - 1)
        latency = LATENCY_S * _fetched(shape, plan, n, rows) / (asked * min(tiles, slots))
        every = (*times, latency)
        for name, value in zip(terms, every, strict=True):
            terms[name] += value
        count = ceil_div(tiles, slots)
        seconds += sum(t**OVERLAP for t in every) ** (1 / OVERLAP) + (count - 1) * WAVE_S
        waves += count
    launches = len(shape.n_parts)
    norm = work.norm
    if norm is not None and skinny.normalises(plan):
        seconds += launches * min(rows, plan.block_m) * NORM_S_PER_ROW
    elif norm is not None:
        seconds += dev.launch_s
    terms["launch"] = launches * (dev.launch_s + FILL_S)
    side = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    return Prediction(
        seconds + terms["launch"],
        shape.weight_bytes + side,
        shape.flops(rows),
        waves,
        largest(terms),
    )


def _fetched(shape: MatmulShape, plan: TilePlan, n: int, rows: int) -> float:
    """Return the bytes of weights and rows that the thread blocks of a projection copy."""
    columns = ceil_div(n, plan.block_n)
    weights = columns * plan.block_n * shape.parts * ceil_div(rows, plan.block_m)
    return float((weights + columns * rows) * shape.k * shape.in_bytes)


def _times(
    shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, n: int, rows: int
) -> tuple[float, float]:
    """Return how long memory and L2 take for a projection."""
    # Blocks of other rows and the same columns are far apart in time
    times = ceil_div(rows, plan.block_m)
    weights = float(times * n * shape.parts * shape.k * shape.in_bytes)
    fetched = _fetched(shape, plan, n, rows)
    return (
        weights / (dev.dram_bytes_per_s * READ_EFFICIENCY),
        fetched / (dev.l2_bytes_per_s * FETCH_EFFICIENCY),
    )
