"""Plans of TIR's tensor-core kernels for many rows.

``mma``    sm_80 and newer: warps multiply what they load into registers
``wgmma``  sm_90: groups of four warps multiply what lies in shared memory; weights ``[n, k]``

A thread block has ``block_m x block_n`` results, its warps ``reg_m x reg_n`` each (of every part),
and ``num_stages`` tiles of both operands, ``block_k`` deep, in shared memory or on their way to it.
``split_k`` blocks that share a tile are a cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ....hardware import DeviceSpec
from ....hardware.instructions import COPY_BYTES, MMA, SLICE_BYTES, WARP_GROUP_MMA
from ....workload import INTEGER_DTYPES
from ...gpu_cost import resident_blocks
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import HALF_DTYPES, Footprint
from ...shape import MatmulShape
from ...tile_plan import TilePlan

_HALF, _GROUP = MMA["float16"], WARP_GROUP_MMA["float16"]

FAMILY, WARP_GROUPS = FAMILIES = ("mma", "wgmma")

FEWEST_ROWS = 17
"""Rows from which on tiles of this family are looked at for two-byte types; fewer have kernels that
stream weights."""

WARP_TILE = _HALF.m
"""Rows and columns of a warp come in multiples of this: the operands that one ``ldmatrix.x4``
loads."""

DTYPES = (*HALF_DTYPES, *INTEGER_DTYPES, "float32")
"""Element types of operands; float32 is multiplied as tf32, where that is allowed."""

SUM_BYTES = 4
"""A sum has 4 bytes."""

OVERHEAD_REGISTERS = 40
"""A thread has 40 registers beside its accumulators and two sets of operands.  Compiled for sm_90:
232 with 128 accumulators and 64 operands, 144 with 64 and 48."""

GROUP_ROWS, GROUP_WARPS = _GROUP.m, _GROUP.warps
"""One ``wgmma`` instruction has 64 rows, and 4 warps execute it."""

GROUP_COLUMNS = _GROUP.n
"""One ``wgmma`` instruction has so many columns at most, those of both parts together."""

GROUP_LINE_BYTES = 128
"""A step of ``wgmma`` has 128 bytes of k: the lines that it reads without conflicts."""

SPLITS = (1, 2, 3, 4, 6, 8)
"""A reduction has so many parts, each a thread block of a cluster, of which every sm_90 device runs
8."""

GROUP_ALIGNMENT_BYTES = 1024
"""The stages of ``wgmma`` are aligned to 1024 bytes, at the cost of as much shared memory."""

BLOCKS = (1, 2, 3)
"""A multiprocessor has so many blocks, among which stages share what shared memory it has."""


GRIDS = ((2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (1, 8), (8, 1))
"""Warps of a block along rows and columns: as many for each scheduler of a multiprocessor.  Copies
are dealt out evenly, so that three warps along an axis would have blocks of multiples of 48: by
price they gained nothing."""

MOST_LINES = 256
"""A block has 256 rows at most, and all its parts 256 columns."""

STEP_BYTES, STAGES = (128, 64), range(2, 9)
"""A step has so many bytes of k, where k has as many; `STAGES` of them are in flight."""


def unsupported(shape: MatmulShape, dev: DeviceSpec, family: str = FAMILY) -> str | None:
    """Return why no plan of a tensor-core family runs on `dev`; None if there may be one."""
    if shape.dtype == "float32" and not shape.allow_tf32:
        return f"dtype is float32, family {family!r} multiplies it as tf32, which is not allowed"
    if shape.dtype not in DTYPES:
        return f"dtype is {shape.dtype}, family {family!r} takes {', '.join(DTYPES)}"
    if family == WARP_GROUPS and not dev.can_generate(WARP_GROUP_MMA[shape.dtype]):
        needed = f"wgmma of {shape.dtype} (CUDA, arch sm_90a)"
        return f"family {family!r} needs {needed}, which the {dev.label} lacks"
    if dev.capabilities.async_copies and dev.can_generate(MMA[shape.dtype]):
        return None
    needed = f"cp.async and mma.{MMA[shape.dtype].shape} of {shape.dtype} (CUDA, sm_80 or newer)"
    return f"family {family!r} needs {needed}, which the {dev.label} lacks"


def warp_columns(shape: MatmulShape) -> int:
    """Return what the columns of a warp are a multiple of.

    Of weights ``[k, n]`` with elements of one byte, a lane transposes four columns at once.
    """
    return 2 * WARP_TILE if shape.in_bytes == 1 and "kn" in shape.layouts else WARP_TILE


def copy_lanes(shape: MatmulShape) -> tuple[int, ...]:
    """Return how many elements a copy may move, most first."""
    return tuple(b // shape.in_bytes for b in COPY_BYTES if b >= shape.in_bytes)


def copied(shape: MatmulShape) -> tuple[int, ...]:
    """Return the extents along which operands are copied."""
    return (shape.k, *(shape.contiguous if "kn" in shape.layouts else ()))


def warp_registers(reg_m: int, columns: int) -> int:
    """Return the registers of a thread: sums, two sets of operands, and `OVERHEAD_REGISTERS`."""
    operands = (reg_m + columns) * SLICE_BYTES // 32 // 4
    return reg_m * columns // 32 + 2 * operands + OVERHEAD_REGISTERS


def filling_stages(
    stage_bytes: int, allowed: range, dev: DeviceSpec, beside_bytes: int = 0
) -> list[int]:
    """Return how many stages fill the shared memory of a multiprocessor, by its `BLOCKS`.

    What they hold, beside the one that is multiplied, hides the way to memory.
    """
    most, found = max(allowed), set()
    for blocks in BLOCKS:
        room = min(dev.smem_per_block_bytes, dev.smem_per_sm_bytes // blocks - SYSTEM_SMEM_BYTES)
        found.add(min((room - beside_bytes) // stage_bytes, most))
    return sorted((n for n in found if n in allowed), reverse=True)


class Elements(NamedTuple):
    """What tiles of warps depend on, of a workload."""

    parts: int  # accumulators of a column
    size: int  # bytes of one element of the operands
    lanes: int  # elements that a copy moves
    columns: int  # what the columns of a warp are a multiple of
    steps: tuple[int, ...]  # those of `STEP_BYTES` that k has
    reworked: bool  # whether a warp changes operands in registers: while it does, others multiply

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
