"""Which plans are worth measuring, and at which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Decline
from ..estimator.choose import choose
from ..estimator.family import Backend, Option
from ..estimator.ranges import Range, by_box, ranges, together
from ..estimator.registry import options, predict
from ..estimator.search import asked_in, price
from ..estimator.shape import Problem, Size
from ..estimator.tile_plan import Box, PlanTable, TilePlan
from ..hardware import DeviceSpec
from ..workload import Workload

MOST = 8
"""Plans of a range that are measured, unless the caller says otherwise."""


@dataclass(frozen=True)
class Contest:
    """Plans that are measured against each other, for the sizes of one box.

    Parameters
    ----------
    box : Box
        Where the fastest is to serve.
    sizes : tuple of Size
        At which they are measured: those at which they are priced, and the one that reports tell.
    plans : tuple of TilePlan
        The one that is chosen by its price, and others in the order of theirs.
    seconds : float
        What the first is predicted to take at the last size.
    """

    box: Box
    sizes: tuple[Size, ...]
    plans: tuple[TilePlan, ...]
    seconds: float


def shortlist(work: Workload, dev: DeviceSpec, backend: Backend, most: int = MOST) -> list[Contest]:
    """Return contests for all sizes of a workload; none where no plan fits.

    Parameters
    ----------
    backend : {"auto", "tir", "triton"}
        As for `choose`.
    most : int
        Plans for each range of rows, or query positions; boxes within a range share them.
    """
    choice = choose(work, dev, always=True, backend=backend)
    if isinstance(choice, Decline):
        return []
    return contests_of(work, dev, backend, choice.plans, most)


def contests_of(
    work: Workload, dev: DeviceSpec, backend: Backend, table: PlanTable, most: int = MOST
) -> list[Contest]:
    """Return contests between the plans of a table and others, as `shortlist` does."""
    found = list(options(Problem(work, dev), backend))
    contests = []
    for each in ranges(work, together({option.family.breaks for option in found})):
        plans = _nearest(found, each, most)
        (told_in,) = by_box([each], {each.told: None})
        for box, sizes in each.cells:
            first = table.plan_at(sizes[-1])
            others = [plan for plan in plans if plan != first]
            seconds = predict(work, first, dev, sizes[-1]).seconds
            told = [each.told] if box == told_in else []
            measured = tuple(dict.fromkeys([*sizes, *told]))
            contests.append(Contest(box, measured, (first, *others)[:most], seconds))
    return contests


def _nearest(found: Sequence[Option], each: Range, most: int) -> list[TilePlan]:
    """Return plans of which each is among the best in some cell of a range, the best first."""
    (priced,) = price([asked_in(found, each)])
    ranked = [loss.argsort(kind="stable") for loss in priced.losses([s for _, s in each.cells])]
    in_turn = dict.fromkeys(i for places in zip(*ranked, strict=True) for i in places)
    return [priced.options[i].plan for i in in_turn][:most]
