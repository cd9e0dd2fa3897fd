"""Plans of CPU kernels that repack weights into panels of columns: the family "panels".

A task packs ``reg_n`` columns, all of k, and takes them through the rows in register tiles of
``reg_m x reg_n`` results, so that block and tile are one.  Sums over ``block_k`` elements are added
up at the end: rounding errors grow with the length of a sum.  Where there are fewer panels than
tasks are wanted, the tiles are cut into ``split_m`` parts, each with its own copy of the panel.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....hardware import DeviceSpec
from ...prediction import ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan

FAMILY = "panels"

VECTORS = (1, 2, 3, 4)
"""Vectors that a row of a register tile is wide."""

MAX_ROWS = 16
"""Of a register tile."""

TASKS_PER_CORE = 4
"""Tasks that keep cores about equally busy: with one more than a multiple of the cores, a fifth of
the time is lost at most."""

MAX_SUM = 256
"""Elements that are added up in one go, where k has such a divisor.  With all of k = 768, results
erred by three times as much as MKL's."""

MIN_SUM = 64
"""Elements below which storing the sums would cost more than a tenth of making them."""

MAX_PADDING = 0.05
"""Part of the columns that a panel may compute in vain, where others compute fewer."""


def candidates(shape: MatmulShape, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield plans for `shape`: the tall half of the register tiles of each width."""
    lanes = _lanes(shape, dev)
    widths = [lanes * vectors for vectors in VECTORS]
    exact = [w for w in widths if all(n % w == 0 for n in shape.n_parts)]
    little = [w for w in widths if _columns(shape, w) <= shape.n * (1 + MAX_PADDING)]
    block_k = sum_length(shape.k)
    for width in exact or little or widths[:1]:
        vectors = width // lanes * shape.parts
        highest = min(MAX_ROWS, (dev.vector_registers - vectors - 1) // vectors)
        parts = _row_parts(_columns(shape, width) // width, dev)
        for reg_m in range(max(1, highest // 2), highest + 1):
            for split_m in parts:
                yield TilePlan(
                    *(reg_m, width, block_k),
                    reg_m=reg_m,
                    reg_n=width,
                    lanes=lanes,
                    family=FAMILY,
                    split_m=split_m,
                )


def _lanes(shape: MatmulShape, dev: DeviceSpec) -> int:
    """Return the widest vector; of a rotated pair, the widest that does not leave half a head."""
    lanes = dev.vector_bytes // 4
    if shape.contiguous != shape.n_parts:
        while any(n % lanes for n in shape.contiguous):
            lanes //= 2
    return lanes


def sum_length(k: int) -> int:
    """Return the greatest divisor of k that is not too long, or k where that is too short."""
    found = next(d for d in range(min(k, MAX_SUM), 0, -1) if k % d == 0)
    return found if found >= min(k, MIN_SUM) else k


def _columns(shape: MatmulShape, width: int) -> int:
    """Return the columns of all panels."""
    return sum(ceil_div(n, width) * width for n in shape.n_parts)


def _row_parts(panels: int, dev: DeviceSpec) -> list[int]:
    """Return in how many parts to cut the rows: 1, and what makes enough tasks."""
    wanted = ceil_div(TASKS_PER_CORE * dev.sm_count, panels)
    return [1] if wanted <= 1 else [1, wanted]


def registers(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the vector registers of a tile: accumulators, weights, and an element of x."""
    vectors = ceil_div(plan.reg_n, plan.lanes) * shape.parts
    return plan.reg_m * vectors + vectors + 1


def violations(plan: TilePlan, shape: MatmulShape) -> Iterator[str]:
    """Yield what is wrong with `plan`, besides the limits of the device."""
    for block, reg in (("block_m", "reg_m"), ("block_n", "reg_n")):
        if getattr(plan, block) != getattr(plan, reg):
            yield f"{block} is {getattr(plan, block)}, family {FAMILY!r} has {reg} of them"
    if shape.k % plan.block_k:
        yield f"block_k is {plan.block_k}, does not divide k={shape.k}"
    if plan.reg_n % plan.lanes:
        yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n}"
    if plan.split_k != 1 or plan.num_stages != 1:
        yield f"split_k and num_stages are 1 in family {FAMILY!r}"
