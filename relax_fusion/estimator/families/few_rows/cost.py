"""What a plan of the family "few_rows" costs: weights stream by, and what delays them.

A kernel is bound by memory (each weight comes once), by how many copies are on their way at once,
or by how fast a warp gets through its instructions, which wait for one another.

Constants were fitted to 122 timings on an H200, at 1, 4 and 16 rows of LLaMA and GPT-2 models and
of narrow matmuls (`2026-11-21-skinny_plans.log`): predictions err by 4.0 % (root mean square), and
of the plans that were tried for a workload, those that they choose lose 0.8 % on average.
"""

from __future__ import annotations

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul
from ...family import Footprint
from ...gpu_cost import resident_blocks
from ...prediction import Bound, Prediction, ceil_div, largest
from ...shape import MatmulShape, matmul_shape
from ...tile_plan import TilePlan
from . import tiles as few_rows

READ_EFFICIENCY = 0.96
"""Part of the peak bandwidth at which weights can be read."""

FETCH_EFFICIENCY = 0.95
"""Part of the peak bandwidth of L2 at which they come from there; not fitted.  That rows come again
for every tile of columns shows in no timing: all blocks ask for the same ones at once."""

LATENCY_S = 0.67e-6
"""From asking for a line to having it, under load."""

CLOCKS_PER_INSTRUCTION = 7.5
"""Of a warp, counting one for each line of a chunk, for its copy and its loads, and one for each
``mma``."""

OVERLAP = 2.9
"""Exponent of the sum of all these: the larger, the better the shorter ones are hidden."""

FILL_S = 2.4e-6
"""From the start of a kernel to the first product, and from the last one to the last store."""

WAVE_S = 1.2e-6
"""What further waves of thread blocks add: they begin and end as the first did."""

CLUSTER_S = 1.2e-6
"""What it adds that blocks of a cluster start together, meet, and read each other's sums."""

NORM_S = 1.3e-6
"""What a kernel in front for the norm adds, where weights are on their way meanwhile."""

NORM_S_PER_ROW = 0.47e-6
"""What it adds, for each row, that blocks gather the statistics of their rows first."""


def predict(
    work: NormMatmul | GatedFFN, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Return what the launches of `plan` cost at `rows` rows."""
    shape = matmul_shape(work)
    seconds, all_waves = 0.0, 0
    terms: dict[Bound, float] = {"dram": 0.0, "l2": 0.0, "latency": 0.0, "compute": 0.0}
    slots = dev.sm_count * resident_blocks(foot, dev)
    for n in shape.n_parts:
        blocks = ceil_div(rows, plan.block_m) * ceil_div(n, plan.block_n) * plan.split_k
        waves = ceil_div(blocks, slots)
        # Blocks of other rows and the same columns are far apart in time
        weights = ceil_div(rows, plan.block_m) * n * shape.parts * shape.k * shape.in_bytes
        asked = few_rows.step_bytes(plan, shape) * (plan.num_stages - 1) * min(blocks, slots)
        times = (
            weights / (dev.dram_bytes_per_s * READ_EFFICIENCY),
            weights / (dev.l2_bytes_per_s * FETCH_EFFICIENCY),
            LATENCY_S * _fetched(shape, plan, n, rows) / asked,
            waves * _warp_clocks(plan, shape) / dev.clock_hz,
        )
        for name, value in zip(terms, times, strict=True):
            terms[name] += value
        seconds += sum(t**OVERLAP for t in times) ** (1 / OVERLAP)
        seconds += WAVE_S * (waves > 1) + CLUSTER_S * (plan.split_k > 1)
        all_waves += waves
    launches = len(shape.n_parts)
    if work.norm is not None and few_rows.normalises(plan):
        seconds += launches * min(rows, plan.block_m) * NORM_S_PER_ROW
    elif work.norm is not None:
        seconds += NORM_S if few_rows.has_clusters(dev) else dev.launch_s
    terms["launch"] = launches * (dev.launch_s + FILL_S)
    side = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    return Prediction(
        seconds + terms["launch"],
        shape.weight_bytes + side,
        shape.flops(rows),
        all_waves,
        largest(terms),
    )


def _fetched(shape: MatmulShape, plan: TilePlan, n: int, rows: int) -> float:
    """Return the bytes of weights and rows that the thread blocks of a projection copy."""
    columns = ceil_div(n, plan.block_n)
    weights = columns * plan.block_n * shape.parts * ceil_div(rows, plan.block_m)
    return float((weights + columns * rows) * shape.k * shape.in_bytes)


def _warp_clocks(plan: TilePlan, shape: MatmulShape) -> float:
    """Return how long a warp issues the instructions of its part of k."""
    columns = shape.parts * plan.block_n
    products = columns // few_rows.MMA_COLUMNS * (plan.block_m // few_rows.MMA_ROWS)
    slices = few_rows.CHUNK // few_rows.MMA_K
    instructions = columns + plan.block_m + products * slices  # of a chunk
    chunks = plan.block_k // (few_rows.CHUNK * plan.num_warps)
    steps = ceil_div(shape.k, plan.block_k * plan.split_k)
    return float(steps * chunks * instructions * CLOCKS_PER_INSTRUCTION)
