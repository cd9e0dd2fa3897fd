"""Price of kernels that no plan of ours is for: norms, softmax, steps, and matmuls left to TVM."""

from __future__ import annotations

from ..hardware import DeviceSpec
from ..workload import Atom
from ..workload.dtypes import STORED_BYTES
from .cpu_cost import NORM_CYCLES_PER_VECTOR, SLOT_CYCLES
from .gpu_cost import MEMORY_LATENCY_S, SFU_PER_CLOCK, SOFTMAX_FLOPS_PER_SCORE
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from .shape import matmul_shape

FOLLOWING_LAUNCH = 0.2
"""Part of a launch that a kernel adds behind another one, where their launches overlap: so do
Triton's, and kernels that do no more than read and write.  Fitted on an H200 to what a norm costs
more apart from Triton's matmul than with it (0.5 to 1.4 us up to 256 rows), and what the product
behind a gate and an up does; assumed elsewhere."""

SIMT_EFFICIENCY = 0.42
"""Reached part of the FMA peak of TVM's own matmul schedule.  Measured on an H200: 27.6 and 28.8
of 66.9 Tflop/s at 1024 rows."""

SIMT_ROW_TILE, SIMT_COLUMN_TILE, SIMT_K_STEP = 32, 64, 16
"""Tile of that schedule (read in TVM 0.27's `dlight.gpu.Matmul`)."""

SIMT_STEP_S = 0.73e-6
"""Least time of one of its steps along k, which load, wait at a barrier, compute and wait again.
Measured on an H200: 0.196 ms for 16 x 6144 x 4096 and a norm, less two launches, over 256 steps."""

CPU_FLOPS_PER_CYCLE = 0.18
"""What TVM's default CPU pipeline reaches on a matmul: it schedules none, so loops are scalar and
run on one core.  Measured with TVM 0.27, 64 x 1024 x 1024, float32, "nk": 0.46 Gflop/s at 2.6
GHz."""


SOFTMAX_CYCLES, SOFTMAX_ROW_CYCLES = 22, 500
"""Cycles per vector and per row of a softmax that is a kernel by itself.  Fitted to 32, 64, 128 ...
1024 columns on Zen 4, which take 272, 144, 80, 57, 38 and 29 cycles a vector, all told."""


def start_s(dev: DeviceSpec) -> float:
    """Return what launching takes behind another kernel, where the launches overlap."""
    return dev.launch_s * (FOLLOWING_LAUNCH if dev.kind == "gpu" else 1.0)


def norm_s(elements: int, dtype: str, dev: DeviceSpec) -> float:
    """Return what a norm takes as a kernel behind another."""
    norm = Atom(2 * STORED_BYTES[dtype] * elements, normalised=elements)
    return price(norm, dev).seconds - dev.launch_s + start_s(dev)


def moved_bytes(atom: Atom) -> float:
    """Return the bytes that a kernel reads and writes."""
    operands = sum(atom.matmul.bytes(rows=atom.rows).values()) if atom.matmul else 0
    return float(atom.moved + atom.matrices * operands)


def price(atom: Atom, dev: DeviceSpec) -> Prediction:
    """Return what a kernel costs that waits for memory or for arithmetic."""
    moved = moved_bytes(atom)
    flops = atom.matrices * atom.matmul.flops(rows=atom.rows) if atom.matmul else 0.0
    terms: dict[Bound, float] = {
        "dram": moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY),
        "compute": _matmul_s(atom, flops, dev) + rows_s(atom, dev),
        # A load and a store that depends on it, however small the kernel is
        "latency": 2 * MEMORY_LATENCY_S if dev.kind == "gpu" else 0.0,
    }
    return Prediction(dev.launch_s + max(terms.values()), moved, flops, 1, largest(terms))


def _matmul_s(atom: Atom, flops: float, dev: DeviceSpec) -> float:
    """Return the seconds of the arithmetic of TVM's schedule, which on a GPU has whole tiles."""
    if atom.matmul is None:
        return 0.0
    if dev.kind == "cpu":
        slots = atom.matrices * atom.rows * matmul_shape(atom.matmul).row_slots
        return (flops / CPU_FLOPS_PER_CYCLE + slots * SLOT_CYCLES) / dev.clock_hz
    k, rate = atom.matmul.k, SIMT_EFFICIENCY * dev.fma_float32_flops_per_s
    columns = sum(ceil_div(p.columns, SIMT_COLUMN_TILE) for p in atom.matmul.outputs)
    tiles = atom.matrices * ceil_div(atom.rows, SIMT_ROW_TILE) * columns
    tile_s = 2.0 * SIMT_ROW_TILE * SIMT_COLUMN_TILE * k * dev.sm_count / rate
    return max(ceil_div(tiles, dev.sm_count) * tile_s, k / SIMT_K_STEP * SIMT_STEP_S)


def rows_s(atom: Atom, dev: DeviceSpec) -> float:
    """Return the seconds of the arithmetic of a norm, a softmax, or element-wise steps."""
    if dev.kind == "cpu":
        vectors = 4 / dev.vector_bytes / dev.sm_count
        each = atom.slots * SLOT_CYCLES
        each += atom.normalised * NORM_CYCLES_PER_VECTOR + atom.scores * SOFTMAX_CYCLES
        cycles = each * vectors
        if atom.scores:
            cycles += ceil_div(atom.rows, dev.sm_count) * SOFTMAX_ROW_CYCLES
        return cycles / dev.clock_hz
    exponentials = SFU_PER_CLOCK * dev.clock_hz * dev.sm_count
    each = 1 / exponentials + SOFTMAX_FLOPS_PER_SCORE / dev.fma_float32_flops_per_s
    return atom.scores * each
