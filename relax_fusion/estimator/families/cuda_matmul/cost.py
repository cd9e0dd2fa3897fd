"""What a plan of the matmul kernel in CUDA C++ asks for, and what the kernel reaches.

A multiprocessor goes from tile to tile.  In a step along k its tensor cores multiply, while they
read operands from shared memory, and the copies of later steps come from L2.  A step has 128 bytes
of k whatever the dtype, so the same operands and copies, and is multiplied at the dtype's own rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from ....workload import Packed
from ....workload.dtypes import DTYPE_BYTES
from ...gpu_cost import Rates
from ...prediction import ceil_div
from ..matmuls import MatmulProblem, Tile, group_clocks
from .tiles import (
    HALF_K,
    LINE_BYTES,
    PART,
    SLICES,
    CudaPlan,
    Form,
    accumulators,
    clusters_at_once,
    copies_residual,
    line_bytes,
    sets_made,
    stored_lines,
)

BITS = (4, 8)
PIECE = 32
"""So many elements of k, which share a scale, are unpacked at once."""

FEW_ROWS = 16
"""Up to 16 rows other families were measured, and are near what memory gives."""

LEAST_COPIED = 96
"""From 96 rows of a tile on weights may be worth a copy, that many tiles read."""

SWIZZLES = (32, 64, 128)
"""Swizzles of shared memory are made for lines of so many bytes."""

STEPS = (64, 128, 256)
"""A stage may hold so many elements of k."""

OTHERS = {1: 60, 2: 32, 3: 30}
"""A thread has so many registers beside sums and packed weights, by warp groups that multiply: with
what `registers` counts too much, since not all lives at once.  By what ptxas 13.0 spills."""

REGISTERS = {1: 255, 2: 232, 3: 160}

PRODUCTS_PER_CLOCK = 2048
"""The tensor cores of a multiprocessor make 2048 products of float16 a clock.  By the hardware, not
fitted."""

UNPACK_CLOCKS = 131
"""A multiprocessor unpacks 32 elements of k of 64 lines in 131 clocks.  This and the next three
were fitted to 1,913 timings of q4f16_1 (`2026-11-26-cuda_matmul-packed_interleaved.log`): from 24
rows on, the plans that they choose are 1.7 % slower than the fastest in the mean, 18 % at most."""

PIECE_CLOCKS, TALL_CLOCKS = 103, 65
"""One warp group, whose pieces of 32 elements follow each other, takes `PIECE_CLOCKS` clocks for
each piece, and `TALL_CLOCKS` for each of its 64 lines."""

WAITED_PART = 0.34
"""In this part of the products' time nothing is unpacked."""


RATES = Rates(
    tensor=1.05,
    feed=65.9,
    latency_s=1.52e-6,
    start_s=3.04e-6,
    wave_s=9.78e-6,
    out_s=105e-12,
    meet_s=0.0464e-6,
)
"""The tensor cores run at a higher clock than the data sheet counts."""

PACKED_RATES = RATES._replace(latency_s=3.03e-6)
"""Weights that are unpacked take longer on their way.  This was fitted to 1,913 timings of q4f16_1
(`2026-11-26-cuda_matmul-packed_interleaved.log`)."""

TURNED_PART, MERGED = 0.235, 4
"""Storing a sum takes `TURNED_PART` longer where rows are the tall operand, of which 64 bytes are
stored at a time.  Each sum of parts of k takes as long as `MERGED` that are stored: it changes
hands as float32."""

RESIDUAL_S, ROTATED_S = 0.5e-6, 1.6e-6
"""Each time that a warp group stores 32 lines, a residual adds `RESIDUAL_S` seconds beside its
bytes, as the group waits for it, unless it comes through the ring
(`2026-11-24-cuda_matmul-residuals.log`), and a rope `ROTATED_S`: the group waits for angles from
L2, and once more for sums that change hands.  Four matmuls of 16 to 777 rows took 1.6 to 2.5 us
more for each (`2026-11-24-cuda_matmul-rope.log`)."""


