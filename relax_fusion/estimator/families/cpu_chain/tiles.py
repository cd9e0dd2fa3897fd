"""Plans of a chain of two matmuls, which share the tile of one plan.

On a CPU, family "panels": a task takes ``block_m`` rows through both matmuls, over weights that
were packed once, in register tiles of ``reg_m x reg_n`` results (fewer columns where the
intermediate has fewer); sums over ``block_k`` elements are added up at the end.  Family "", for few
rows: both matmuls one after the other, by tasks of ``block_n`` columns.  On a GPU, see
:mod:`relax_fusion.estimator.families.mma_chain.tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ....hardware import DeviceSpec
from ....workload import MatmulChain
from ...prediction import ceil_div, power_dividing
from ...tile_plan import TilePlan
from ..panels.tiles import FAMILY as PANELS
from ..panels.tiles import MAX_PADDING, MAX_ROWS, VECTORS, sum_length

TILES_OF_BLOCK = (1, 2, 4, 8, 16)
"""Register tiles that follow each other along the rows of a block."""

FEW_ROWS = 16
"""Rows of a block up to which weights may stay as they lie."""

REG_M, REG_COLUMNS, TASK_TILES = (1, 2, 4), (1, 2, 4), (1, 2, 4)
"""Rows and columns (of "kn": vectors) of a register tile, and tiles of a task, for few rows."""


def panel_columns(plan: TilePlan, work: MatmulChain, which: int) -> int:
    """Return the columns of a register tile: for the intermediate, no more vectors than it has."""
    vectors = ceil_div((work.r, work.n)[which], plan.lanes)
    return min(plan.reg_n, vectors * plan.lanes)


def is_packed(work: MatmulChain, plan: TilePlan, which: int) -> bool:
    """Tell whether A (0) or B (1) is packed; rows of A may be as short as panels are."""
    lies_so = work.layouts[0] == "kn" and work.dtype == "float32"
    return which == 1 or not lies_so or work.r % panel_columns(plan, work, 0) > 0


def sum_parts(plan: TilePlan, depth: int) -> int:
    """Return into how many sums a reduction of `depth` elements is cut."""
    return depth // plan.block_k if depth % plan.block_k == 0 else 1


def candidates(work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield plans for `work`, which may not all fit."""
    return chain(_in_a_row(work, dev), _in_blocks(work, dev))


def _in_a_row(work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
    rows, depths = work.rows, (work.k, work.r)
    if work.batch is not None or (isinstance(rows, int) and rows > FEW_ROWS):
        return
    along_k = [k for k, layout in zip(depths, work.layouts, strict=True) if layout == "nk"]
    across = [n for n, lay in zip((work.r, work.n), work.layouts, strict=True) if lay == "kn"]
    lanes = min(power_dividing(size, dev.vector_bytes // 4) for size in (*along_k, *across))
    for reg_m in REG_M:
        for columns in REG_COLUMNS:
            reg_n = columns * (lanes if across else 1)
            for tiles in TASK_TILES:
                yield TilePlan(
                    *(reg_m, reg_n * tiles, work.r), reg_m=reg_m, reg_n=reg_n, lanes=lanes
                )


def _in_blocks(work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
    lanes = dev.vector_bytes // 4
    widths = [lanes * vectors for vectors in VECTORS]
    little = [w for w in widths if ceil_div(work.n, w) * w <= work.n * (1 + MAX_PADDING)]
    for width in little or widths[:1]:
        vectors = width // lanes
        highest = min(MAX_ROWS, (dev.vector_registers - vectors - 1) // vectors)
        for reg_m in range(max(1, highest // 2), highest + 1):
            for tiles in TILES_OF_BLOCK:
                yield TilePlan(
                    *(reg_m * tiles, width, sum_length(work.k)),
                    reg_m=reg_m,
                    reg_n=width,
                    lanes=lanes,
                    family=PANELS,
                )


def registers(plan: TilePlan, work: MatmulChain) -> int:
    """Return the vector registers of a tile: accumulators, weights, and an element of x."""
    if plan.family == PANELS:
        vectors = ceil_div(plan.reg_n, plan.lanes)
        return plan.reg_m * vectors + vectors + 1
    return _sums(plan, work)[0] + plan.reg_m + 2


def stack_bytes(plan: TilePlan, work: MatmulChain) -> int:
    """Return the buffer of accumulators, as it is before registers are allocated."""
    return 0 if plan.family == PANELS else _sums(plan, work)[1]


def _sums(plan: TilePlan, work: MatmulChain) -> tuple[int, int]:
    """Return vectors and bytes of accumulators: "nk" has a vector for each, along k."""
    tile = plan.reg_m * plan.reg_n
    if "nk" in work.layouts:
        return tile, tile * plan.lanes * 4
    return ceil_div(tile, plan.lanes), tile * 4


def scratch_bytes(plan: TilePlan, work: MatmulChain) -> int:
    """Return the rows of the intermediate, and of x in float32, that a task holds."""
    if plan.family != PANELS:
        return 0
    width = panel_columns(plan, work, 0)
    kept = ceil_div(work.r, width) * width
    return 4 * plan.block_m * (kept + (0 if work.dtype == "float32" else work.k))


def violations(plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Iterator[str]:
    """Yield why `plan` cannot run `work` on `dev`."""
    if plan.split_k != 1 or plan.num_stages != 1 or plan.split_m != 1:
        yield "split_k, split_m and num_stages are 1 in chains of matmuls"
    if plan.family == PANELS:
        yield from _block_limits(plan, work, dev)
    else:
        yield from _row_limits(plan, work)


def _block_limits(plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Iterator[str]:
    if plan.block_n != plan.reg_n:
        yield f"block_n is {plan.block_n}, family {PANELS!r} has reg_n of them"
    if work.k % plan.block_k:
        yield f"block_k is {plan.block_k}, does not divide k={work.k}"
    if plan.reg_n % plan.lanes:
        yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n}"
    scratch = scratch_bytes(plan, work)
    if scratch > dev.l2_bytes // 2:
        yield (
            f"needs {scratch} B of cache for rows of the intermediate, half of what a "
            f"core of the {dev.label} has is {dev.l2_bytes // 2} B"
        )


def _row_limits(plan: TilePlan, work: MatmulChain) -> Iterator[str]:
    if work.batch is not None:
        yield f"a batch of matrices needs family {PANELS!r}"
    for layout, k, n in zip(work.layouts, (work.k, work.r), (work.r, work.n), strict=True):
        if layout == "nk" and k % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide {k}, along which a weight lies"
        if layout == "kn" and (n % plan.lanes or plan.reg_n % plan.lanes):
            yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n} or {n} columns"
