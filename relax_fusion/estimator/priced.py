"""What plans cost at the sizes of a range, and which of them are best there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from ..hardware import DeviceSpec
from ..workload import Workload
from .arrays import Seconds
from .measured import Times
from .prediction import next_power
from .registry import Family, Option
from .shape import Size, tiled_rows
from .tile_plan import TilePlan

MOST_KERNELS = 3
"""Plans for the cells of one range of rows: each is a kernel to compile."""

WORTH_A_KERNEL = 1.05
"""By what factor the worst cell has to gain by as many plans as may be, for not taking fewer."""

Loss = NDArray[np.float64]
"""For each option, its time over the best time; the mean over the sizes of a cell."""


@dataclass(frozen=True)
class Priced:
    """Options, and what each costs at some sizes.

    Parameters
    ----------
    options : sequence of Option
        In the order in which families give them.
    sizes : sequence of Size
        The sizes.
    seconds : array of float64
        Of shape ``(sizes, options)``.
    """

    options: Sequence[Option]
    sizes: Sequence[Size]
    seconds: Seconds

    def cheapest(self, size: Size) -> Option:
        """Return the option of the least price at a size; of equals, the first."""
        return self.options[int(self._at(size).argmin())]

    def losses(self, cells: Sequence[Sequence[Size]]) -> list[Loss]:
        """Return for each cell the mean loss of every option."""
        each = self._losses
        return [np.divide(sum(each[size] for size in cell), len(cell)) for cell in cells]

    def best(self, cells: Sequence[Sequence[Size]], measured: Sequence[Times] = ()) -> list[Option]:
        """Return an option for each cell, of as few options as do.

        One option is that which loses least over all sizes; of several, the worst cell decides.
        What counts is the mean of a plan's time over the best time at each size of a cell: a plan
        that pads few rows to many is fast at the end of a range only.  Of equals, the first.

        Parameters
        ----------
        cells : sequence of sequence of Size
            Sizes that a plan of their own may serve.
        measured : sequence of Times
            For each cell what was measured in it; nothing by default.
        """
        losses = self.losses(cells)
        plans = [option.plan for option in self.options] if any(measured) else []
        for cell, times in enumerate(measured):
            losses[cell] = _by_measurement(losses[cell], plans, times) if times else losses[cell]
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
        """The time of each option over the best, of shape ``(sizes, options)``."""
        return self.seconds / self.seconds.min(axis=1, keepdims=True, initial=inf)

    @cached_property
    def _losses(self) -> dict[Size, Loss]:
        return dict(zip(self.sizes, self.losses_at, strict=True))

    def _at(self, size: Size) -> NDArray[np.float64]:
        return self.seconds[self.sizes.index(size)]


Asked = tuple[Sequence[Option], Sequence[Size]]
"""Options that are to be priced at sizes."""


def price(work: Workload, dev: DeviceSpec, asked: Sequence[Asked]) -> list[Priced]:
    """Return what options cost at sizes; a family is asked once for all of its plans."""
    sizes = list(dict.fromkeys(size for _, some in asked for size in some))
    row = {size: i for i, size in enumerate(sizes)}
    # By identity: to hash a plan takes longer than to price it
    every = {id(option.plan): option for some, _ in asked for option in some}
    column = {key: i for i, key in enumerate(every)}
    places = [
        np.ix_([row[size] for size in some], [column[id(o.plan)] for o in options])
        for options, some in asked
    ]
    wanted = np.zeros((len(row), len(column)), bool)
    for place in places:
        wanted[place] = True
    by_family: dict[Family, list[int]] = {}
    for i, option in enumerate(every.values()):
        by_family.setdefault(option.family, []).append(i)
    seconds, options = np.full(wanted.shape, inf), list(every.values())
    for family, which in by_family.items():
        plans = [options[i].plan for i in which]
        seconds[:, which] = family.seconds(plans, work, dev, sizes, wanted[:, which])
    return [
        Priced(own, some, seconds[place]) for (own, some), place in zip(asked, places, strict=True)
    ]


def asked_in(
    found: Sequence[Option],
    work: Workload,
    dev: DeviceSpec,
    cells: Sequence[Sequence[Size]],
    told: Size,
    measured: Sequence[Times] = (),
) -> Asked:
    """Return what is to be priced of a range: plans that can be best in it, and what was measured.

    As their families say; where no family offers one, the lowest tiles must do.

    Parameters
    ----------
    cells : sequence of sequence of Size
        The sizes of the range.
    told : Size
        One more, at which the best price is asked for.
    measured : sequence of Times
        For each cell what was measured in it.
    """
    sizes = list(chain.from_iterable(cells))
    tiled = [tiled_rows(work, size) for size in sizes]
    rows = min(tiled), next_power(max(tiled))
    by_family: dict[Family, list[TilePlan]] = {}
    for option in found:
        by_family.setdefault(option.family, []).append(option.plan)
    kept = {id(p) for f, own in by_family.items() for p in f.worth(own, work, dev, rows)}
    worth = [option for option in found if id(option.plan) in kept]
    if not worth:
        lowest = max(rows[1], min((option.plan.block_m for option in found), default=0))
        worth = [option for option in found if option.plan.block_m <= lowest]
    timed = {plan for times in measured for column in times.values() for plan in column}
    if timed:
        timed -= {option.plan for option in worth}
        worth += [option for option in found if option.plan in timed]
    return worth, list(dict.fromkeys([*sizes, told]))


def _by_measurement(loss: Loss, plans: Sequence[TilePlan], times: Times) -> Loss:
    """Return losses by measured times; what was not measured comes behind, by its price."""
    found: dict[int, list[float]] = {}
    for column in times.values():
        known = {i: column[plan] for i, plan in enumerate(plans) if plan in column}
        for i, seconds in known.items():
            found.setdefault(i, []).append(seconds / min(known.values()))
    means = {i: sum(each) / len(each) for i, each in found.items()}
    most = max(means.values(), default=0.0)
    return np.array([means.get(i, most + loss[i]) for i in range(len(plans))])
