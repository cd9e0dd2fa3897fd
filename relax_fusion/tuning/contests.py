"""Which plans are worth measuring, at which sizes, and what measuring them found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import Decline
from ..estimator import Size, format_seconds
from ..estimator.choose import choose, size_text
from ..estimator.family import Backend, Option
from ..estimator.ranges import Range, by_box, ranges, together
from ..estimator.registry import options, predict
from ..estimator.search import asked_in, price
from ..estimator.shape import Problem
from ..estimator.tile_plan import Box, TilePlan
from ..hardware import DeviceSpec
from ..report.tables import table
from ..workload import Workload

MOST = 8
"""Plans of a range that are measured, unless the caller says otherwise."""


MOST_TOLD = 5
"""The text tells of 5 plans that went wrong at most."""


@dataclass(frozen=True)
class Contest:
    """Plans that are measured against each other, for the sizes of one box."""

    box: Box
    """Where the fastest is to serve."""
    sizes: tuple[Size, ...]
    """At which they are measured: those at which they are priced, and the one that reports tell."""
    plans: tuple[TilePlan, ...]
    """The one that is chosen by its price, and others in the order of theirs."""
    seconds: float
    """What the first is predicted to take at the last size."""


def shortlist(work: Workload, dev: DeviceSpec, backend: Backend, most: int = MOST) -> list[Contest]:
    """Return contests for all sizes of a workload; none where no plan fits.

    `backend`: as for `choose`.
    `most`: plans for each range of rows, or query positions; boxes within a range share them.
    """
    choice = choose(work, dev, always=True, backend=backend)
    if isinstance(choice, Decline):
        return []
    found = list(options(Problem(work, dev), backend))
    contests = []
    for each in ranges(work, together({option.family.breaks for option in found})):
        plans = _nearest(found, each, most)
        (told_in,) = by_box([each], {each.told: None})
        for box, sizes in each.cells:
            first = choice.plans.plan_at(sizes[-1])
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


@dataclass(frozen=True)
class Outcome:
    """The plans of a workload at one size."""

    chain: str
    """The pass that found it, and how it is written."""
    key: str
    """Of the workload."""
    calls: int
    """How often the module calls it."""
    size: Size
    """Where the times are from."""
    priced: TilePlan
    fastest: TilePlan
    """The plan of the best price, and the one of the least time."""
    priced_s: float
    fastest_s: float
    """Their measured seconds."""

    @property
    def gain(self) -> float:
        """How many times as fast the fastest plan is."""
        return self.priced_s / self.fastest_s


@dataclass
class Tuning:
    """What `tune` did.

    Parameters
    ----------
    outcomes : list of Outcome
        One for each range of sizes of each workload that has times, those of earlier runs included.
    measurements : int
        How many were added to the database.
    wrong : list of str
        Plans that computed something else, or could not be run, and why.  They have no times.
    left : list of str
        Workloads for which the time did not suffice.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    measurements: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def nothing(self) -> str:
        """Why no plan has a time; empty if one has."""
        if self.outcomes:
            return ""
        if self.wrong:
            return f"no plan has a time: {self.wrong[0]}"
        return "no time was left to measure a plan" if self.left else "no chain is fused"

    def text(self) -> str:
        """Return the gains as a table, and what went wrong."""
        rows: list[tuple[str, ...]] = [
            ("chain", "workload", "calls", "size", "by price", "time", "fastest", "time", "gain")
        ]
        for o in self.outcomes:
            times = format_seconds(o.priced_s), format_seconds(o.fastest_s)
            same = o.priced == o.fastest
            found = ("the same", "", "") if same else (o.fastest.text, times[1], f"{o.gain:.2f}x")
            size = size_text(o.size)
            rows.append((o.chain, o.key, str(o.calls), size, o.priced.text, times[0], *found))
        parts = [table(rows) if self.outcomes else "nothing was measured"]
        parts += [f"not recorded: {sentence}" for sentence in self.wrong[:MOST_TOLD]]
        if len(self.wrong) > MOST_TOLD:
            parts.append(f"not recorded: {len(self.wrong) - MOST_TOLD} more (--json lists them)")
        parts += [f"no time was left for {name}" for name in self.left]
        return "\n".join(parts)
