"""Which plans a library has of a range of sizes, to measure them where it runs (`autotune`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..hardware import DeviceSpec
from ..workload import Workload
from ..workload.checks import without_zeros
from .family import Backend
from .measured import Measured
from .registry import ON_CHANGE
from .shape import box_sizes
from .shortlist import Contest, contests_of
from .tile_plan import Box, PlanTable, TilePlan

MOST_EMBEDDED = 4
"""Plans of a range."""

EMBEDDED_ATTR = "relax_fusion.embedded_plans"
"""The PrimFunc attribute that says which plans the library is to measure."""


@dataclass(frozen=True)
class Embedded:
    """The plans that a library has for the sizes of one box.

    Parameters
    ----------
    box : Box
        The first that holds a size serves it.
    plans : tuple of TilePlan
        The first is run where nothing can be measured.
    why : str
        Where there is one plan: why there are no others.
    """

    box: Box
    plans: tuple[TilePlan, ...]
    why: str = ""

    def to_attr(self) -> dict[str, Any]:
        """Return the box and the plans as a PrimFunc attribute, and as reports have them."""
        plans = [plan.to_attr() for plan in self.plans]
        return {**self.box.bounds, "plans": plans, **({"why": self.why} if self.why else {})}


def plans_of_attr(attr: Iterable[Mapping[str, Any]]) -> list[tuple[Box, tuple[TilePlan, ...]]]:
    """Return the boxes and plans of what `Embedded.to_attr` wrote."""
    return [
        (
            Box(**{name: int(row[name]) for name in vars(Box()) if name in row}),
            tuple(TilePlan.from_attr(plan) for plan in row["plans"]),
        )
        for row in attr
    ]


def as_given(table: PlanTable) -> tuple[Embedded, ...]:
    """Return what is embedded of plans that the user gave: these."""
    return tuple(Embedded(box, (plan,), "given by the user") for box, plan in table.boxes)


@lru_cache(maxsize=1024)  # a model asks for the same few workloads once per layer
def embedded(
    work: Workload,
    dev: DeviceSpec,
    backend: Backend,
    table: PlanTable,
    measured: Measured | None = None,
) -> tuple[Embedded, ...]:
    """Return the plans that a library is to measure, for each box of sizes.

    Parameters
    ----------
    work : Workload
        What is computed.
    backend : {"auto", "triton"}
        As for `choose`.
    table : PlanTable
        What `choose` took; its plans come first.
    measured : Measured, optional
        Where there are times, the plan of the table is the measured best, and no other is embedded.
    """
    work = without_zeros(work)
    contests = contests_of(work, dev, backend, table)
    times = measured.of(work) if measured is not None else {}
    timed = {next(c.box for c in contests if c.box.holds(**box_sizes(work, s))) for s in times}
    return tuple(_embedded(contest, contest.box in timed) for contest in contests)


def _embedded(contest: Contest, is_measured: bool) -> Embedded:
    """Return the plans of a box, Triton's alone: other kernels have no place beside those."""
    first = contest.plans[0]
    if is_measured:
        return Embedded(contest.box, (first,), "measured in the database")
    if first.backend != "triton":
        return Embedded(contest.box, (first,), "a kernel of TIR")
    plans = tuple(plan for plan in contest.plans if plan.backend == "triton")[:MOST_EMBEDDED]
    return Embedded(contest.box, plans, "no other plan fits" if len(plans) == 1 else "")


ON_CHANGE.append(embedded.cache_clear)
