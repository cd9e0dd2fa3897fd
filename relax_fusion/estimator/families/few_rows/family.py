"""Tensor cores for at most 16 rows: the family "few_rows".

A kernel is bound by memory (each weight comes once), by how many copies are on their way at once,
or by how fast a warp gets through its instructions, which wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ....hardware import DeviceSpec
from ...family import OWN_BASELINE_ERROR, Breaks, Offer
from ...gpu_cost import Rates, resident_blocks
from ...prediction import Footprint, ceil_div
from ...shape import MatmulShape, Problem
from ...tile_plan import TilePlan
from .. import matmuls
from ..fma_tiles import FmaTiles
from .tiles import (
    CHUNK,
    COPY_LANES,
    FACTOR_LINES,
    FAMILY,
    GROUP,
    MMA_COLUMNS,
    MMA_K,
    MMA_ROWS,
    MOST_ROWS,
    STATISTICS,
    SUM_BYTES,
    normalises,
    offered,
    refuses_others,
    rows_at_once,
)

COLUMNS = (16, 32, 48, 64)
"""Columns of a block, of all parts; or the least that a layout has, for each part."""

PIPELINES = ((8, 1, 4), (8, 1, 3), (4, 1, 6), (4, 1, 4), (4, 1, 3), (4, 1, 2))
"""Warps, chunks of a step, and stages."""

SPLITS = (2, 4, 8)
"""Thread blocks of a cluster, which have the parts of k.  Eight are the most that every device with
clusters has room for (CUDA C++ Programming Guide, "Thread Block Clusters")."""

SPLIT_SHARE = 0.6
"""Part of the multiprocessors that split tiles may take.  On an H200, 72 blocks gained by it, while
128 blocks in clusters of four and more took up to 4 us longer: few of them begin at once."""

OVERHEAD_REGISTERS = 40
"""A thread has 40 registers beside its sums and operands: addresses, and what a norm unpacks.
Compiled for sm_90: 48 with 8 sums and 24 operands, 102 with 32 and 56."""

RATES = Rates(
    feed=87.5,
    latency_s=0.491e-6,
    issue=5.45,
    start_s=2.31e-6,
    wave_s=2.21e-6,
    out_s=132e-12,
    meet_s=1.2e-6,
)
"""What the kernel reaches.  Rows come again for every tile of columns, which shows in no timing:
all blocks ask for the same ones at once."""

NORM_S_PER_ROW = 0.47e-6
"""Blocks that gather the statistics of their rows first take so many seconds for each, or for all
that they load at once (`2026-11-28-dot_products.json`)."""

NORMALISING = 40
"""Instructions of a warp for the rows of a chunk that it normalises: five for each register."""

LATE_S = 2e-6
"""What a kernel of one row takes longer behind another than by itself, beside dot products, which
ask for weights before the kernel in front has ended: a token of a decode with five such kernels
took 20 to 26 us longer (`2026-11-28-few_rows_decode.log`), of which not all is counted, because
other devices and chains were not timed."""


class FewRows(matmuls.GpuMatmul):
    """Norm, matmul or gated projections of a few rows; all warps of a block have its columns."""

    names = (FAMILY,)
    emitter = "relax_fusion.dlight_rules.tensor_cores.contraction:emit"
    error = OWN_BASELINE_ERROR
    instead_of = (FmaTiles,)
    breaks = Breaks((1, 8, 16))
    most_rows = MOST_ROWS

    def takes(self, problem: Problem[Any]) -> bool:
        """Leave packed weights to `PackedRows`."""
        return super().takes(problem) and matmuls.packed_form(problem.work) is None

    def refuses(self, problem: matmuls.MatmulProblem) -> str | None:
        """Refuse dtypes and devices that its instructions are not for."""
        return matmuls.refuses_scattered(problem) or refuses_others(problem)

    def plans(self, problem: matmuls.MatmulProblem) -> Iterator[Offer]:
        """Yield tiles of 8 and 16 rows, the reduction whole and in parts."""
        shape, rows = problem.shape, problem.work.rows
        most = rows if isinstance(rows, int) else MOST_ROWS
        if most > MOST_ROWS or next(_copy_violations(shape), None):
            return
        unit = _least_columns(shape)
        widths = {c // shape.parts for c in COLUMNS if c // shape.parts % unit == 0} or {unit}
        for block_m, block_n in product((MMA_ROWS, MOST_ROWS), sorted(widths)):
            if block_m >= 2 * max(most, MMA_ROWS):
                continue
            if block_n != unit and not matmuls.columns_fit(shape, block_n):
                continue
            inside = block_m == MMA_ROWS and _may_normalise(problem.work)
            for (warps, chunks, stages), reg_m in product(
                PIPELINES, (block_m, 1) if inside else (block_m,)
            ):
                whole = TilePlan(
                    *(block_m, block_n, CHUNK * chunks * warps),
                    reg_m=reg_m,
                    reg_n=block_n,
                    lanes=COPY_LANES,
                    num_stages=stages,
                    num_warps=warps,
                    family=FAMILY,
                )
                yield offered(whole)
                for split in _splits(whole, shape, problem.dev):
                    yield offered(replace(whole, split_k=split))

    def violations(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> Iterator[str]:
        """Yield what its tiles, copies and clusters ask for, and what a block has not."""
        shape, family = problem.shape, f"family {FAMILY!r}"
        if plan.block_m not in (MMA_ROWS, MOST_ROWS):
            yield f"block_m is {plan.block_m}, {family} has tiles of {MMA_ROWS} or {MOST_ROWS}"
        units = {"block_n": _least_columns(shape), "block_k": CHUNK * plan.num_warps}
        for name, unit in units.items():
            if getattr(plan, name) % unit:
                yield f"{name} is {getattr(plan, name)}, {family} takes multiples of {unit}"
        if plan.lanes != COPY_LANES:
            yield f"lanes is {plan.lanes}, {family} copies {COPY_LANES} elements at once"
        if normalises(plan) and not _may_normalise(problem.work):
            yield "reg_m is 1, but there is no norm that blocks can do by themselves"
        if plan.num_stages < 2:
            yield f"num_stages is {plan.num_stages}, {family} needs 2"
        yield from _split_violations(plan, shape, problem.dev)
        yield from _copy_violations(shape)
        yield from matmuls.matmul_limits(_footprint(plan, shape, problem.dev), plan, problem)

    def price(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> matmuls.TilePrice:
        """Price the launch, with that of a norm where blocks do not normalise."""
        shape, dev = problem.shape, problem.dev
        foot = _footprint(plan, shape, dev)
        return matmuls.TilePrice(
            dev, foot, _tile(plan, foot, problem), RATES, matmuls.Columns.of(shape)
        )


def _footprint(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Footprint:
    """Return the ring of steps in shared memory, and the registers of a warp.

    The sums of the warps take the place of the steps, not that of the statistics of rows.
    """
    columns, inside = shape.parts * plan.block_n, shape.has_norm and normalises(plan)
    sums = SUM_BYTES * columns * plan.block_m * plan.num_warps
    statistics = SUM_BYTES * STATISTICS * plan.block_m * plan.num_warps if inside else 0
    smem_bytes = max(plan.num_stages * _step_bytes(plan, shape), sums) + statistics
    factors = 2 * MMA_ROWS if inside else 0
    operands = (columns + plan.block_m + factors) * CHUNK * shape.in_bytes // 128
    registers = columns * plan.block_m // 32 + operands + OVERHEAD_REGISTERS
    return Footprint(smem_bytes, registers, plan.num_warps * dev.warp_size)


def _tile(plan: TilePlan, foot: Footprint, problem: matmuls.MatmulProblem) -> matmuls.Tile:
    """Return what a plan asks for."""
    shape, dev, inside = problem.shape, problem.dev, normalises(plan) and problem.shape.has_norm
    row_s = NORM_S_PER_ROW / rows_at_once(plan, shape.k, problem.work.rows)
    columns = shape.parts * plan.block_n
    weight_bytes = columns * plan.block_k * shape.in_bytes
    return matmuls.Tile(
        rows=plan.block_m,
        columns=plan.block_n,
        blocks=plan.split_k,
        residents=resident_blocks(foot, dev),
        multiprocessors=dev.sm_count,
        depth=plan.block_k * plan.split_k,
        ahead=plan.num_stages - 1,
        instructions=_instructions(plan, shape),
        weight_bytes=weight_bytes,
        asked_bytes=weight_bytes,
        sums=columns * plan.block_m,
        meetings=plan.split_k > 1,
        rereads=1.0,  # by blocks of other rows, which are far apart in time
        in_front=shape.has_norm and not inside,
        row_s=row_s * inside,
        late_s=LATE_S,
    )


def _least_columns(shape: MatmulShape) -> int:
    """Return the columns of the narrowest block, of which every block has a multiple."""
    return GROUP if "kn" in shape.layouts else MMA_COLUMNS


def _has_clusters(dev: DeviceSpec) -> bool:
    """Tell whether a device has clusters of thread blocks, and launches that overlap."""
    return dev.capabilities.clusters and dev.capabilities.dependent_launch


def _splits(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[int]:
    """Yield in how many parts k may be split, where there are few tiles."""
    tiles = min(ceil_div(n, plan.block_n) for n in shape.n_parts)
    for split in SPLITS if _has_clusters(dev) else ():
        if tiles * split <= SPLIT_SHARE * dev.sm_count and _parts_of(plan, shape) >= split:
            yield split


def _parts_of(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the steps along k, which no part may be without."""
    return ceil_div(shape.k, plan.block_k)


