"""Plans of TIR's tensor-core kernel for few rows: the family "few_rows".

A thread block has ``block_n`` columns of ``block_m`` rows.  All of its warps have the same columns;
``block_k`` elements of k are a step of all of them, and ``num_stages`` steps are in shared memory
or on their way to it.  With ``split_k`` above 1, so many blocks, a cluster, have the same tile and
parts of k.  See `relax_fusion.dlight_rules.tensor_cores.few_rows_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....hardware import DeviceSpec
from ....hardware.instructions import MMA
from ...prediction import HALF_DTYPES
from ...shape import matmul_shape
from ...tile_plan import TilePlan
from ..matmuls import MatmulWork
from ..tensor_cores import tiles as mma

_HALF = MMA["float16"]

FAMILY, PACKED_FAMILY = FAMILIES = ("few_rows", "packed_rows")

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


def refuses_others(work: MatmulWork, dev: DeviceSpec) -> str | None:
    """Return why the instructions are not for a dtype or a device, None if they are."""
    if work.dtype not in HALF_DTYPES:
        return f"dtype is {work.dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
    return mma.unsupported(matmul_shape(work), dev, FAMILY)


def of_height(plans: Iterable[TilePlan], rows: int) -> list[TilePlan]:
    """Return the plans for up to so many rows; one instruction takes eight."""
    if rows > MOST_ROWS:
        return []
    return [plan for plan in plans if plan.block_m <= max(rows, MMA_ROWS)]


def normalises(plan: TilePlan) -> bool:
    """Tell whether blocks normalise the rows themselves, one at a time.

    Else a kernel does it in front, for many rows or where others need them, too.
    """
    return plan.reg_m == 1
