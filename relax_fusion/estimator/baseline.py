"""The best plan of some, and what a chain costs as separate kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from ..hardware import DeviceSpec
from ..workload import Attention, MatmulChain, NormMatmul, Workload
from . import separate
from .families.cpu_chain import cost as chain_cost
from .prediction import Prediction, next_power
from .registry import Family, Option, options
from .shape import Size, attention_size, rows_of, tiled_rows
from .tile_plan import TilePlan

MOST_KERNELS = 3
"""Plans for the cells of one range of rows: each is a kernel to compile."""

WORTH_A_KERNEL = 1.05
"""By what factor the worst cell has to gain by as many plans as may be, for not taking fewer."""


def best(
    found: Sequence[Option], work: Workload, dev: DeviceSpec, cells: Sequence[Sequence[Size]]
) -> list[Option]:
    """Return a plan for each cell, of as few plans as do.

    One plan is that which loses least over all sizes; of several, the worst cell decides.  What
    counts is the mean of a plan's time over the best time at each size of a cell: a plan that pads
    few rows to many is fast at the end of a range only.  Of equals, the first that was generated.
    """
    worth = _worth_pricing(found, work, dev, [size for cell in cells for size in cell])
    losses = [_losses(worth, work, dev, cell) for cell in cells]
    every = range(len(worth))
    weighed = [sum(len(c) * loss[i] for c, loss in zip(cells, losses, strict=True)) for i in every]
    single = weighed.index(min(weighed))
    bests = dict.fromkeys([single, *(loss.index(min(loss)) for loss in losses)])

    def worst(plans: Sequence[int]) -> float:
        return max(min(loss[i] for i in plans) for loss in losses)

    few: list[tuple[int, ...]] = [(single,)]
    for count in range(2, min(MOST_KERNELS, len(bests)) + 1):
        few.append(min(combinations(bests, count), key=worst))
    enough = WORTH_A_KERNEL * worst(few[-1])
    chosen = next(plans for plans in few if worst(plans) <= enough)
    return [worth[min(chosen, key=loss.__getitem__)] for loss in losses]


def _losses(
    worth: Sequence[Option], work: Workload, dev: DeviceSpec, sizes: Sequence[Size]
) -> list[float]:
    """Return the mean of each plan's time over the best time at each size."""
    priced = [[o.family.predict(o.plan, work, dev, size).seconds for o in worth] for size in sizes]
    least = [min(column) for column in priced]
    return [
        sum(c[i] / s for c, s in zip(priced, least, strict=True)) / len(sizes)
        for i in range(len(worth))
    ]


def _worth_pricing(
    found: Sequence[Option], work: Workload, dev: DeviceSpec, sizes: Sequence[Size]
) -> list[Option]:
    """Return the plans that can be best at some of the sizes, as their families say.

    Where no family offers one, the lowest tiles must do.
    """
    tiled = [tiled_rows(work, size) for size in sizes]
    rows = min(tiled), next_power(max(tiled))
    by_family: dict[Family, list[TilePlan]] = {}
    for option in found:
        by_family.setdefault(option.family, []).append(option.plan)
    worth = [Option(f, p) for f, own in by_family.items() for p in f.worth(own, work, dev, rows)]
    lowest = max(rows[1], min((option.plan.block_m for option in found), default=0))
    return worth or [option for option in found if option.plan.block_m <= lowest]


def left_apart(work: Workload, dev: DeviceSpec, size: Size, backend: str) -> Prediction:
    """Return what the chain costs if it is left to TVM, and to passes that fuse a part of it.

    A chain of matmuls is left to the passes that fuse each of them, by `backend`.
    """
    if not isinstance(work, MatmulChain):
        return predict_unfused(work, dev, size)
    apart = chain_cost.priced(work, dev, rows_of(work, size))
    parts = [_alone(part, dev, rows, backend) for part, rows in apart]
    return chain_cost.together(parts, work, dev)


def _alone(part: NormMatmul, dev: DeviceSpec, rows: int, backend: str) -> Prediction:
    """Return what one matmul of a chain costs; TVM schedules it where no tile of ours fits."""
    found = list(options(part, dev, backend))
    if not found:
        return predict_unfused(part, dev, rows)
    (option,) = best(found, part, dev, [[rows]])
    return option.family.predict(option.plan, part, dev, rows)


def predict_unfused(
    work: Workload, dev: DeviceSpec, size: Size, *, backend: str = "tir"
) -> Prediction:
    """Return what the chain costs at `size` as separate kernels, each with its bytes and launch.

    Parameters
    ----------
    size : int or AttentionSize
        As for `predict`.
    backend : {"tir", "triton"}
        What the separate matmuls run on: plain FMAs, as TVM's own schedules do, or tensor cores,
        as a vendor library does.  Compare like with like.
    """
    if isinstance(work, MatmulChain):
        parts = [
            predict_unfused(part, dev, rows, backend=backend)
            for part, rows in chain_cost.priced(work, dev, rows_of(work, size))
        ]
        return chain_cost.together(parts, work, dev)
    if isinstance(work, Attention):
        kernels = separate.attention_kernels(work, attention_size(work, size))
    else:
        kernels = separate.matmul_kernels(work, rows_of(work, size))
    return separate.price(kernels, work.dtype, dev, backend)
