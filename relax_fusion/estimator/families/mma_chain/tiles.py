"""Plans of a chain of two matmuls on tensor cores: the family "mma" of a `MatmulChain`.

A thread block takes ``block_m`` rows to ``block_n`` columns of the result; each of its warps has
``reg_m`` rows, and all of the intermediate of them in registers.  ``reg_n`` columns are summed at a
time, of the result and (where there are as many) of the intermediate; ``block_k`` elements of x and
A, or ``reg_n`` columns of B, are a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ....hardware import DeviceSpec
from ....workload import DTYPE_BYTES, MatmulChain
from ...prediction import HALF_DTYPES, ceil_div
from ...tile_plan import TilePlan
from ..tensor_cores import tiles as mma

SLICE = mma.WARP_TILE
"""Columns of the intermediate in one instruction of the second product."""

LANES = (8, 4, 2)
"""Elements of a copy: 16, 8 or 4 bytes."""

ROWS, WARPS, COLUMNS = (16, 32), (1, 2, 4, 8), (16, 32, 64, 128)
PIPELINES = ((32, 4), (64, 3), (64, 4), (64, 6), (64, 8), (128, 3), (128, 4))
"""Elements of k of a step, and stages."""

OVERHEAD_REGISTERS = 40
"""Of a thread, beside sums and operands.  Assumed as for `mma.OVERHEAD_REGISTERS`."""


def chunk_columns(plan: TilePlan, work: MatmulChain) -> int:
    """Return the columns of the intermediate that are summed at a time."""
    return min(plan.reg_n, ceil_div(work.r, SLICE) * SLICE)


def unsupported(work: MatmulChain, dev: DeviceSpec) -> str | None:
    """Return why no plan of the family runs on `dev`; None if there may be one."""
    if work.dtype not in HALF_DTYPES:
        return f"dtype is {work.dtype}, a chain on a GPU takes {' and '.join(HALF_DTYPES)}"
    lacking = mma.lacks_instructions(work.dtype, dev)
    return f"a chain on a GPU {lacking}" if lacking else None


def _contiguous(work: MatmulChain) -> tuple[int, ...]:
    """Return the sizes along which operands lie, and are copied."""
    first, second = work.layouts
    return work.k, work.k if first == "nk" else work.r, work.r if second == "nk" else work.n


def candidates(work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield plans for `work`, which may not all fit."""
    lanes = next((n for n in LANES if all(s % n == 0 for s in _contiguous(work))), None)
    if lanes is None or unsupported(work, dev) is not None:
        return
    padded = ceil_div(work.n, SLICE) * SLICE
    pipelines = [(k, s) for k, s in PIPELINES if k < 2 * work.k] or PIPELINES[:1]
    for reg_m, warps, reg_n in product(ROWS, WARPS, COLUMNS):
        if reg_n > padded:
            continue
        tiles = ceil_div(work.n, reg_n)
        for parts in sorted({ceil_div(tiles, 1 << p) for p in range(tiles.bit_length())}):
            for block_k, stages in pipelines:
                yield TilePlan(
                    *(reg_m * warps, reg_n * parts, block_k),
                    reg_m=reg_m,
                    reg_n=reg_n,
                    lanes=lanes,
                    num_stages=stages,
                    num_warps=warps,
                    family=mma.FAMILY,
                )


def registers(plan: TilePlan, work: MatmulChain) -> int:
    """Return the registers of a thread."""
    middle, result = chunk_columns(plan, work) // 2, plan.reg_n // 2
    kept = ceil_div(work.r, SLICE) * 4
    tiles = plan.reg_m // mma.WARP_TILE
    return tiles * (kept + max(middle, result) + 4) + 4 + OVERHEAD_REGISTERS


def stage_bytes(plan: TilePlan, work: MatmulChain) -> int:
    """Return the shared memory of a stage: x and A, or B."""
    inner = (plan.block_m + chunk_columns(plan, work)) * plan.block_k
    outer = plan.reg_n * ceil_div(work.r, SLICE) * SLICE
    return max(inner, outer) * DTYPE_BYTES[work.dtype]


def violations(plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Iterator[str]:
    """Yield what is wrong with `plan`, besides the limits of the device."""
    for name in ("reg_m", "reg_n", "block_k"):
        if getattr(plan, name) % mma.WARP_TILE:
            yield f"{name} is {getattr(plan, name)}, must be a multiple of {mma.WARP_TILE}"
    if plan.num_warps != plan.block_m // plan.reg_m:
        yield f"num_warps is {plan.num_warps}, {plan.block_m} rows of {plan.reg_m} make others"
    if plan.num_stages < 2:
        yield f"num_stages is {plan.num_stages}, copies that run ahead need 2"
    if plan.split_k != 1 or plan.split_m != 1:
        yield "split_k and split_m are 1 in chains of matmuls"
    if plan.lanes not in LANES or any(size % plan.lanes for size in _contiguous(work)):
        sizes = ", ".join(map(str, sorted(set(_contiguous(work)))))
        yield f"lanes is {plan.lanes}, must be 8, 4 or 2 and divide {sizes}"
