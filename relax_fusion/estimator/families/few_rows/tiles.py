"""Plans of TIR's tensor-core kernel for few rows: the family "few_rows".

A thread block has ``block_n`` columns of ``block_m`` rows.  All of its warps have the same columns;
``block_k`` elements of k are a step of all of them, and ``num_stages`` steps are in shared memory
or on their way to it.  With ``split_k`` above 1, so many blocks, a cluster, have the same tile and
parts of k.  See `relax_fusion.dlight_rules.tensor_cores.few_rows_kernel`.

Weights that kernels compute from few bits come as fast as their bits do: a thread loads `WIDTHS`
neighbours along k of a column at once and computes them in registers
(`relax_fusion.dlight_rules.tensor_cores.dequantised_rows`).
"""

from __future__ import annotations

from ....hardware import DeviceSpec
from ....hardware.instructions import MMA
from ....workload import DTYPE_BYTES, NormMatmul
from ...family import Offer
from ...prediction import HALF_DTYPES, ceil_div
from ...tile_plan import TilePlan
from ..matmuls import MatmulProblem
from ..tensor_cores import tiles as mma

_HALF = MMA["float16"]

FAMILY, PACKED_FAMILY = FAMILIES = ("few_rows", "packed_rows")

MMA_COLUMNS, MMA_ROWS, MMA_K = _HALF.m, _HALF.n, _HALF.k
"""Columns of the weight, rows of x and elements of k that one instruction takes."""

MOST_ROWS = 16
"""Rows of a tile, and of a static workload, up to which plans of this family are looked at."""

CHUNK = 64
"""A warp takes 64 elements of k at a time: 128 bytes of each line, which memory gives at once."""

GROUP = 64
"""A warp takes 64 columns of a weight ``[k, n]`` at a time: 128 bytes as well."""

COPY_LANES = 8
"""A copy has 8 elements: 16 bytes."""

SUM_BYTES = 4
"""A sum, in float32, has 4 bytes."""

STATISTICS = 2
"""Sums of a row that there is room for: a layer norm has two."""

FACTOR_LINES = 4
"""A chunk has room for 4 lines of gamma and beta, which a warp copies at a time."""

AT_ONCE = 8
"""A thread loads so many pieces of 16 bytes of rows at once, for their statistics."""

PIECE = 8
"""At least 8 elements are computed together; they must divide k."""

WIDTHS = (32, 16, 8)
"""A thread of a kernel for few rows loads so many elements of each of its columns at once: of four
bits, 16 bytes."""

MEMBERS = 4
"""Four threads share a column."""

FEW_ROWS = (1, MMA_ROWS, MOST_ROWS)
"""The ranges of few rows end at so many rows."""

WEIGHT_BYTES = 0.5
"""A weight mostly has four bits: 0.5 bytes."""

WARPS = (8, 4, 2, 1)
"""A block for few rows has so many warps, which take turns along k."""

COLUMNS = (16, 32, 64)
"""A block for few rows has so many columns."""

STAGES = (2, 1)
"""So many steps are loaded ahead."""

REGISTERS = 64
"""A thread may load 64 registers ahead: with more, too few blocks are resident."""


def refuses_others(problem: MatmulProblem) -> str | None:
    """Return why the instructions are not for a dtype or a device, None if they are."""
    dtype = problem.work.dtype
    if dtype not in HALF_DTYPES:
        return f"dtype is {dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
    return mma.unsupported(problem.shape, problem.dev, FAMILY)


def offered(plan: TilePlan, last: int = MOST_ROWS) -> Offer:
    """Return the offer of a plan for few rows; one instruction takes eight."""
    return Offer(plan, 1 if plan.block_m <= MMA_ROWS else plan.block_m, last)


def normalises(plan: TilePlan) -> bool:
    """Tell whether blocks normalise the rows themselves, one at a time.

    Else a kernel does it in front, for many rows or where others need them, too.
    """
    return plan.reg_m == 1


def rows_at_once(plan: TilePlan, k: int, rows: object) -> int:
    """Return of how many rows blocks that normalise add up statistics at once.

    One where their number is not known: it may be one.
    """
    pieces = ceil_div(k, COPY_LANES * 32 * plan.num_warps)  # of a thread
    known = min(rows, plan.block_m) if isinstance(rows, int) else 1
    return max(1, min(AT_ONCE // pieces, known))


def width(depth: int) -> int:
    """Return how many neighbours along k a thread of a kernel for few rows has."""
    return next(w for w in WIDTHS if depth % w == 0)


def few_rows_plans(work: NormMatmul, dev: DeviceSpec) -> list[tuple[int | None, TilePlan]]:
    """Return plans for up to `MOST_ROWS` rows, by the last row of each."""
    rows = work.rows
    if isinstance(rows, int):
        return [(None, _few_rows_plan(work, min(rows, MOST_ROWS), dev))]
    return [(last, _few_rows_plan(work, last, dev)) for last in FEW_ROWS]


def _few_rows_plan(work: NormMatmul, rows: int, dev: DeviceSpec) -> TilePlan:
    chunk = MEMBERS * width(work.k)  # of a warp
    warps = next(w for w in WARPS if w * chunk <= work.k or w == 1)
    block_m = MMA_ROWS if rows <= MMA_ROWS else MOST_ROWS
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
        family=FAMILY,
    )
