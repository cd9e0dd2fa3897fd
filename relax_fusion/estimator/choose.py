"""From a workload to the plans it runs with, or to the reason why it should not be fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from ..errors import Decline, Reason, TilePlanError
from ..hardware import DeviceSpec
from ..workload import Workload
from ..workload.checks import check_workload, too_large, without_zeros
from .baseline import predict_unfused, unfused_at
from .database import Measured, Times
from .family import Backend, Option
from .prediction import Prediction, format_seconds
from .ranges import by_box, check_boxes, ranges, together
from .registry import ON_CHANGE, option_of, options, refusals, violations
from .search import Asked, asked_in, finer, price
from .shape import Problem, Size, box_sizes, most_rows
from .tile_plan import Box, PlanTable, TilePlan

CLOSED_RANGE_LOSS = 0.25
"""Part of its time that a closed range may lose for the others' sake.  The kernels of a chain are
replaced for all sizes or for none, and predictions of close alternatives err by as much: the worst
choice among the plans that `2026-11-24-cuda_matmul.md` has was 24 % slower than the best."""


@dataclass(frozen=True)
class RangePrediction:
    """What one range of the dynamic dimension should cost, with and without fusing."""

    upper: int | None
    """Last size of the range, None for the open one."""
    size: Size
    """The size that was priced."""
    fused: Prediction
    unfused: Prediction
    """At that size."""
    least: Prediction
    """By the best plan for that size alone, which is what is compared: plans of what is left apart
    serve ranges too, and `unfused` is by the best for the size."""
    error: float = 1.0
    """Factor by which the two must differ to count (`KernelFamily.error`)."""
    measured_s: float | None = None
    """Seconds of the plan at that size, where it was measured.  Whether fusing pays is still told
    by the two predictions."""

    @property
    def loses(self) -> bool:
        """Whether this range speaks against fusing.

        The open range, and a static size, must win by more than the model's error; a closed range
        may lose a little for the sake of the open one.
        """
        allowed = 1 / self.error if self.upper is None else 1 + CLOSED_RANGE_LOSS
        return self.least.seconds > self.unfused.seconds * allowed

    @property
    def fused_text(self) -> str:
        """The seconds that are predicted of the plan, and those that were measured, for people."""
        measured = self.measured_s
        told = "" if measured is None else f" (measured {format_seconds(measured)})"
        return format_seconds(self.fused.seconds) + told


@dataclass(frozen=True)
class Choice:
    """The plans of a workload and why they were chosen."""

    plans: PlanTable
    """By rows of a matmul workload, by query positions of an attention."""
    predictions: tuple[RangePrediction, ...]
    """One per range that was looked at, also where neighbours came out with the same plan."""


@lru_cache(maxsize=1024)  # a model asks for the same few workloads once per layer
def choose(
    work: Workload,
    dev: DeviceSpec,
    *,
    plans: PlanTable | TilePlan | None = None,
    always: bool = False,
    backend: Backend = "auto",
    measured: Measured | None = None,
) -> Choice | Decline:
    """Choose tile plans for `work` on `dev`.

    Returns a `Decline` with `Reason.NO_PLAN` if no tile fits the device, and with
    `Reason.NOT_PROFITABLE` if separate kernels are predicted to be faster in the open range (or for
    a static size), or by more than `CLOSED_RANGE_LOSS` in a closed one; the open range must win by
    what predictions of its family may err.

    `plans`: a user's own.  It is checked, priced and taken, even if fusing is predicted not to pay.
    `always`: choose plans even if fusing is predicted not to pay.
    `backend`: which families are looked at, as for `candidates`.
    `measured`: times on this device.  In a range in which plans were measured, the fastest of them
    is taken; whether fusing pays is told by predictions alone.
    Raises `GraphError` if `work` has a size or a name that no kernel can have.  Raises
    `TilePlanError` if a plan of `plans` does not fit; the message has every violation.
    """
    check_workload(work)
    work = without_zeros(work)
    if plans is not None:
        table = PlanTable.single(plans) if isinstance(plans, TilePlan) else plans
        return _checked(work, dev, table, backend)
    beyond = too_large(work)
    if beyond is not None:
        return Decline(Reason.NO_PLAN, beyond)
    problem = Problem(work, dev)
    found = list(options(problem, backend))
    if not found:
        why = refusals(problem, "tir") or refusals(problem, backend)
        what = "adds what adapters make" if work.is_adapted else f"takes a {type(work).__name__}"
        of = "" if backend == "auto" else f" of backend {backend!r}"
        nobody = f"no kernel{of} for the {dev.label} {what}"
        return Decline(Reason.NO_PLAN, "; ".join(why) or nobody)
    times = measured.of(work) if measured is not None else {}
    chosen = list(_chosen(found, problem, backend, times))
    predictions = tuple(prediction for prediction, _ in chosen)
    losing = [p for p in predictions if p.loses]
    if losing and not always:
        return _unprofitable(losing, is_static=len(chosen) == 1)
    return Choice(
        PlanTable.of(_merged([cell for _, cells in chosen for cell in cells])), predictions
    )


def saved_s(choice: Choice | Decline) -> float:
    """Return the seconds that a kernel is predicted to save; none, or less, where it is declined.

    In the open range, or at the static size.
    """
    if isinstance(choice, Choice):
        last = choice.predictions[-1]
        return last.unfused.seconds - last.least.seconds
    if choice.fused_s is None or choice.unfused_s is None:
        return -inf
    return min(0.0, choice.unfused_s - choice.fused_s)


def _chosen(
    found: Sequence[Option], problem: Problem[Any], backend: Backend, times: Times
) -> Iterator[tuple[RangePrediction, list[tuple[Box, TilePlan]]]]:
    """Yield what each range costs by its plans, and the boxes within it with their plans."""
    breaks = together({option.family.breaks for option in found})
    every = ranges(problem.work, breaks)
    known = by_box(every, times)
    measured = [[known.get(box, {}) for box, _ in each.cells] for each in every]
    asked = [asked_in(found, *of) for of in zip(every, measured, strict=True)]
    least: dict[Size, Prediction] = {}
    served: list[list[tuple[Box, Option]]] = []
    for each, some, column in zip(every, measured, price(asked), strict=True):
        least[each.told] = column.cheapest(each.told).price.at(each.told)
        by_cell = column.best([sizes for _, sizes in each.cells], some)
        served.append([(box, best) for (box, _), best in zip(each.cells, by_cell, strict=True)])
    by_price = _without_times(asked, served, known)
    first = [boxes[0][1] for boxes in served]
    small = finer(problem, every, by_price, first, breaks.finer)
    apart = unfused_at(problem.work, problem.dev, least, backend)
    for (upper, _, told), cells, few, alone in zip(every, served, small, apart, strict=True):
        boxes, sizes = few or cells, box_sizes(told)
        option = next(option for box, option in boxes if box.holds(**sizes))
        costs, seconds = option.price.at(told), times.get(told, {}).get(option.plan)
        own = option.family.error, seconds
        yield (
            RangePrediction(upper, told, costs, alone, least[told], *own),
            [(box, option.plan) for box, option in boxes],
        )


def _without_times(
    asked: Sequence[Asked],
    served: Sequence[Sequence[tuple[Box, Option]]],
    known: Mapping[Box, Times],
) -> list[Asked]:
    """Leave nothing to price of ranges with times, or whose families have no finer ones."""
    return [
        some
        if all(option.family.breaks.finer and box not in known for box, option in boxes)
        else ([], [])
        for some, boxes in zip(asked, served, strict=True)
    ]


def _checked(work: Workload, dev: DeviceSpec, table: PlanTable, backend: Backend) -> Choice:
    """Price a user's table, or raise what is wrong with it."""
    check_boxes(work, table)
    wrong = [
        f"plan {plan.key}: {sentence}"
        for box, plan in table.boxes
        for sentence in violations(plan, work, dev, most_rows(work, box.rows))
    ]
    if wrong:
        raise TilePlanError("; ".join(wrong))
    found = {plan: option_of(plan, Problem(work, dev)) for _, plan in table.boxes}
    own = PlanTable(tuple((upper, found[plan].plan) for upper, plan in table.entries))
    predictions = []
    breaks = {option.family.breaks for option in found.values()}
    for upper, _, size in ranges(work, together(breaks)):
        fused = found[table.plan_at(size)].price.at(size)
        alone = predict_unfused(work, dev, size, backend=backend, alone=fused)
        predictions.append(RangePrediction(upper, size, fused, alone, fused))
    return Choice(table if own == table else own, tuple(predictions))