def _may_normalise(work: matmuls.MatmulWork) -> bool:
    """Tell whether blocks may normalise: a kernel in front adds residuals and stores results."""
    return work.norm is not None and not (work.norm.residual or work.norm.returns_norm)


def _step_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return what a block copies in a step."""
    factors = FACTOR_LINES if shape.has_norm and normalises(plan) else 0
    lines = shape.parts * plan.block_n + plan.block_m + factors
    return lines * plan.block_k * shape.in_bytes


def _split_violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
    """Check that a cluster can have the parts of k."""
    if plan.split_k > 1 and not _has_clusters(dev):
        yield f"split_k is {plan.split_k}, but the {dev.label} has no clusters of thread blocks"
    most = min(SPLITS[-1], _parts_of(plan, shape))
    if plan.split_k > most:
        yield f"split_k is {plan.split_k}, family {FAMILY!r} has up to {most} parts of k here"


def _copy_violations(shape: MatmulShape) -> Iterator[str]:
    """Check that whole copies make up the operands."""
    for size in (shape.k, *(shape.contiguous if "kn" in shape.layouts else ())):
        if size % COPY_LANES:
            yield (
                f"family {FAMILY!r} copies {COPY_LANES} elements at once, which does not divide "
                f"{size}, along which operands lie"
            )


def _instructions(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the instructions that a warp issues in a step.

    One is counted for each line of a chunk, for its copy and its loads, and one for each ``mma``.
    """
    columns = shape.parts * plan.block_n
    products = columns // MMA_COLUMNS * (plan.block_m // MMA_ROWS)
    chunks = plan.block_k // (CHUNK * plan.num_warps)
    inside = shape.has_norm and normalises(plan)
    each = columns + plan.block_m + products * (CHUNK // MMA_K) + NORMALISING * inside
    return chunks * each
