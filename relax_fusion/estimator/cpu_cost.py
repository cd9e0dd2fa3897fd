"""Price of one fused kernel on a CPU: register tiles, walked by parallel tasks.

The time is the parallel regions, and then DRAM traffic against the busiest core: what it computes
and what it waits for its caches, which are added, because out-of-order execution hides little of
loads that miss the first level all along.  The larger counts in full, of the smaller a part is not
hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..hardware import DeviceSpec
from ..workload import FLOAT_BYTES
from .prediction import DRAM_EFFICIENCY, HALF_DTYPES, Bound, Prediction, Step, ceil_div, largest
from .shape import MatmulShape
from .tile_plan import TilePlan

LOADS_PER_CYCLE = 2
"""A core starts 2 vector loads each cycle (Zen and Skylake: two load ports)."""

FMA_LATENCY_CYCLES = 4
"""Cycles until an accumulator can be added to again (Zen and Skylake)."""

CONVERT_CYCLES = 1
"""Cycles that turning a vector of 16-bit floats into float32 adds (Zen: two micro-operations)."""

UNPACK_CYCLES = 2
"""Instructions that make a vector of float32 of fields of a vector of words: their bits with an
exponent and a subtraction, or a shift and a lookup.  Counted."""

UNPACK_CYCLES_BY_ELEMENT = {"nk": 2.0, "kn": 0.2}
"""Cycles per packed weight that a register tile unpacks one by one, by layout.  Measured on Golden
Cove at one row: 1.5 along k, where each lane fetches its word, and 0.2 along n, where lanes share
shifts; tiles of several rows take more."""

REDUCE_CYCLES_PER_LEVEL = 2
"""Cycles per halving when the lanes of one accumulator are added up.  Counted: shuffle and add."""

NORM_CYCLES_PER_VECTOR = 4
"""A vector of x takes 4 cycles to be normalised: load, square-add, scale, store.  Counted."""

SLOT_CYCLES = 1.0
"""Cycles per vector for one of `Operator.slots`.  Measured on Zen 4, in maps and behind matmuls:
0.9 to 1.6 for the GELUs, SiLU, the sigmoid and tanh with AVX-512, 0.8 to 1.2 with AVX2; 2 to 3 for
the exponential, 0.1 to 0.3 for divisions and square roots, which a CPU has instructions for."""

STORED_LANES = 3
"""Results of a register tile that pass their activations at once, where it stores them one by one.
Measured on Zen 4 at one row: 7 to 8 cycles per element for GELU, 4 to 6 for SiLU."""

SOFTMAX_CYCLES_PER_VECTOR = 20
"""Cycles per vector of scores: the exponential, 11 (measured on Zen 4), and 9 (counted) to scale,
mask, compare, subtract and add, with their loads and stores."""

L1_STREAMS = 9
"""Rows and columns that a register tile can walk along before they push each other out of the first
level.  Their distance is a multiple of 4 KB for usual k, so they share sets of 8 to 12 lines.
Fitted on Zen 5 (12 ways): 8 streams run free, 10 do not."""

CROWDING = 1.0
"""Power of the streams beyond `L1_STREAMS` by which loads get slower.  Fitted as above."""

L2_SPEED = 1.7
"""Reached part of `DeviceSpec.l2_bytes_per_s`, which is stated for older cores.  Fitted as above:
a line takes 1.2 cycles."""

TILE_CYCLES = 10
"""The loop over k of one register tile takes 10 cycles to start and end.  Fitted as above."""

ONE_LOOP_S = 10e-6
"""What a chain in one parallel loop is asked for beside its cycles, for each product that would
have a loop of its own: of few rows it has few blocks, and a loop more takes less than `launch_s`.
Chosen so that no adapter is fused that loses: those of 1 and 16 rows do, by up to a half, those of
64 and more gain (`2026-11-24-bench_cpu_chains.md`)."""

UNHIDDEN = 0.1
"""Part of the smaller of DRAM and core time that the larger one does not hide.  Assumed."""


@dataclass(frozen=True)
class Traffic:
    """Cycles of the busiest core and bytes of all of them."""

    cycles: float
    dram_bytes: float
    l2_bytes: float
    regions: int
    tasks: int


@dataclass(frozen=True)
class _Step:
    """What a register tile does per step along k."""

    cycles: float
    """With all operands in the first level."""
    steps: float
    """Steps along k."""
    x_bytes: float
    w_bytes: float
    """Operands of one step."""
    streams: int
    """Rows and columns that are walked along at once."""


def matmul_on_cpu(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    """Price the fused norm and matmul at `rows` rows, padded to whole blocks."""
    tasks = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
    blocks = ceil_div(rows, plan.block_m)
    steps = [_step(shape, plan, dev, layout) for layout in sorted(shape.layouts)]
    task = max(
        _compute_cycles(shape, plan, step, blocks) + _cache_cycles(shape, plan, dev, step, blocks)
        for step in steps
    )
    return whole_matmul(shape, dev, rows, Tasks(tasks, task, min(plan.lanes, STORED_LANES)))


class Tasks(NamedTuple):
    """The tasks of a matmul's parallel loops."""

    tasks: int
    """Tasks of all projections."""
    cycles: float
    """Cycles of one of them."""
    lanes: int
    """Results whose activations are computed at once."""
    copying: float = 0.0
    """Cycles in which the busiest core copies rows, in a parallel loop in front."""


