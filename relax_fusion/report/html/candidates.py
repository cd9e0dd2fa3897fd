"""What the estimator compared for a kernel, as data of the page."""

from __future__ import annotations

import time
from typing import Any

from ...errors import RelaxFusionError
from ...estimator.family import Backend
from ...estimator.registry import Option
from ...estimator.survey import Refused, Rivals, survey
from ...estimator.tile_plan import TilePlan
from ...workload import Workload
from . import numbers
from .kernels import Kernel, full_text, how_text, plan_text, size_text, span_text

MOST_POINTS = 60
"""Plans of a range that a picture shows, the fastest of them."""

MOST_REJECTED = 5
"""Plans of a range that a table lists beside the chosen one."""

MOST_REFUSED = 40
"""Plans that a rule refused which a picture shows."""


class Clock:
    """A budget of seconds, from now on.

    Parameters
    ----------
    seconds : float
        What may be used.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.end = time.perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        """Whether it is used up."""
        return time.perf_counter() >= self.end


def candidates_of(kernel: Kernel, backend: Backend, clock: Clock) -> dict[str, Any]:
    """Return the plans of a kernel, range by range, or why there are none to show.

    ``missing``
        A sentence; empty where there is data.
    ``ranges``
        For each range of rows the plans that were compared: `chosen`, `rejected`, `points`.
    ``refused``, ``passed_over``
        Rules with the plans that they refused; families that were not looked at.
    """
    nothing: dict[str, Any] = {"ranges": [], "refused": [], "passed_over": []}
    if kernel.work is None:
        return {"missing": "The report holds no workload for this kernel.", **nothing}
    if kernel.spec is None:
        return {"missing": "The report names no device, so no plan can be priced.", **nothing}
    if clock.is_over:
        told = f"The {numbers.seconds(clock.seconds)} for pricing candidates were used up before"
        return {"missing": f"{told} this kernel; to_html(seconds=...) gives more.", **nothing}
    try:
        found = survey(kernel.work, kernel.spec, backend)
    except RelaxFusionError as err:
        return {"missing": f"The estimator could not price this workload: {err}", **nothing}
    ranges = [_range(kernel, kernel.work, rivals) for rivals in found.rivals]
    lower = 1
    for each in ranges:
        each["lower"], each["span"] = lower, span_text(lower, each["upper"])
        lower = (each["upper"] or 0) + 1
    return {
        "missing": "" if ranges else "No plan of the estimator can run this workload.",
        "ranges": ranges,
        "refused": [_refused(rule) for rule in found.refused],
        "passed_over": [{"family": name, "why": why} for name, why in found.passed_over],
    }


def _range(kernel: Kernel, work: Workload, rivals: Rivals) -> dict[str, Any]:
    """Return what was compared in one range."""
    point = next((p for p in kernel.points if p.size == rivals.size), None)
    plan = point.plan if point is not None else None
    best = rivals.ranked[0][1] if rivals.ranked else None
    chosen = point.fused.seconds if point is not None else best
    others = [(o, s) for o, s in rivals.ranked if o.plan != plan]
    shown = others[: MOST_POINTS - 1]
    distinct = {plan_text(o.plan): (o, s) for o, s in reversed(others)}
    rejected = sorted(distinct.values(), key=lambda pair: pair[1])[:MOST_REJECTED]
    return {
        "upper": rivals.upper,
        "size": size_text(rivals.size),
        "compared": len(rivals.ranked),
        "unfit": rivals.unfit,
        "shown": min(len(rivals.ranked), MOST_POINTS),
        "chosen": {
            "plan": plan_text(plan),
            "how": how_text(plan),
            "area": _area(plan),
            "seconds": numbers.number(chosen),
            "bound": point.fused.bound if point is not None else "",
            "unfused_s": numbers.number(point.unfused_s) if point is not None else None,
            "loss": numbers.slower(chosen, best),
            "is_best": best is None or chosen is None or chosen <= best * 1.0005,
        },
        "rejected": [_rejected(kernel, work, rivals, o, s) for o, s in rejected],
        "points": [
            {"plan": plan_text(o.plan), "area": _area(o.plan), "seconds": numbers.number(s)}
            | {"family": _family(o)}
            for o, s in shown
        ],
    }


def _rejected(
    kernel: Kernel, work: Workload, rivals: Rivals, option: Option, seconds: float
) -> dict[str, Any]:
    """Return a plan that lost, and what limits it."""
    bound, waves = "", 0
    if kernel.spec is not None:
        predicted = option.family.predict(option.plan, work, kernel.spec, rivals.size)
        bound, waves = predicted.bound, predicted.waves
    plan = option.plan
    return {
        "plan": plan_text(plan),
        "how": how_text(plan),
        "family": _family(option),
        "seconds": numbers.number(seconds),
        "bound": bound,
        "waves": waves,
    }


def _family(option: Option) -> str:
    return option.plan.family or type(option.family).__name__


def _area(plan: TilePlan | None) -> int | None:
    return plan.block_m * plan.block_n if plan is not None else None


def _refused(rule: Refused) -> dict[str, Any]:
    return {
        "family": rule.family,
        "rule": rule.rule,
        "count": len(rule.plans),
        "plans": [full_text(plan) for plan in rule.plans[:3]],
        "areas": [plan.block_m * plan.block_n for plan in rule.plans[:MOST_REFUSED]],
    }