def _unprofitable(losing: list[RangePrediction], is_static: bool) -> Decline:
    """Return a decline with the times of the range in which fusing loses most."""
    worst = max(losing, key=lambda p: p.least.seconds / p.unfused.seconds)
    fused, unfused = worst.least.seconds, worst.unfused.seconds
    times = f"fused {format_seconds(fused)}, unfused {format_seconds(unfused)}"
    where = "in the open range" if worst.upper is None else f"in the range up to {worst.upper}"
    detail = f"{times} at {size_text(worst.size)}" + ("" if is_static else f", {where}")
    if fused < unfused:
        detail += f"; a gain of {worst.error} times is asked for, as predictions err by that"
    return Decline(Reason.NOT_PROFITABLE, detail, fused_s=fused, unfused_s=unfused)


def size_text(size: Size) -> str:
    """Return a size for people."""
    if isinstance(size, int):
        return "1 row" if size == 1 else f"{size} rows"
    return f"batch {size.batch}, {size.q_len} queries, {size.kv_len} keys"


def _merged(cells: list[tuple[Box, TilePlan]]) -> list[tuple[Box, TilePlan]]:
    """Leave out boxes of which all sizes have the same plan without them.

    Their bounds lie on one grid: the first box behind that holds the whole of one serves it.
    """
    kept: list[tuple[Box, TilePlan]] = []
    for box, plan in reversed(cells):
        if next((p for other, p in kept if box.within(other)), None) != plan:
            kept.insert(0, (box, plan))
    return kept


ON_CHANGE.append(choose.cache_clear)