def whole_matmul(shape: MatmulShape, dev: DeviceSpec, rows: int, each: Tasks) -> Prediction:
    """Return the price of a matmul's parallel loops, with those of a norm and of copies."""
    cycles = ceil_div(each.tasks, dev.sm_count) * each.cycles + _norm_cycles(shape, dev, rows)
    cycles += each.copying
    cycles += _activation_cycles(shape, dev, (rows, each.tasks), each.lanes)
    heads = 2 * FLOAT_BYTES["float32"] * shape.head_columns  # written, and read by their norm
    moved = float(shape.weight_bytes + rows * (shape.row_bytes + heads))
    regions = len(shape.n_parts) + int(each.copying > 0) + int(shape.has_norm)
    regions += int(shape.head_columns > 0)
    return finish(Traffic(cycles, moved, 0.0, regions, each.tasks), dev, shape.flops(rows))


def _norm_cycles(shape: MatmulShape, dev: DeviceSpec, rows: int) -> float:
    """Return the cycles in which the busiest core normalises its rows and their heads."""
    norms = shape.normed_first + (shape.norm not in ("", "none"))
    elements = ceil_div(rows, dev.sm_count) * (shape.k * norms + shape.head_columns)
    return elements * 4 / dev.vector_bytes * NORM_CYCLES_PER_VECTOR


def _activation_cycles(
    shape: MatmulShape, dev: DeviceSpec, parts: tuple[int, int], lanes: int
) -> float:
    """Return the cycles of the busiest core for the activations of its results.

    `parts`: rows, and tasks that share them.
    `lanes`: elements that are computed at once.
    """
    rows, tasks = parts
    busiest = ceil_div(tasks, dev.sm_count) / tasks
    return busiest * rows * shape.row_slots * SLOT_CYCLES / lanes


def l2_cycles_per_byte(dev: DeviceSpec) -> float:
    """Return the cycles of a core for a byte of its second-level cache."""
    return dev.sm_count * dev.clock_hz / (dev.l2_bytes_per_s * L2_SPEED)


def vectors_step(rows: int, vectors: int, streamed_cycles: float, dev: DeviceSpec) -> float:
    """Return the cycles of a step along k of a register tile, whose row is so many vectors wide.

    `streamed_cycles`: what the operands of a step take on their way from a cache, while the core
    computes.
    """
    sums, loads = rows * vectors / dev.fma_per_cycle, (rows + vectors) / LOADS_PER_CYCLE
    return max(sums, loads, FMA_LATENCY_CYCLES, streamed_cycles)


