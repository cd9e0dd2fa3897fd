"""Plans for weights that tensor-core kernels compute from few bits, on the way from memory.

Few rows are bound by how fast bits come: a thread loads `WIDTHS` neighbours along k of a column at
once and computes them in registers.  See `relax_fusion.dlight_rules.tensor_cores.dequantised_rows`.
"""

from __future__ import annotations

from ....hardware import DeviceSpec
from ....workload import DTYPE_BYTES, NormMatmul
from ...prediction import ceil_div
from ...tile_plan import TilePlan
from . import tiles as few_rows

PIECE = 8
"""Elements that are computed together at least; they must divide k."""

WIDTHS = (32, 16, 8)
"""Elements that a thread of a kernel for few rows loads at once, of each of its columns: of four
bits, 16 bytes."""

MEMBERS = 4
"""Threads that share a column."""

FEW_ROWS = (1, few_rows.MMA_ROWS, few_rows.MOST_ROWS)
"""The last of the ranges of few rows."""

WEIGHT_BYTES = 0.5
"""Of a weight of four bits, which is what there mostly is."""

WARPS = (8, 4, 2, 1)
"""Of a block for few rows, which take turns along k."""

COLUMNS = (16, 32, 64)
"""Of a block for few rows."""

STAGES = (2, 1)
"""Steps that are loaded ahead."""

REGISTERS = 64
"""What a thread may load ahead: with more, too few blocks are resident."""


def width(depth: int) -> int:
    """Return how many neighbours along k a thread of a kernel for few rows has."""
    return next(w for w in WIDTHS if depth % w == 0)


def few_rows_plans(work: NormMatmul, dev: DeviceSpec) -> list[tuple[int | None, TilePlan]]:
    """Return plans for up to `few_rows.MOST_ROWS` rows, by the last row of each."""
    rows = work.rows
    if isinstance(rows, int):
        return [(None, _few_rows_plan(work, rows, dev))] if rows <= few_rows.MOST_ROWS else []
    return [(last, _few_rows_plan(work, last, dev)) for last in FEW_ROWS]


def _few_rows_plan(work: NormMatmul, rows: int, dev: DeviceSpec) -> TilePlan:
    chunk = MEMBERS * width(work.k)  # of a warp
    warps = next(w for w in WARPS if w * chunk <= work.k or w == 1)
    block_m = few_rows.MMA_ROWS if rows <= few_rows.MMA_ROWS else few_rows.MOST_ROWS
    n = work.outputs[0].columns

    def fetched(columns: int) -> float:
        """Return what a multiprocessor fetches from L2, for each element along k."""
        blocks = ceil_div(ceil_div(n, columns), dev.sm_count)
        return blocks * (columns * WEIGHT_BYTES + rows * DTYPE_BYTES[work.dtype])

    block_n = min(COLUMNS, key=fetched)
    steps = ceil_div(work.k, chunk * warps)
    loaded = (block_n + 4 * block_m) * width(work.k) // 64
    fits = (s for s in STAGES if s * loaded <= REGISTERS and 2 * s <= steps)
    return TilePlan(
        *(block_m, block_n, chunk * warps),
        reg_m=block_m,
        reg_n=block_n,
        lanes=PIECE,
        num_stages=next(fits, 1),
        num_warps=warps,
        family=few_rows.FAMILY,
    )
