"""What a plan of the matmul kernel in CUDA C++ asks for, and what the kernel reaches.

A multiprocessor goes from tile to tile.  In a step along k its tensor cores multiply, while they
read operands from shared memory, and the copies of later steps come from L2.  A step has 128 bytes
of k whatever the dtype, so the same operands and copies, and is multiplied at the dtype's own rate.
"""

from __future__ import annotations

from math import log2

from ....workload.dtypes import DTYPE_BYTES
from ...gpu_cost import Rates
from ...prediction import ceil_div
from ..matmuls import MatmulProblem, Tile, group_clocks
from .packed import unpack_clocks
from .tiles import (
    HALF_K,
    LINE_BYTES,
    PART,
    SLICES,
    CudaPlan,
    Form,
    clusters_at_once,
    copies_residual,
    line_bytes,
    stored_lines,
)

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
