"""What a chain of two matmuls costs on tensor cores: steps of both products, in waves of blocks."""

from __future__ import annotations

from ....hardware import DeviceSpec
from ....workload import DTYPE_BYTES, MatmulChain
from ...family import Footprint
from ...gpu_cost import resident_blocks
from ...prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from ...tile_plan import TilePlan
from ..cpu_chain.cost import matrices
from ..tensor_cores import tiles as mma
from ..tensor_cores.cost import BEST_INTENSITY, FILL_S, HOPPER_RATE, LATENCY_S, NATIVE_RATE
from .tiles import chunk_columns

FEED_BYTES_PER_CLOCK = 21.0
"""What one multiprocessor reads and writes.  Measured on an H200, float16: 40 to 44 GB/s in G1, G4
and G9 of MCFuser, 30 to 49 in LoRA of rank 16 and 64."""


def predict(
    work: MatmulChain, plan: TilePlan, foot: Footprint, dev: DeviceSpec, rows: int
) -> Prediction:
    """Return what the kernel costs at `rows` rows."""
    count, each = matrices(work), DTYPE_BYTES[work.dtype]
    blocks = count * ceil_div(rows, plan.block_m) * ceil_div(work.n, plan.block_n)
    resident = resident_blocks(foot, dev)
    waves = ceil_div(blocks, dev.sm_count * resident)
    busiest = ceil_div(ceil_div(blocks, waves), dev.sm_count)
    chunk = chunk_columns(plan, work)
    stored = plan.block_m * plan.reg_n * (1 + work.outer.count("residual"))
    products = (
        (
            ceil_div(work.r, chunk) * ceil_div(work.k, plan.block_k),
            *(chunk, plan.block_k, (plan.block_m + chunk) * plan.block_k),
        ),
        (plan.block_n // plan.reg_n, plan.reg_n, work.r, plan.reg_n * work.r + stored),
    )
    terms: dict[Bound, float] = {"launch": dev.launch_s + FILL_S, "compute": 0.0, "l2": 0.0}
    terms["latency"] = 0.0
    for steps, columns, depth, elements in products:
        times: dict[Bound, float] = {
            "compute": busiest * 2.0 * plan.block_m * columns * depth / _rate(plan, work, dev),
            "l2": busiest * elements * each / FEED_BYTES_PER_CLOCK / dev.clock_hz,
            "latency": LATENCY_S / (plan.num_stages - 1),
        }
        slowest = largest(times)
        terms[slowest] += waves * steps * times[slowest]
    moved = float(sum(work.bytes(rows=rows, batch=count).values()))
    dram = moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    walked = terms["compute"] + terms["l2"] + terms["latency"]
    terms["dram"] = dram
    seconds = terms["launch"] + max(dram, walked)
    return Prediction(seconds, moved, work.flops(rows=rows, batch=count), waves, largest(terms))


def _rate(plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> float:
    """Return the flop/s that one multiprocessor reaches with the tiles of `plan`."""
    intensity = plan.reg_m * plan.reg_n / (plan.reg_m + plan.reg_n)
    whole = HOPPER_RATE if dev.capabilities.warp_group_mma else NATIVE_RATE
    few = min(1.0, plan.num_warps / mma.GROUP_WARPS)  # a multiprocessor has four matrix units
    reached = whole * min(1.0, intensity / BEST_INTENSITY) ** 0.5 * few
    return dev.tensor_flops_per_s(work.dtype) / dev.sm_count * reached
