"""What the launches of a plan of the matmul kernel in CUDA C++ cost.

A multiprocessor goes from tile to tile.  A step along k takes as long as the longest of four: its
tensor cores multiply, they read operands from shared memory, the copies of the step come from L2,
and each stage of the ring waits for memory once in a turn of the ring.  All multiprocessors
together wait for memory to give the weights once, and for L2 to give them to each tile that asks.
What comes before the first step and after the last of a tile is added.  Constants were fitted to
52,758 timings on an H200, float16, each replay of a CUDA graph with a cold L2:
`docs/experiments/2026-11-24-cuda_matmul.md`.

For integers, and for float32 as tf32, they were not fitted anew.  Assumed: a step, 128 bytes of k
whatever the dtype, has the same operands and copies, and is multiplied at the dtype's own rate of
the tensor cores, which is by the hardware; results of 4 bytes take twice as long on their way out
as those of 2.  `2026-11-24-cuda_matmul-dtypes.log` has prices beside times: int8 within 10 %, tf32
up to 19 % above.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ....hardware import DeviceSpec
from ....workload import Packed
from ...arrays import overlapping, summed
from ...prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from ...shape import MatmulShape
from ..triton_matmul.cost import NEXT_LAUNCH_S, SLOTS_PART
from .packed import COPY_EFFICIENCY, UNPACKED_LATENCY_S, stored_bytes, unpack_clocks
from .tiles import (
    HALF_K,
    PART,
    SLICES,
    CudaPlan,
    clusters_at_once,
    copies_residual,
    line_bytes,
    stage_bytes,
    stored_lines,
)

NORM_S = 0.32e-6
"""What a norm kernel in front adds beside its bytes: it begins, and the matmul waits, while both
are launched."""

FILL_S = 1.71e-6
"""From the start of a kernel to its first product, and from its last to its end."""

READ_EFFICIENCY = 0.928
"""Part of the peak bandwidth of memory that long reads reach."""

RAMP_S, RAMP_BYTES = 15.2e-6, 112e6
"""What reads lose before they reach it: at most `RAMP_S`, half of that for `RAMP_BYTES`."""

AGAIN_PART = 0.147
"""What reading weights takes longer, at most, where several row tiles ask for them without sharing
copies: some come from memory again.  Half of it for two."""

LATENCY_S = 1.37e-6
"""From the copy that fills a stage to its products: so long a turn of the ring takes at least."""

L2_PART = 1.452
"""What all tiles together get of weights from L2, as a part of `DeviceSpec.l2_bytes_per_s`.  Rows
are asked for by all multiprocessors at about the same time, and cost nothing that is seen here."""

FEED_BYTES_PER_CLOCK = 73.1
"""What one multiprocessor gets of its copies, from L2 or from a neighbour of its cluster."""

TENSOR_PART = 1.082
"""Rate of the tensor cores at `DeviceSpec.clock_hz`, 4096 operations of float16 a clock, beside the
data sheet's, which counts a lower clock.  By the hardware, not fitted."""

OPERAND_CLOCKS, WIDE_LINES_PER_CLOCK = 16, 4
"""Clocks in which shared memory gives the 64 tall lines of one ``wgmma``, and how many wide lines
it gives in one: 128 bytes a clock.  By the hardware, not fitted."""

SLOWED_PART, SLOWED_S = 0.564, 155e-6
"""Kernels that multiply long reach the limit of power, and the clock falls: their steps take up to
`SLOWED_PART` longer, half of that after `SLOWED_S`."""

SUM_S, TURNED_PART = 56.6e-12, 0.235
"""What each sum of a tile takes on its way out, while nothing is multiplied; and which part more
where rows are the tall operand, of which 64 bytes are stored at a time."""

SUM_BYTES = 2
"""Of the results for which `SUM_S` was fitted."""

RESIDUAL_S = 0.5e-6
"""What a residual adds, beside its bytes, each time that a warp group stores 32 lines and waits
for it.  One that comes through the ring adds the time of its bytes alone:
`docs/experiments/2026-11-24-cuda_matmul-residuals.log`."""

ROTATED_S = 1.6e-6
"""What a rope adds for each 32 lines: in two steps, a warp group waits for angles from L2, and once
more for its sums, which change hands as float32.  Four matmuls of 16 to 777 rows took 1.6 to 2.5 us
more for each (`2026-11-24-cuda_matmul-rope.log`)."""

MERGE_S, MERGE_SUM_S = 0.32e-6, 0.217e-9
"""What adding up parts of k takes: `MERGE_S` once, and once more each time that their number
doubles; `MERGE_SUM_S` for each sum of a tile."""

NEXT_BLOCK_S = 3.17e-6
"""What blocks that begin when others have ended take until they multiply.  Only where k is split:
else each block goes on to its next tile."""

CLUSTER_S = 0.908e-6
"""What blocks that share copies take longer to begin and to end."""

