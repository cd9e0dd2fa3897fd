"""Adapters of the matmul kernel in CUDA C++: the launches in front of it, and what they cost.

A launch of the same kernel makes ``x A``, and that of ``x W`` goes on with ``(x A) B``: some more
steps, of other tensors.  It begins when the one in front has, and waits for it before these steps
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul, narrow_matmuls
from ...family import KernelFamily, Option
from ...prediction import Prediction, ceil_div, next_power
from ...shape import MatmulShape, Problem, matmul_shape
from ..matmuls import NEXT_LAUNCH_S
from .cost import RATES
from .tiles import HALF_K, CudaPlan, together


def narrow_works(work: NormMatmul | GatedFFN) -> list[NormMatmul]:
    """Return the first matmuls of adapters, those of each launch together."""
    if isinstance(work, GatedFFN):
        return []
    groups = ([work.outputs[i].adapter for i in alike] for alike in together(work))
    return [narrow_matmuls(work, found) for alike in groups if (found := [a for a in alike if a])]


@lru_cache(maxsize=256)
def longer(work: NormMatmul | GatedFFN) -> MatmulShape:
    """Return the shape of a workload whose k has the longest rank behind it, in whole steps."""
    outputs = () if isinstance(work, GatedFFN) else work.outputs
    rank = max(p.adapter.rank for p in outputs if p.adapter is not None)
    steps = ceil_div(work.k, HALF_K) + ceil_div(rank, HALF_K)
    return replace(matmul_shape(work, pairs=False), k=HALF_K * steps)


def narrow_plan(
    family: KernelFamily[NormMatmul], work: NormMatmul, dev: DeviceSpec, rows: int | None
) -> CudaPlan:
    """Return the cheapest plan by which one warp group makes the ``x A`` of adapters.

    That is of as many rows as the next power of two, so that few are priced.

    `work` are the first matmuls of adapters (`narrow_matmuls`); the plan serves up to `rows`.
    """
    most = family.breaks.open_size if rows is None else rows
    return CudaPlan.of(_cheapest(family, Problem(work, dev), next_power(most)).plan)


@lru_cache(maxsize=1024)
def _cheapest(family: KernelFamily[NormMatmul], problem: Problem[NormMatmul], rows: int) -> Option:
    some = (option for option in _alone(family, problem) if option.is_worth(rows, rows))
    return min(some, key=lambda option: option.price.at(rows).seconds)


@lru_cache(maxsize=64)
def _alone(family: KernelFamily[NormMatmul], problem: Problem[NormMatmul]) -> list[Option]:
    """Return the plans of one warp group that multiplies, whose blocks share no copies."""
    found = []
    for offer in family.plans(problem):
        plan = CudaPlan.of(offer.plan)
        alone = plan.multiplying == 1 and plan.cluster == plan.split_k
        if alone and next(family.violations(plan, problem), None) is None:
            found.append(Option(family, problem, offer))
    return found


@lru_cache(maxsize=4096)  # for all plans of the whole weights
def in_front(
    family: KernelFamily[NormMatmul], work: NormMatmul | GatedFFN, dev: DeviceSpec, rows: int
) -> list[tuple[float, Prediction]]:
    """Return what each launch of `narrow_works` costs, and the part of the device that it takes."""
    most, found = next_power(rows), []
    for low in narrow_works(work):
        option = _cheapest(family, Problem(low, dev), most)
        part = taken(CudaPlan.of(option.plan), low, dev, rows)
        found.append((part, option.price.at(rows)))
    return found


def taken(plan: CudaPlan, work: NormMatmul, dev: DeviceSpec, rows: int) -> float:
    """Return which part of the multiprocessors a launch of narrow weights takes."""
    tiles = ceil_div(rows, plan.block_m) * sum(
        ceil_div(p.columns, plan.block_n) for p in work.outputs
    )
    return min(1.0, tiles * plan.cluster / plan.blocks / dev.sm_count)


def priced(
    whole: Prediction, first: Sequence[tuple[float, Prediction]], dev: DeviceSpec
) -> Prediction:
    """Return the price of all launches.

    The multiprocessors that a launch in front takes are free for the other when it ends; its sums
    are wanted at the end.  No constant here was fitted.

    `whole`: of the launches of whole weights, all steps included.
    `first`: of those in front, each with the part of the multiprocessors that it takes.
    """
    later = sum(NEXT_LAUNCH_S + part * (low.seconds - dev.launch_s) for part, low in first)
    latest = RATES.start_s + max(low.seconds for _, low in first)
    return replace(whole, seconds=max(whole.seconds + later, latest))
