"""What plans cost at the sizes of a range, and which few of them serve it best.

Kernels of matmuls compute whole tiles, and multiprocessors whole waves of them, so the best plan
changes back and forth as rows grow.  A plan is a kernel to compile; to run it for many small ranges
costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..workload import Attention, DynamicDim
from .database import Times
from .family import Option
from .limits import GRID_YZ
from .prediction import Seconds, ceil_div, next_power
from .ranges import Range
from .shape import Problem, Size, most_rows, tiled_rows
from .tile_plan import Box

MOST_KERNELS = 3
"""Plans for the cells of one range of rows: each is a kernel to compile."""

WORTH_A_KERNEL = 1.05
"""By what factor the worst cell has to gain by as many plans as may be, for not taking fewer."""

ALLOWED_LOSS = 0.03
"""Part of the best time that the pool may lose at a size that is looked at, for fewer kernels."""

KEPT_LOSS = 0.01
"""Part of the best time of the pool that a size may lose for the plan of its range, or that of the
sizes in front of it, to serve it."""

FEW, PARTS = 8, 256
"""Up to so many rows each number has its own small range; above, a part of the power of two."""

MOST_COUNTED = 2.0
"""Times the best time, beyond which it does not matter by how much a plan is slower."""

Loss = NDArray[np.float64]
"""For each plan, its time over the best time; the mean over the sizes of a cell."""


@dataclass(frozen=True)
class Priced:
    """Options, and what each costs at some sizes: an array ``(sizes, options)``."""

    options: Sequence[Option]
    sizes: Sequence[Size]
    seconds: Seconds

    def cheapest(self, size: Size) -> Option:
        """Return the option of the least price at a size; of equals, the first."""
        return self.options[int(self.seconds[self.sizes.index(size)].argmin())]

    def losses(self, cells: Sequence[Sequence[Size]]) -> list[Loss]:
        """Return for each cell the mean loss of every plan."""
        each = self._losses
        return [np.divide(sum(each[size] for size in cell), len(cell)) for cell in cells]

    def best(self, cells: Sequence[Sequence[Size]], measured: Sequence[Times] = ()) -> list[Option]:
        """Return a plan for each cell, of as few plans as do.

        One plan is that which loses least over all sizes; of several, the worst cell decides.
        What counts is the mean of a plan's time over the best time at each size of a cell: a plan
        that pads few rows to many is fast at the end of a range only.  Of equals, the first.

        `cells`: sizes that a plan of their own may serve.
        `measured`: for each cell what was measured in it; nothing by default.
        """
        losses = self.losses(cells)
        for cell, times in enumerate(measured):
            if times:
                losses[cell] = _by_measurement(losses[cell], self.options, times)
        weighed = sum(len(cell) * loss for cell, loss in zip(cells, losses, strict=True))
        single = int(np.argmin(weighed))
        bests = dict.fromkeys([single, *(int(loss.argmin()) for loss in losses)])

        def worst(plans: Sequence[int]) -> float:
            return max(min(loss[i] for i in plans) for loss in losses)

        few: list[tuple[int, ...]] = [(single,)]
        for count in range(2, min(MOST_KERNELS, len(bests)) + 1):
            few.append(min(combinations(bests, count), key=worst))
        enough = WORTH_A_KERNEL * worst(few[-1])
        chosen = next(plans for plans in few if worst(plans) <= enough)
        return [self.options[min(chosen, key=loss.__getitem__)] for loss in losses]

    @cached_property
    def losses_at(self) -> Seconds:
        """The time of each plan over the best, of shape ``(sizes, plans)``."""
        return self.seconds / self.seconds.min(axis=1, keepdims=True, initial=inf)

    @cached_property
    def _losses(self) -> dict[Size, Loss]:
        return dict(zip(self.sizes, self.losses_at, strict=True))


Asked = tuple[Sequence[Option], Sequence[Size]]
"""Options that are to be priced at sizes."""


def price(asked: Sequence[Asked]) -> list[Priced]:
    """Return what plans of one problem cost at sizes; a family is asked once for all of them."""
    sizes = list(dict.fromkeys(size for _, some in asked for size in some))
    row = {size: i for i, size in enumerate(sizes)}
    every = list(dict.fromkeys(option for some, _ in asked for option in some))
    column = {option: i for i, option in enumerate(every)}
    places = [
        np.ix_([row[size] for size in some], [column[option] for option in options])
        for options, some in asked
    ]
    wanted = np.zeros((len(row), len(column)), bool)
    for place in places:
        wanted[place] = True
    by_family: dict[object, list[int]] = {}
    for i, option in enumerate(every):
        by_family.setdefault(option.family, []).append(i)
    seconds = np.full(wanted.shape, inf)
    for which in by_family.values():
        prices = [every[i].price for i in which]
        seconds[:, which] = prices[0].seconds(prices, sizes, wanted[:, which])
    return [
        Priced(few, some, seconds[place]) for (few, some), place in zip(asked, places, strict=True)
    ]


def asked_in(found: Sequence[Option], each: Range, measured: Sequence[Times] = ()) -> Asked:
    """Return what is to be priced of a range: plans that can be best in it, and what was measured.

    Where no family offers one, the lowest tiles must do, and where none can be launched at all of
    its sizes, any.  Rows that nothing bounds are taken to be too many for a block for each.
    """
    sizes = [size for _, some in each.cells for size in some]
    work = found[0].problem.work
    most = most_rows(work, each.upper)
    if most is None and not isinstance(work, Attention):
        most = GRID_YZ + 1
    usable = [o for o in found if not (most and o.offer.most) or most <= o.offer.most] or found
    tiled = [tiled_rows(work, size) for size in sizes]
    rows = min(tiled), next_power(max(tiled))
    worth = [option for option in usable if option.is_worth(*rows)]
    if not worth:
        lowest = max(rows[1], min(option.plan.block_m for option in usable))
        worth = [option for option in usable if option.plan.block_m <= lowest]
    timed = {plan for times in measured for column in times.values() for plan in column}
    if timed:
        kept = set(worth)
        worth += [o for o in usable if o not in kept and o.plan in timed]
    return worth, list(dict.fromkeys([*sizes, each.told]))


def _by_measurement(loss: Loss, options: Sequence[Option], times: Times) -> Loss:
    """Return losses by measured times; what was not measured comes behind, by its price."""
    found: dict[int, list[float]] = {}
    for column in times.values():
        known = {i: column[o.plan] for i, o in enumerate(options) if o.plan in column}
        for i, seconds in known.items():
            found.setdefault(i, []).append(seconds / min(known.values()))
    means = {i: sum(each) / len(each) for i, each in found.items()}
    most = max(means.values(), default=0.0)
    return np.array([means.get(i, most + loss[i]) for i in range(len(options))])


def finer(
    problem: Problem[Any],
    every: Sequence[Range],
    asked: Sequence[Asked],
    chosen: Sequence[Option],
    steps: Sequence[int],
) -> list[list[tuple[Box, Option]]]:
    """Return plans of a pool for the small ranges inside of each range; nothing for other ranges.

    `every`: all ranges.
    `asked`: of each range the plans that may serve it; none where it is to stay as it is.
    `chosen`: of each range the plan that is best for all of it.  It serves where it loses little.
    `steps`: sizes at which the plans of the pool are chosen (`Breaks.finer`), each with the next
    one.
    """
    work = problem.work
    if isinstance(work, Attention) or not isinstance(work.rows, DynamicDim) or not steps:
        return [[] for _ in every]
    offered = [[option for option in some if option.family.breaks.finer] for some, _ in asked]
    spans = _spans(every, work.rows.upper or steps[-1])
    points = [_both_ends(*span, steps) for span in spans]
    own = {option for option, some in zip(chosen, offered, strict=True) if some}
    pool = _cover(price(list(_where(offered, points))), own)
    offered = [[option for option in some if option in pool] for some in offered]
    cuts = [_cuts(*span) for span in spans]
    priced = price(list(_where(offered, [[*chain(*some)] for some in cuts])))
    each = zip(priced, cuts, chosen, strict=True)
    found = [_served(*one) if one[0].options else [] for one in each]
    if found[-1]:
        found[-1][-1] = (Box(), found[-1][-1][1])
    return found


def _spans(every: Sequence[Range], last: int) -> list[tuple[int, int]]:
    """Return the first size of each range, and the last that is looked at."""
    firsts = [1, *(each.upper + 1 for each in every if each.upper)]
    return [(n, each.upper or max(last, n)) for n, each in zip(firsts, every, strict=True)]


def _where(offered: Sequence[list[Option]], sizes: Sequence[list[int]]) -> Iterator[Asked]:
    """Yield options with the sizes at which to price them: none where there are no options."""
    for options, some in zip(offered, sizes, strict=True):
        yield options, some if options else []


def _both_ends(first: int, last: int, steps: Sequence[int]) -> list[int]:
    """Return the ends of a range, and each step within it with the size behind it."""
    inside = [size for step in steps for size in (step, step + 1) if first <= size <= last]
    return sorted({first, *inside, last})


def _cuts(first: int, last: int) -> list[tuple[int, int]]:
    """Return the first and last sizes of small ranges: multiples of 8, of more for large sizes.

    All kernels have tiles of a multiple of 8 rows.
    """
    found = []
    while first <= last:
        step = 1 if first <= FEW else max(8, (1 << first.bit_length()) // PARTS)
        end = min(last, ceil_div(first, step) * step)
        found.append((first, end))
        first = end + 1
    return found


def _served(
    priced: Priced, cuts: Sequence[tuple[int, int]], chosen: Option
) -> list[tuple[Box, Option]]:
    """Return a plan for each small range, neighbours with the same one merged."""
    found: list[tuple[Box, Option]] = []
    worst = np.maximum(priced.losses_at[::2], priced.losses_at[1::2])  # of both ends
    serves = worst <= worst.min(axis=1, keepdims=True) + KEPT_LOSS
    own = last = priced.options.index(chosen)
    for (_, upper), enough, best in zip(cuts, serves, worst.argmin(axis=1), strict=True):
        if not enough[last]:
            last = own if enough[own] else best
        option = priced.options[last]
        if found and found[-1][1] is option:
            found.pop()
        found.append((Box(upper), option))
    return found


def _cover(priced: Sequence[Priced], pool: set[Option]) -> set[Option]:
    """Return options, as few as are found, of which each size has one that is near best.

    One after the other, that which is near enough at the most sizes; of equals, the nearest.
    """
    every = list(dict.fromkeys(option for own in priced for option in own.options))
    column = {option: i for i, option in enumerate(every)}
    parts = []
    for own in priced:
        parts.append(np.full((len(own.sizes), len(every)), inf))
        parts[-1][:, [column[option] for option in own.options]] = own.losses_at
    loss = np.concatenate(parts)
    fits = loss <= 1 + ALLOWED_LOSS
    left = ~fits[:, [column[option] for option in pool if option in column]].any(axis=1)
    while left.any():
        serves = fits[left].sum(axis=0)
        total = np.minimum(loss[left], MOST_COUNTED).sum(axis=0)
        taken = int(np.lexsort((total, -serves))[0])
        pool = {*pool, every[taken]}
        left &= ~fits[:, taken]
    return pool