def _step(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, layout: str) -> _Step:
    """Return a step of the tile: `lanes` elements of k for "nk", one for "kn"."""
    along_k = layout == "nk"
    columns = plan.reg_n * shape.parts
    weights = columns if along_k else columns / plan.lanes
    sums, loads = plan.reg_m * weights, plan.reg_m + weights
    lanes = plan.lanes if along_k else 1
    convert = weights * CONVERT_CYCLES if shape.dtype in HALF_DTYPES else 0.0
    if shape.unpacked_bytes:
        convert = columns * lanes * UNPACK_CYCLES_BY_ELEMENT[layout]
    return _Step(
        cycles=max(sums / dev.fma_per_cycle, loads / LOADS_PER_CYCLE + convert, FMA_LATENCY_CYCLES),
        steps=shape.k / lanes,
        x_bytes=plan.reg_m * lanes * 4,
        w_bytes=columns * lanes * shape.in_bytes,
        streams=plan.reg_m + (columns if along_k else 1),
    )


def _compute_cycles(shape: MatmulShape, plan: TilePlan, step: _Step, blocks: int) -> float:
    """Return the cycles in which a task computes `blocks` blocks of rows."""
    tiles = blocks * (plan.block_m // plan.reg_m) * ceil_div(plan.block_n, plan.reg_n)
    levels = math.log2(plan.lanes) if "nk" in shape.layouts and plan.lanes > 1 else 0
    sums = plan.reg_m * plan.reg_n * shape.parts
    return tiles * (
        step.steps * step.cycles + TILE_CYCLES + sums * levels * REDUCE_CYCLES_PER_LEVEL
    )


def _cache_cycles(
    shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, step: _Step, blocks: int
) -> float:
    """Return the cycles in which a task waits for operands that are not in the first level.

    A task walks blocks of rows; in each, columns by `reg_n`; in each, rows by `reg_m`.  An operand
    is in a cache if what is touched between its two uses fits there.
    """
    per_byte = l2_cycles_per_byte(dev)
    x_tile, w_tile = step.x_bytes * step.steps, step.w_bytes * step.steps
    rows = plan.block_m // plan.reg_m
    x_block, panel = x_tile * rows, w_tile * ceil_div(plan.block_n, plan.reg_n)
    flows = step.streams <= L1_STREAMS
    w_again = 0.0 if flows and x_tile + w_tile <= dev.l1_bytes else per_byte
    w_block = per_byte if x_block + panel <= dev.l2_bytes else dev.l3_cycles_per_byte
    x_again = per_byte if x_block + w_tile <= dev.l2_bytes else dev.l3_cycles_per_byte
    if flows and x_block + w_tile <= dev.l1_bytes:
        x_again = 0.0
    weights = dev.l3_cycles_per_byte + (blocks - 1) * w_block + blocks * (rows - 1) * w_again
    columns = ceil_div(plan.block_n, plan.reg_n)
    crowding = max(1.0, step.streams / L1_STREAMS) ** CROWDING
    return columns * (w_tile * weights + blocks * x_block * x_again) * crowding


def price_step(step: Step, dev: DeviceSpec) -> Prediction:
    """Return what a parallel region costs."""
    busiest = max(ceil_div(step.blocks, dev.sm_count) * step.block_s, step.longest_block_s)
    cycles = (busiest + step.chain_s + step.start_s) * dev.clock_hz
    traffic = Traffic(cycles, step.dram_bytes, step.l2_bytes, 1, step.blocks)
    return finish(traffic, dev, step.flops)


def in_one_loop(traffic: Traffic, dev: DeviceSpec, flops: float, products: int) -> Prediction:
    """Return the time of a chain of so many products in one parallel loop over blocks of rows."""
    found = finish(traffic, dev, flops)
    return replace(found, seconds=found.seconds + (products - 1) * ONE_LOOP_S)


def finish(traffic: Traffic, dev: DeviceSpec, flops: float) -> Prediction:
    """Return the time of what `traffic` says."""
    terms: dict[Bound, float] = {
        "dram": traffic.dram_bytes / (dev.dram_bytes_per_s * DRAM_EFFICIENCY),
        "l2": traffic.l2_bytes / dev.l2_bytes_per_s,
        "compute": traffic.cycles / dev.clock_hz,
        "launch": traffic.regions * dev.launch_s,
    }
    core = terms["l2"] + terms["compute"]
    total = terms["launch"] + max(terms["dram"], core) + UNHIDDEN * min(terms["dram"], core)
    waves = ceil_div(traffic.tasks, dev.sm_count)
    return Prediction(total, traffic.dram_bytes, flops, waves, largest(terms))
