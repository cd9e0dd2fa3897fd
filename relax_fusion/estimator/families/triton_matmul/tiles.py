"""Plans of the Triton back end for matmul workloads: which there are, and which fit.

Families, by the kernels of `relax_fusion.triton_bridge.kernels`:

``gemv``     one row: dot products, no tensor cores, any device
``pointer``  tiles on tensor cores, operands loaded through pointers; k may be split

`cost` has their tiles and rates.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....workload import GatedFFN, NormMatmul, Projection, Step
from ...prediction import ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan

FAMILIES = ("gemv", "pointer")

MOST_TOGETHER = 3
"""Projections that share a launch at most: queries, keys and values."""

NORM_INSIDE_ROWS, NORM_INSIDE_K = 16, 64
"""Pointer tiles in which a norm inside does not stall the loop: with 128 elements of k at once,
gamma is not copied ahead (measured: 35 us instead of 20)."""

FINER_ROWS = (
    *(1, 2, 4, 8, *range(16, 128, 16), *range(128, 1024, 32)),
    *(*range(1024, 2048, 64), *range(2048, 4096, 128), *range(4096, 8192, 256)),
    *range(8192, 16385, 512),
)
"""Rows at which it is looked, each with one more, whether a plan serves that loses little."""

SMEM_RESERVE_BYTES = 4 << 10
"""Shared memory of a pointer tile beside its stages: layout conversions."""


def kernel_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps behind the bias that comes first, which kernels add by themselves."""
    return steps[1:] if steps[:1] == ("bias",) else steps


def launches(work: NormMatmul | GatedFFN) -> list[list[int]]:
    """Return the numbers of the projections of each launch.

    Up to `MOST_TOGETHER` share one, in order.  Their weights lie alike; if pairs of features of
    some are turned that are no neighbours, the others consist of such pairs too, with no more
    behind them than a bias.
    """
    if isinstance(work, GatedFFN):
        return [[0]]
    found: list[list[int]] = []
    for index, projection in enumerate(work.outputs):
        last = [work.outputs[i] for i in found[-1]] if found else []
        if 0 < len(last) < MOST_TOGETHER and _fit_together([*last, projection]):
            found[-1].append(index)
        else:
            found.append([index])
    return found


def _fit_together(projections: Sequence[Projection]) -> bool:
    """Tell whether one kernel can compute projections."""
    if len({p.layout for p in projections}) > 1:
        return False
    apart = {p.rope.distance for p in projections if p.rope is not None}
    if not apart or apart == {1}:
        return True
    even = all(p.columns % (2 * max(apart)) == 0 for p in projections)
    return len(apart) == 1 and even and all(set(p.epilogue) <= {"bias"} for p in projections)


def norm_inside(work: NormMatmul | GatedFFN, plan: TilePlan) -> bool:
    """Tell whether the matmul's own kernel normalises: where it can, and nothing else wants it."""
    norm = work.norm
    if norm is None or norm.residual or norm.returns_sum or norm.returns_norm:
        return False
    if plan.family == "gemv":
        return True
    few = plan.block_m <= NORM_INSIDE_ROWS and plan.block_k == NORM_INSIDE_K
    return plan.family == "pointer" and norm.kind == "rms" and few


def triton_plan(
    family: str, block: tuple[int, int, int], warps: int, stages: int, split: int = 1
) -> TilePlan:
    """Return a plan of the Triton back end; `block` is ``(block_m, block_n, block_k)``."""
    return TilePlan(
        *block,
        split_k=split,
        num_stages=stages,
        num_warps=warps,
        family=family,
    )


def smem_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the shared memory of one thread block: the stages of both operands, and the rest."""
    if plan.family == "gemv":
        return 0
    step = (plan.block_m + shape.parts * plan.block_n) * plan.block_k * shape.in_bytes
    return step * plan.num_stages + SMEM_RESERVE_BYTES


def accumulators(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the float32 accumulators of one thread."""
    return ceil_div(plan.block_m * plan.block_n * shape.parts, 32 * max(plan.num_warps, 1))
