"""How many thread blocks a launch may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..hardware import DeviceSpec
from ..workload import Attention, Workload
from .registry import family_of, fitting
from .tile_plan import TilePlan

GRID_YZ = 65535
"""Blocks along the second and the third dimension of a grid, of CUDA
(CUDA C++ Programming Guide, table of technical specifications) and, at least, of every Vulkan
device (``maxComputeWorkGroupCount``)."""


def launch_limits(
    plan: TilePlan, work: Workload, dev: DeviceSpec, most: int | None
) -> Iterator[str]:
    """Yield which dimension of a grid would be too long.

    The kernels have along the first dimension what may be many; these are the others.

    Parameters
    ----------
    most : int, optional
        Rows, or query positions, up to which the plan serves; None if nothing bounds them.
    """
    return _too_many(fitting(plan, work, dev), work, most)


def _too_many(plan: TilePlan, work: Workload, most: int | None) -> Iterator[str]:
    for what, blocks in family_of(plan).blocks(plan, work, most):
        if blocks > GRID_YZ:
            yield f"needs {blocks} blocks along {what}, a launch has at most {GRID_YZ}"


def launchable(found: Sequence[TilePlan], work: Workload, upper: int | None) -> Sequence[TilePlan]:
    """Return the plans that can be launched at all sizes of a range; all of them if none can.

    Rows that nothing bounds are taken to be too many for a kernel with a block for each.
    """
    most = most_rows(work, upper)
    if most is None and not isinstance(work, Attention):
        most = GRID_YZ + 1
    return [plan for plan in found if next(_too_many(plan, work, most), None) is None] or found


def most_rows(work: Workload, upper: int | None) -> int | None:
    """Return the largest size of a range that ends at `upper`, None if nothing bounds it."""
    dim = work.q_len if isinstance(work, Attention) else work.rows
    bound = dim if isinstance(dim, int) else dim.upper
    known = [size for size in (upper, bound) if size is not None]
    return min(known, default=None)
