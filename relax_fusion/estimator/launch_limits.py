"""How many thread blocks a launch may have."""

from __future__ import annotations

from collections.abc import Iterator

from ..hardware import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import Attention, GatedFFN, MatmulChain, NormMatmul, Workload
from .footprint import is_gemv
from .prediction import ceil_div
from .shape import matmul_shape

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
    if dev.kind != "gpu" or isinstance(work, MatmulChain):
        return
    if isinstance(work, Attention):
        along = _attention(plan, work, most)
    else:
        along = _matmul(plan, work, most)
    for what, blocks in along:
        if blocks > GRID_YZ:
            yield f"needs {blocks} blocks along {what}, a launch has at most {GRID_YZ}"


def _attention(plan: TilePlan, work: Attention, most: int | None) -> Iterator[tuple[str, int]]:
    if plan.backend == "triton":
        group = work.q_heads // work.kv_heads
        yield "the query positions", ceil_div((most or 0) * group, plan.block_m)
    if plan.backend == "triton" or not plan.family:
        yield "the heads", work.q_heads


def _matmul(
    plan: TilePlan, work: NormMatmul | GatedFFN, most: int | None
) -> Iterator[tuple[str, int]]:
    shape = matmul_shape(work)
    if plan.family == "gemv" or (not plan.family and is_gemv(plan, shape.layouts)):
        yield "the rows", most or 0
    elif not plan.family:
        yield "the columns", max(ceil_div(n, plan.block_n) for n in shape.n_parts)


def launchable(
    plans: list[TilePlan], work: Workload, dev: DeviceSpec, upper: int | None
) -> list[TilePlan]:
    """Return the plans that can be launched at all sizes of a range; all of them if none can.

    Rows that nothing bounds are taken to be too many for a kernel with a block for each.
    """
    most = served(work, upper)
    if most is None and not isinstance(work, Attention):
        most = GRID_YZ + 1
    return [p for p in plans if next(launch_limits(p, work, dev, most), None) is None] or plans


def served(work: Workload, upper: int | None) -> int | None:
    """Return the largest size of a range that ends at `upper`, None if nothing bounds it."""
    dim = work.q_len if isinstance(work, Attention) else work.rows
    bound = dim if isinstance(dim, int) else dim.upper
    known = [size for size in (upper, bound) if size is not None]
    return min(known, default=None)
