"""Which plans of the families "mma" and "wgmma" are worth pricing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

from ....hardware import DeviceSpec
from ....workload import Dim
from ...prediction import HALF_DTYPES, ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from .tiles import (
    FAMILY,
    FEWEST_ROWS,
    GROUP_ALIGNMENT_BYTES,
    GROUP_LINE_BYTES,
    GROUP_ROWS,
    SPLITS,
    SYSTEM_SMEM_BYTES,
    WARP_GROUPS,
    WARP_TILE,
    copied,
    copy_lanes,
    split_violations,
    unsupported,
    warp_columns,
)

WARP_TILES = ((64, 64), (64, 48), (64, 32), (32, 64), (32, 32))
"""Rows and columns (of all parts) that a warp accumulates."""

WARP_GRIDS = ((2, 4), (4, 2), (2, 2), (1, 4), (2, 1), (1, 2))
"""Warps of a block along rows and columns."""

STEPS = ((128, 3), (128, 4), (64, 4))
"""Bytes of k, and stages."""

GROUP_TILES = (
    *((128, 256), (256, 128), (128, 192), (128, 128)),
    *((64, 256), (64, 192), (64, 128), (64, 64)),
)
"""Rows and columns (of all parts) of blocks of warp groups."""

GROUP_STAGES, GROUP_BLOCKS = range(3, 9), (1, 2, 3)
"""Stages: one is multiplied and one waits for its readers; what the others hold hides the way to
memory.  And blocks of one multiprocessor, which share what shared memory it has."""


def candidates(shape: MatmulShape, rows: Dim, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield plans for `shape`, which may not all fit; of equal prices, the first is to be taken."""
    wide = copy_lanes(shape)
    lanes = next((n for n in wide if all(size % n == 0 for size in copied(shape))), None)
    if lanes is None or unsupported(shape, dev):
        return
    if shape.dtype in HALF_DTYPES and isinstance(rows, int) and rows < FEWEST_ROWS:
        return
    most = 2 * max(rows, FEWEST_ROWS) if isinstance(rows, int) else max(GROUP_TILES)[0]
    if shape.dtype not in HALF_DTYPES:  # few rows have nothing better than these
        most = max(most, GROUP_ROWS)
    for plan in chain(_groups(shape, lanes, dev), _warps(shape, lanes)):
        if plan.block_m <= most:
            yield from _splits(plan, shape, dev)


def _splits(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield `plan`, and it with as many parts of the reduction as the device has room for."""
    tiles = max(ceil_div(n, plan.block_n) for n in shape.n_parts)
    for split in SPLITS:
        whole = replace(plan, split_k=split)
        much = split > 1 and tiles * split > 2 * dev.sm_count
        if not much and next(split_violations(whole, shape, dev), None) is None:
            yield whole


def _groups(shape: MatmulShape, lanes: int, dev: DeviceSpec) -> Iterator[TilePlan]:
    if unsupported(shape, dev, WARP_GROUPS) is not None or shape.layouts != {"nk"}:
        return
    for block_m, columns in GROUP_TILES:
        block_n = columns // shape.parts
        for stages in _group_stages((block_m + columns) * GROUP_LINE_BYTES, dev):
            yield TilePlan(
                *(block_m, block_n, GROUP_LINE_BYTES // shape.in_bytes),
                reg_m=WARP_TILE,
                reg_n=block_n,
                lanes=lanes,
                num_stages=stages,
                num_warps=block_m // WARP_TILE,
                family=WARP_GROUPS,
            )


def _group_stages(stage_bytes: int, dev: DeviceSpec) -> list[int]:
    """Return how many stages fill the shared memory of a multiprocessor, by its blocks."""
    found = set()
    for blocks in GROUP_BLOCKS:
        room = min(dev.smem_per_block_bytes, dev.smem_per_sm_bytes // blocks - SYSTEM_SMEM_BYTES)
        found.add(min((room - GROUP_ALIGNMENT_BYTES) // stage_bytes, max(GROUP_STAGES)))
    return sorted((n for n in found if n in GROUP_STAGES), reverse=True)


def _warps(shape: MatmulShape, lanes: int) -> Iterator[TilePlan]:
    for (reg_m, columns), (along_m, along_n) in product(WARP_TILES, WARP_GRIDS):
        if columns % (warp_columns(shape) * shape.parts):
            continue
        reg_n = columns // shape.parts
        for step_bytes, stages in STEPS:
            yield TilePlan(
                *(reg_m * along_m, reg_n * along_n, step_bytes // shape.in_bytes),
                reg_m=reg_m,
                reg_n=reg_n,
                lanes=lanes,
                num_stages=stages,
                num_warps=along_m * along_n,
                family=FAMILY,
            )