def packed_violations(plan: CudaPlan, weights: int, form: Packed, k: int) -> Iterator[str]:
    """Yield what the copies, the scales and the registers of packed weights do not allow."""
    if plan.block_k not in STEPS or line_bytes(plan, form) not in SWIZZLES:
        yield f"block_k is {plan.block_k}, must be one of {STEPS}, and at most 128 bytes"
        return
    if plan.swapped:
        yield "packed weights are the tall operand, not rows"
    if form.group > 0 and plan.block_k % form.group and form.group % plan.block_k:
        yield f"block_k is {plan.block_k}, groups of {form.group} do not divide it, nor it them"
    elif form.group > 0 and ceil_div(k, form.group) % scales(plan, form):
        yield f"k is {k}, a step reads {scales(plan, form)} scales of a line at once"
    needed, most = registers(plan, weights, form), REGISTERS[min(plan.multiplying, 3)]
    if needed > most:
        yield f"a thread needs {needed} registers, at most {most} there are"


def unpack_clocks(plan: CudaPlan, weights: int) -> float:
    """Return the clocks in which a stage is unpacked, and products waited for."""
    own = weights * plan.tall // (PART * plan.groups_tall)
    chain = (PIECE_CLOCKS + own * TALL_CLOCKS) / (plan.turns * plan.groups_k)
    products = weights * plan.tall * plan.wide * PIECE / PRODUCTS_PER_CLOCK
    piece = max(own * plan.groups * UNPACK_CLOCKS, chain) + WAITED_PART * products
    return plan.block_k / PIECE * piece


def scales(plan: CudaPlan, form: Packed) -> int:
    """Return how many scales of a line a stage has."""
    return max(1, plan.block_k // form.group) if form.group > 0 else 1


def registers(plan: CudaPlan, weights: int, form: Packed) -> int:
    """Return the registers of a thread: sums, sets of numbers, words, and scales twice."""
    tall = weights * plan.tall // (PART * plan.groups_tall)
    each = (
        sets_made(plan) * PIECE // 4 + PIECE * form.bits // 16 + 4 * ceil_div(scales(plan, form), 2)
    )
    return accumulators(plan, weights) + tall * each + OTHERS[min(plan.multiplying, 3)]


def tile_of(plan: CudaPlan, form: Form, problem: MatmulProblem) -> Tile:
    """Return the tile of a plan."""
    dev, weights, packed = problem.dev, form.weights, form.unpacked(plan)
    result_bytes = DTYPE_BYTES[problem.work.out_dtype]
    peak = dev.tensor_flops_per_s(problem.work.dtype)
    tall = weights * plan.tall // PART  # tiles of 64 lines
    parts = tall * plan.groups_wide  # each with its wide lines
    wide = plan.wide / plan.groups_wide
    sums = weights * plan.block_m * plan.block_n
    slices = SLICES * (plan.block_k // HALF_K if packed else 1)
    clocks = parts * slices * group_clocks(wide)
    if packed:
        clocks = max(clocks, unpack_clocks(plan, weights))
    of_weights = weights * plan.block_n * line_bytes(plan, packed)
    of_row = LINE_BYTES * (plan.block_k // HALF_K if packed else 1)
    out = (1 + TURNED_PART * plan.swapped) * result_bytes / 2 / plan.parts
    return Tile(
        rows=plan.block_m * plan.cluster_m,
        columns=plan.block_n * plan.cluster_n,
        blocks=plan.cluster,
        residents=plan.blocks,
        multiprocessors=clusters_at_once(plan, dev.sm_count) * plan.cluster // plan.blocks,
        depth=plan.block_k * plan.split_k,
        ahead=plan.num_stages,
        tensor_s=2.0 * parts * PART * wide * plan.block_k * dev.sm_count / peak,
        clocks=clocks,
        weight_bytes=of_weights,
        row_bytes=of_row / plan.cluster_m,
        asked_bytes=of_weights / plan.cluster_m,
        sums=sums * (out + MERGED * (plan.parts > 1)),
        elements=sums / weights / plan.parts,
        store_s=_store_s(plan, form, result_bytes),
        hides=plan.turns > 1,
        meetings=log2(plan.cluster),
        begins=plan.parts > 1,
        in_front=problem.work.norm is not None,
        copied=bool(plan.copied),
    )


def stores(plan: CudaPlan, result_bytes: int) -> int:
    """Return the stores of 32 lines that a warp group does one after the other for a tile."""
    tall = plan.tall // PART // plan.groups_tall
    return tall * ceil_div(plan.wide // plan.groups_wide, stored_lines(result_bytes))


def _store_s(plan: CudaPlan, form: Form, result_bytes: int) -> float:
    """Return what an epilogue that waits takes for a tile."""
    waits = form.adds_residual and not copies_residual(plan, result_bytes)
    each = RESIDUAL_S * waits + ROTATED_S * form.rotates
    return each * stores(plan, result_bytes) if each else 0.0