STEP_POWER, MEMORY_POWER, WHOLE_POWER = 8, 2, 4
"""How times that overlap add up (`overlapping`): within a step; of memory and L2; of these and the
steps."""


class Tile(NamedTuple):
    """What a plan asks for on its own, whatever the workload's sizes are.

    Each field is a number, or an array with an element for each of many plans.
    """

    rows: Any  # and features of the tiles of a cluster
    features: Any
    blocks: Any  # of a cluster
    residents: Any  # of a multiprocessor
    at_once: Any  # clusters
    splits: Any
    alone: Any  # whether a block has one tile, as where k is split
    depth: Any  # elements of k of a step
    flops: Any  # of a step, as all that follow up to `turn_s`
    operand_clocks: Any
    unpack_clocks: Any
    copied_bytes: Any
    weight_bytes: Any  # asked from L2: less than it gets where blocks share copies
    turn_s: Any
    carry_s: Any  # once for each tile, or behind the last one where warp groups take turns
    carried: Any  # whether behind each
    stores: Any  # of 32 lines, that a warp group does one after the other
    waits: Any  # whether a residual is waited for at each
    elements: Any  # whose activations a block computes
    copied: Any  # whether packed weights are unpacked to a copy in front
    once_s: Any  # once for each launch


class Beside(NamedTuple):
    """What an epilogue has beside steps of elements alone."""

    residual: bool = False
    rotated: bool = False


NOTHING = Beside()


