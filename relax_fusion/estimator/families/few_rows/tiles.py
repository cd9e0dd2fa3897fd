"""Plans of TIR's tensor-core kernel for few rows: the family "few_rows".

A thread block has ``block_n`` columns of ``block_m`` rows.  All of its warps have the same columns;
``block_k`` elements of k are a step of all of them, and ``num_stages`` steps are in shared memory
or on their way to it.  With ``split_k`` above 1, so many blocks, a cluster, have the same tile and
parts of k.  See `relax_fusion.dlight_rules.tensor_cores.few_rows_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ....hardware import DeviceSpec
from ....hardware.instructions import MMA
from ....workload import GatedFFN, NormMatmul
from ...prediction import ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from ..tensor_cores import tiles as mma

_HALF = MMA["float16"]

FAMILY = "few_rows"

MMA_COLUMNS, MMA_ROWS, MMA_K = _HALF.m, _HALF.n, _HALF.k
"""Columns of the weight, rows of x and elements of k that one instruction takes."""

MOST_ROWS = 16
"""Rows of a tile, and of a static workload, up to which plans of this family are looked at."""

CHUNK = 64
"""Elements of k that a warp takes at a time: 128 bytes of each line, which memory gives at once."""

GROUP = 64
"""Columns of a weight ``[k, n]`` that a warp takes at a time: 128 bytes as well."""

COPY_LANES = 8
"""Elements of a copy: 16 bytes."""

SUM_BYTES = 4
"""Of float32."""

STATISTICS = 2
"""Sums of a row that there is room for: a layer norm has two."""

FACTOR_LINES = 4
"""Lines of a chunk for gamma and beta: a warp copies four at a time."""

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
"""Of a thread, beside its sums and operands: addresses, and what a norm unpacks.  Compiled for
sm_90: 48 with 8 sums and 24 operands, 102 with 32 and 56."""


def normalises(plan: TilePlan) -> bool:
    """Tell whether blocks normalise the rows themselves, one at a time.

    Else a kernel does it in front, for many rows or where others need them, too.
    """
    return plan.reg_m == 1


def least_columns(shape: MatmulShape) -> int:
    """Return the columns of the narrowest block, of which every block has a multiple."""
    return GROUP if "kn" in shape.layouts else MMA_COLUMNS


def candidates(
    work: NormMatmul | GatedFFN, shape: MatmulShape, dev: DeviceSpec
) -> Iterator[TilePlan]:
    """Yield plans for `work`, which may not all fit."""
    rows = work.rows
    if mma.unsupported(shape, dev, FAMILY) or next(_copy_violations(shape), None):
        return
    if isinstance(rows, int) and rows > MOST_ROWS:
        return
    unit = least_columns(shape)
    widths = {c // shape.parts for c in COLUMNS if c // shape.parts % unit == 0} or {unit}
    for block_m, block_n in product((MMA_ROWS, MOST_ROWS), sorted(widths)):
        if isinstance(rows, int) and block_m >= 2 * max(rows, MMA_ROWS):
            continue
        inside = block_m == MMA_ROWS and _may_normalise(work)
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
            yield whole
            yield from (replace(whole, split_k=split) for split in _splits(whole, shape, dev))


def _splits(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[int]:
    """Yield in how many parts k may be split, where there are few tiles."""
    tiles = min(ceil_div(n, plan.block_n) for n in shape.n_parts)
    for split in SPLITS if has_clusters(dev) else ():
        if tiles * split <= SPLIT_SHARE * dev.sm_count and _parts_of(plan, shape) >= split:
            yield split


def has_clusters(dev: DeviceSpec) -> bool:
    """Tell whether a device has clusters of thread blocks, and launches that overlap."""
    return dev.capabilities.clusters and dev.capabilities.dependent_launch


def _parts_of(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the steps along k, which no part may be without."""
    return ceil_div(shape.k, plan.block_k)


def _may_normalise(work: NormMatmul | GatedFFN) -> bool:
    """Tell whether blocks may normalise: a kernel in front adds residuals and stores results."""
    return work.norm is not None and not (work.norm.residual or work.norm.returns_norm)


def step_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return what a block copies in a step."""
    factors = FACTOR_LINES if shape.has_norm and normalises(plan) else 0
    lines = shape.parts * plan.block_n + plan.block_m + factors
    return lines * plan.block_k * shape.in_bytes


def smem_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the shared memory of a thread block.

    The sums of the warps take the place of the steps, not that of the statistics of rows.
    """
    sums = shape.parts * plan.block_n * plan.block_m * plan.num_warps
    inside = shape.has_norm and normalises(plan)
    statistics = STATISTICS * plan.block_m * plan.num_warps if inside else 0
    ring = plan.num_stages * step_bytes(plan, shape)
    return max(ring, SUM_BYTES * sums) + SUM_BYTES * statistics


def registers(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the registers of a thread."""
    columns = shape.parts * plan.block_n
    sums = columns * plan.block_m // 32
    factors = 2 * MMA_ROWS if shape.has_norm and normalises(plan) else 0
    operands = (columns + plan.block_m + factors) * CHUNK * shape.in_bytes // 128
    return sums + operands + OVERHEAD_REGISTERS


def violations(
    plan: TilePlan, work: NormMatmul | GatedFFN, shape: MatmulShape, dev: DeviceSpec
) -> Iterator[str]:
    """Yield what is wrong with `plan`, besides the limits of the device."""
    if plan.block_m not in (MMA_ROWS, MOST_ROWS):
        yield f"block_m is {plan.block_m}, family {FAMILY!r} has tiles of {MMA_ROWS} or {MOST_ROWS}"
    units = {
        "block_n": least_columns(shape),
        "block_k": CHUNK * plan.num_warps,
    }
    for name, unit in units.items():
        if getattr(plan, name) % unit:
            yield f"{name} is {getattr(plan, name)}, family {FAMILY!r} takes multiples of {unit}"
    if plan.lanes != COPY_LANES:
        yield f"lanes is {plan.lanes}, family {FAMILY!r} copies {COPY_LANES} elements at once"
    if normalises(plan) and not _may_normalise(work):
        yield "reg_m is 1, but there is no norm that blocks can do by themselves"
    if plan.num_stages < 2:
        yield f"num_stages is {plan.num_stages}, family {FAMILY!r} needs 2"
    yield from _split_violations(plan, shape, dev)
    yield from _copy_violations(shape)


def _split_violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
    """Check that a cluster can have the parts of k."""
    if plan.split_k > 1 and not has_clusters(dev):
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
