"""The best plan of some, and what a chain costs as separate kernels."""

from __future__ import annotations

from collections.abc import Sequence

from ..hardware import DeviceSpec
from ..workload import Attention, MatmulChain, NormMatmul, Workload
from . import separate
from .families.cpu_chain import cost as chain_cost
from .prediction import Prediction, next_power
from .registry import Family, Option, options
from .shape import Size, attention_size, rows_of, tiled_rows
from .tile_plan import TilePlan


def best(
    found: Sequence[Option], work: Workload, dev: DeviceSpec, sizes: Sequence[Size]
) -> tuple[Option, Prediction]:
    """Return the plan that loses least over `sizes`, and its price at the last of them.

    What counts is the mean of its time over the best time at each size: a plan that pads few rows
    to many is fast at the end of a range only.  Of equals, the first that was generated.
    """
    worth = _worth_pricing(found, work, dev, sizes)
    priced = [[o.family.predict(o.plan, work, dev, size) for o in worth] for size in sizes]
    least = [min(p.seconds for p in column) for column in priced]
    losses = [
        sum(column[i].seconds / least_s for column, least_s in zip(priced, least, strict=True))
        for i in range(len(worth))
    ]
    index = losses.index(min(losses))
    return worth[index], priced[-1][index]


def _worth_pricing(
    found: Sequence[Option], work: Workload, dev: DeviceSpec, sizes: Sequence[Size]
) -> list[Option]:
    """Return the plans that can be best at some of the sizes, as their families say.

    Where no family offers one, the lowest tiles must do.
    """
    rows = tiled_rows(work, sizes[0]), next_power(tiled_rows(work, sizes[-1]))
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
    return best(found, part, dev, [rows])[1] if found else predict_unfused(part, dev, rows)


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
