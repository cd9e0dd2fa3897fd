"""Tiles of warps: whatever fits, without what others of the same block equal or beat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ....hardware import DeviceSpec
from ...gpu_cost import resident_blocks
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import Footprint
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from .tiles import (
    BLOCKS,
    FAMILY,
    WARP_TILE,
    filling_stages,
    warp_columns,
    warp_registers,
)

GRIDS = ((2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (1, 8), (8, 1))
"""Warps of a block along rows and columns: as many for each scheduler of a multiprocessor.  Copies
are dealt out evenly, so that three warps along an axis would have blocks of multiples of 48: by
price they gained nothing."""

MOST_LINES = 256
"""Most rows of a block, and most columns of all its parts."""

STEP_BYTES, STAGES = (128, 64), range(2, 9)
"""Bytes of k, where k has as many, and stages."""


class Elements(NamedTuple):
    """What tiles of warps depend on, of a workload.

    Parameters
    ----------
    parts : int
        Accumulators of a column.
    size : int
        Bytes of one element of the operands.
    lanes : int
        Elements that a copy moves.
    columns : int
        What the columns of a warp are a multiple of.
    steps : tuple of int
        Those of `STEP_BYTES` that k has.
    reworked : bool
        Whether a warp changes operands in registers: while it does, others multiply.
    """

    parts: int
    size: int
    lanes: int
    columns: int
    steps: tuple[int, ...]
    reworked: bool

    @classmethod
    def of(cls, shape: MatmulShape, lanes: int) -> Elements:
        """Return those of a workload."""
        columns = warp_columns(shape)
        steps = tuple(step for step in STEP_BYTES if step <= shape.k * shape.in_bytes)
        reworked = shape.dtype == "float32" or columns > WARP_TILE
        return cls(shape.parts, shape.in_bytes, lanes, columns, steps, reworked)


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    reg_m: int
    reg_n: int
    warps: int
    step_bytes: int
    stages: int


@lru_cache(maxsize=256)
def warp_plans(elements: Elements, dev: DeviceSpec) -> tuple[TilePlan, ...]:
    """Return the plans of which no other of the same block is as good in everything.

    That is in the products of a warp for each operand that it loads, in the blocks of a
    multiprocessor, in the bytes that are on their way and in the depth of a step.
    """
    by_block: dict[tuple[int, int], list[tuple[tuple[float, ...], _Tile]]] = defaultdict(list)
    for tile in _tiles(elements, dev):
        by_block[tile.block_m, tile.block_n].append((_merits(tile, elements, dev), tile))
    return tuple(
        TilePlan(
            *(tile.block_m, tile.block_n, tile.step_bytes // elements.size),
            reg_m=tile.reg_m,
            reg_n=tile.reg_n,
            lanes=elements.lanes,
            num_stages=tile.stages,
            num_warps=tile.warps,
            family=FAMILY,
        )
        for each in by_block.values()
        for i, (merits, tile) in enumerate(each)
        if not any(_beats(o, merits, first=j < i) for j, (o, _) in enumerate(each) if j != i)
    )


def _tiles(elements: Elements, dev: DeviceSpec) -> Iterator[_Tile]:
    """Yield every tile that fits the device, whose copies its threads share evenly."""
    rows = range(WARP_TILE, MOST_LINES + 1, WARP_TILE)
    columns = range(elements.columns, MOST_LINES // elements.parts + 1, elements.columns)
    for (along_m, along_n), reg_m, reg_n in product(GRIDS, rows, columns):
        block_m, block_n, warps = reg_m * along_m, reg_n * along_n, along_m * along_n
        registers = warp_registers(reg_m, reg_n * elements.parts)
        threads, lines = warps * dev.warp_size, block_m + block_n * elements.parts
        if max(block_m, block_n * elements.parts) > MOST_LINES:
            continue
        if registers > min(dev.max_registers_per_thread, dev.registers_per_sm // threads):
            continue
        for step in elements.steps:
            copies = step // (elements.size * elements.lanes)  # of a line
            if block_m * copies % threads or block_n * copies % threads:
                continue
            for stages in filling_stages(lines * step, STAGES, dev):
                yield _Tile(block_m, block_n, reg_m, reg_n, warps, step, stages)


def _merits(tile: _Tile, elements: Elements, dev: DeviceSpec) -> tuple[float, ...]:
    columns, threads = tile.reg_n * elements.parts, tile.warps * dev.warp_size
    lines = tile.block_m + tile.block_n * elements.parts
    registers = warp_registers(tile.reg_m, columns)
    foot = Footprint(lines * tile.step_bytes * tile.stages, registers, threads)
    return (
        tile.reg_m * columns / (tile.reg_m + columns),
        min(resident_blocks(foot, dev, SYSTEM_SMEM_BYTES), max(BLOCKS)),
        tile.step_bytes * (tile.stages - 1),
        tile.step_bytes,
        tile.warps if elements.reworked else 0,
    )


def _beats(others: tuple[float, ...], own: tuple[float, ...], *, first: bool) -> bool:
    """Tell whether others are as good in everything; of equals, the first is."""
    return all(a >= b for a, b in zip(others, own, strict=True)) and (first or others != own)