@lru_cache(maxsize=1 << 12)
def tile_of(
    plan: CudaPlan, weights: int, sm_count: int, result_bytes: int, packed: Packed | None
) -> Tile:
    """Return the tile of a plan; `weights` are 2 of a gated pair, and of pairs that turn."""
    packed = None if plan.copied else packed
    tall = weights * plan.tall // PART  # tiles of 64 lines
    parts = tall * plan.groups_wide  # each with its wide lines
    wide = plan.wide / plan.groups_wide
    sums = weights * plan.block_m * plan.block_n
    carry = SUM_S * result_bytes / SUM_BYTES
    slices = SLICES * (plan.block_k // HALF_K if packed else 1)
    once = CLUSTER_S if plan.cluster > plan.split_k else 0.0
    if plan.split_k > 1:
        once += MERGE_S * plan.split_k.bit_length()
    if plan.parts > 1:
        once += MERGE_SUM_S * sums
    return Tile(
        rows=plan.block_m * plan.cluster_m,
        features=plan.block_n * plan.cluster_n,
        blocks=plan.cluster,
        residents=plan.blocks,
        at_once=clusters_at_once(plan, sm_count),
        splits=plan.split_k,
        alone=plan.parts > 1,
        depth=plan.block_k,
        flops=2.0 * parts * PART * wide * plan.block_k,
        operand_clocks=parts * slices * (OPERAND_CLOCKS + wide / WIDE_LINES_PER_CLOCK),
        unpack_clocks=unpack_clocks(plan, weights) if packed else 0.0,
        copied_bytes=stage_bytes(plan, weights, packed),
        weight_bytes=weights * plan.block_n * line_bytes(plan, packed) / plan.cluster_m,
        turn_s=(UNPACKED_LATENCY_S if packed else LATENCY_S) / plan.num_stages,
        carry_s=carry * sums / plan.parts * (1 + TURNED_PART * plan.swapped),
        carried=plan.turns == 1,
        stores=tall
        // weights
        // plan.groups_tall
        * ceil_div(int(wide), stored_lines(result_bytes)),
        waits=not copies_residual(plan, result_bytes),
        elements=sums / weights / plan.parts,
        copied=plan.copied,
        once_s=once,
    )


class Launch(NamedTuple):
    """How long launches take, and the longest of their times: numbers or arrays."""

    seconds: Any
    waves: Any
    dram: Any
    l2: Any
    compute: Any
    latency: Any


def _launch(
    tile: Tile,
    shape: MatmulShape,
    dev: DeviceSpec,
    rows: Any,
    columns: Sequence[int],
    beside: Beside,
) -> Launch:
    """Return what a launch takes for weights of so many features."""
    row_tiles, n = ceil_div(rows, tile.rows), sum(columns)
    clusters = row_tiles * sum(ceil_div(each, tile.features) for each in columns)
    waves = ceil_div(clusters, tile.at_once)
    busiest = ceil_div(clusters * tile.residents, tile.at_once)  # tiles of one multiprocessor
    steps = ceil_div(ceil_div(shape.k, tile.depth), tile.splits)
    asked = clusters * tile.blocks * steps  # steps of all blocks

    clock, flops_per_s = dev.clock_hz, dev.tensor_flops_per_s(shape.dtype) * TENSOR_PART
    multiply = tile.flops * dev.sm_count / flops_per_s
    read = tile.operand_clocks / clock
    copy = tile.copied_bytes / (FEED_BYTES_PER_CLOCK * clock)
    turn = tile.turn_s * waves / busiest  # blocks of one multiprocessor wait side by side
    unpack = tile.unpack_clocks / clock
    mine = busiest * steps
    inside = mine * overlapping(STEP_POWER, multiply, read, unpack, copy, turn)
    multiplied = asked * tile.flops / flops_per_s
    inside = inside + SLOWED_PART * np.minimum(inside, multiplied) * inside / (inside + SLOWED_S)

    element_bytes = np.where(
        tile.copied, shape.in_bytes, stored_bytes(shape.packed, shape.in_bytes, shape.k)
    )
    weight_bytes = shape.parts * n * shape.k * element_bytes
    results = 2 * n if shape.rotated else n  # of a row: both of a pair
    moved = weight_bytes + rows * (results * shape.out_bytes + shape.k * shape.in_bytes)
    again = AGAIN_PART * weight_bytes * (1 - 1 / row_tiles)
    dram = (moved + again) / (READ_EFFICIENCY * dev.dram_bytes_per_s)
    l2 = asked * tile.weight_bytes / (L2_PART * dev.l2_bytes_per_s)
    memory = overlapping(MEMORY_POWER, dram, l2)
    ramp = RAMP_S * moved / (moved + RAMP_BYTES)

    store_s = RESIDUAL_S * tile.waits * beside.residual + ROTATED_S * beside.rotated
    carry = tile.carry_s + store_s * tile.stores
    if shape.slots:
        per_sm = SLOTS_PART * dev.fma_float32_flops_per_s / 2 / dev.sm_count
        carry = carry + tile.elements * shape.slots / per_sm
    seconds = overlapping(WHOLE_POWER, inside, memory)
    seconds += ramp + np.where(tile.carried, busiest, 1) * carry + tile.once_s
    seconds += tile.alone * (waves - 1) * NEXT_BLOCK_S
    products = mine * np.maximum(np.maximum(multiply, read), unpack)
    return Launch(seconds, waves, dram + ramp, np.maximum(l2, mine * copy), products, mine * turn)


def launches(
    tile: Tile,
    shape: MatmulShape,
    columns: Sequence[Sequence[int]],
    dev: DeviceSpec,
    rows: Any,
    beside: Beside = NOTHING,
) -> Launch:
    """Return what the launches of a workload cost, behind that of a norm.

    Parameters
    ----------
    tile : Tile
        Of one plan, or of many.
    shape : MatmulShape
        The workload, whose rotated projections have columns of pairs where those are apart.
    columns : sequence of sequence of int
        Columns of the weights of each launch.
    dev : DeviceSpec
        The device.
    rows : int or array
        Rows of x; of many sizes an array of shape ``(sizes, 1)``.
    beside : Beside
        Whether an epilogue adds a residual, and rotates.

    Returns
    -------
    Launch
        `seconds` are from launch to end; of many they have the shape ``(sizes, plans)``.
    """
    each = [_launch(tile, shape, dev, rows, some, beside) for some in columns]
    found = summed(each)
    copied = tile.copied * _copy_s(shape, dev)
    seconds = start_s(columns, dev) + copied + found.seconds
    row_bytes = shape.side_row_bytes
    if shape.has_norm:
        seconds += NORM_S
        # x is read, and written for the matmul
        row_bytes += shape.x_row_bytes + shape.k * shape.in_bytes
    seconds += rows * row_bytes / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    return found._replace(seconds=seconds, dram=found.dram + copied)


def start_s(columns: Sequence[Sequence[int]], dev: DeviceSpec) -> float:
    """Return what launching takes, and filling the first stages."""
    return dev.launch_s + FILL_S + (len(columns) - 1) * NEXT_LAUNCH_S


def _copy_s(shape: MatmulShape, dev: DeviceSpec) -> float:
    """Return what unpacking weights to a copy takes."""
    if shape.packed is None:
        return 0.0
    element_bytes = stored_bytes(shape.packed, shape.in_bytes, shape.k) + shape.in_bytes
    moved = shape.parts * shape.n * shape.k * element_bytes
    return NEXT_LAUNCH_S + moved / (COPY_EFFICIENCY * dev.dram_bytes_per_s)


def predict(
    plan: CudaPlan,
    shape: MatmulShape,
    columns: Sequence[Sequence[int]],
    dev: DeviceSpec,
    rows: int,
    beside: Beside = NOTHING,
) -> Prediction:
    """Return what the launches of one plan cost; parameters are those of `launches`."""
    tile = tile_of(plan, shape.parts, dev.sm_count, shape.out_bytes, shape.packed)
    found = launches(tile, shape, columns, dev, rows, beside)
    terms: dict[Bound, float] = {
        "launch": start_s(columns, dev),
        "dram": found.dram,
        "l2": found.l2,
        "compute": found.compute,
        "latency": found.latency,
    }
    moved = shape.weight_bytes + shape.row_bytes * rows
    return Prediction(
        *(float(found.seconds), moved, shape.flops(rows), int(found.waves), largest(terms))
    )
