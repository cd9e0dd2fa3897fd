"""Measuring the plans of one workload against each other."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm.target import Target

from ..estimator import Size
from ..estimator.choose import size_text
from ..estimator.database import (
    Database,
    Measurement,
    Times,
    package_version,
    size_to_json,
    target_fields,
    versions_of,
)
from ..estimator.tile_plan import PlanTable, TilePlan
from ..hardware.target import device_of
from ..validation import reason
from ..workload import Workload
from ..workload.json import to_json
from .contests import Contest, Outcome, Tuning
from .device import FOREIGN_ERRORS, Function, MeasuringDevice, compiled, tables_of
from .inputs import allowed_error, dims_at, draw

FIRST_SAMPLES, MOST_SAMPLES, ENOUGH_S = 2, 20, 0.1
"""Samples of a plan in the first round, the most in the second one, and how long that may take."""

TOGETHER = 4
"""Plans that are compiled together, and timed before others are compiled."""

NEAR = 1.5
"""How many times the best time a plan may take for a second round."""


@dataclass(frozen=True)
class Subject:
    """A workload of a module."""

    work: Workload
    chain: str
    calls: int
    contests: tuple[Contest, ...]

    @property
    def expense(self) -> float:
        """Predicted seconds of all calls, at all sizes together."""
        return self.calls * sum(contest.seconds for contest in self.contests)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.chain} ({self.work.key})"

    def outcomes(self, times: Times) -> Iterator[Outcome]:
        """Yield what is known of each range, at the size at which the first plan takes longest."""
        for contest in self.contests:
            first = contest.plans[0]
            sizes = [size for size in contest.sizes if first in times.get(size, {})]
            if not sizes:
                continue
            size = max(sizes, key=lambda size: times[size][first])
            known = times[size]
            fastest = min(known, key=known.__getitem__)
            what = (self.chain, self.work.key, self.calls, size, first, fastest)
            yield Outcome(*what, known[first], known[fastest])


@dataclass
class Trial:
    """Measures the plans of one subject that have no times yet.

    `deadline` is by the clock of `time.monotonic`; the database gets every time at once.
    """

    target: Target
    device: MeasuringDevice
    database: Database
    deadline: float
    tuning: Tuning
    progress: Callable[[str], None] = lambda _: None
    functions: dict[TilePlan, Function] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)

    def run(self, subject: Subject, known: Times) -> dict[Size, dict[TilePlan, float]]:
        """Measure, and return all times of the workload, those that are known among them.

        Some plans are compiled and timed, then some more, until the deadline: what was compiled
        has its times, however little time there is.
        """
        times = {size: dict(column) for size, column in known.items()}
        missing = [c for c in subject.contests if any(_missing(c, s, times) for s in c.sizes)]
        tables = tables_of(missing)
        for contest in missing:
            plans = contest.plans
            for some in (plans[i : i + TOGETHER] for i in range(0, len(plans), TOGETHER)):
                if time.monotonic() < self.deadline:
                    self._compile(subject, {p: tables.pop(p) for p in some if p in tables})
                    self._contest(subject, contest, times)
        left = [p for c in missing for s in c.sizes for p in _missing(c, s, times)]
        if any(plan in self.functions or plan in tables for plan in left):
            self.tuning.left.append(f"some plans of {subject.name}")
        return times

    def _compile(self, subject: Subject, tables: Mapping[TilePlan, PlanTable]) -> None:
        """Compile plans, and load them."""
        if not tables:
            return
        self.progress(f"compiling {len(tables)} plans of {subject.name}")
        executables, failed = compiled(subject.work, tables, self.target)
        for plan, why in failed.items():
            self._exclude(subject, plan, f"does not compile: {why}")
        for executable, names in executables:
            machine = self.device.load(executable)
            self.functions |= {plan: (machine, name) for plan, name in names.items()}

    def _exclude(self, subject: Subject, plan: TilePlan, why: str) -> None:
        self.functions.pop(plan, None)
        self.tuning.wrong.append(f"{subject.name}, {plan.text} ({plan.key}): {why}")

    def _contest(
        self, subject: Subject, contest: Contest, times: dict[Size, dict[TilePlan, float]]
    ) -> None:
        """Check the plans of a contest at all of its sizes, then time those that are right.

        They are timed at one size at least.
        """
        is_timed = False
        self.progress(f"measuring {subject.name}, {contest.box}")
        for size in contest.sizes:
            self._check(subject, contest, size)
        for size in contest.sizes:
            wanted = [p for p in _missing(contest, size, times) if p in self.functions]
            if not wanted or (is_timed and time.monotonic() >= self.deadline):
                continue
            is_timed = True
            for plan, samples in self._sampled(subject, wanted, size).items():
                times.setdefault(size, {})[plan] = statistics.median(samples)
                self._record(subject.work, size, plan, samples)

    def _check(self, subject: Subject, contest: Contest, size: Size) -> None:
        """Leave out plans whose results are not those of the first; all, if most differ."""
        results: list[np.ndarray] | None = None
        wrong: dict[TilePlan, str] = {}
        plans = [plan for plan in contest.plans if plan in self.functions]
        arguments = self._arguments(subject.work, size)
        for plan in plans:
            try:
                made = self.device.results(self.functions[plan], arguments)
            except FOREIGN_ERRORS as err:
                self._exclude(subject, plan, f"fails at {size_text(size)}: {reason(err)}")
                continue
            if results is None:
                results = made
            elif (error := _error(made, results)) > allowed_error(subject.work):
                allowed = f"{allowed_error(subject.work):.1e}"
                wrong[plan] = f"error {error:.1e} at {size_text(size)}, allowed {allowed}"
        if len(plans) > 2 and 2 * len(wrong) >= len(plans):
            left = [plan for plan in plans if plan in self.functions]
            wrong = dict.fromkeys(left, f"the plans differ at {size_text(size)}, none is trusted")
        for plan, why in wrong.items():
            self._exclude(subject, plan, why)

    def _arguments(self, work: Workload, size: Size) -> list[Any]:
        """Return the inputs at a size; weights are made once."""
        sizes, found = dims_at(work, size), []
        for operand in work.graph.inputs:
            fixed = operand.shape is not None and all(isinstance(d, int) for d in operand.shape)
            value = self.weights.get(operand.name)
            if value is None or not fixed:
                value = self.device.tensor(draw(work, operand, sizes))
            if fixed:
                self.weights[operand.name] = value
            found.append(value)
        return found

    def _sampled(
        self, subject: Subject, plans: Sequence[TilePlan], size: Size
    ) -> dict[TilePlan, list[float]]:
        """Return the times of plans, of which each has its turn twice if it is near the best."""
        arguments, samples = self._arguments(subject.work, size), dict[TilePlan, list[float]]()

        def sample(plan: TilePlan, count: int) -> None:
            try:
                if not samples:
                    self.device.warm_up(self.functions[plan], arguments)
                own = self.device.sample(self.functions[plan], arguments, count)
                samples.setdefault(plan, []).extend(own)
            except FOREIGN_ERRORS as err:
                self._exclude(subject, plan, f"fails at {size_text(size)}: {reason(err)}")

        for plan in plans:
            sample(plan, FIRST_SAMPLES)
        least = {plan: min(own) for plan, own in samples.items()}
        for plan, seconds in least.items():
            count = min(MOST_SAMPLES, int(ENOUGH_S / seconds))
            if count and seconds <= NEAR * min(least.values()):
                sample(plan, count)
        return {plan: own for plan, own in samples.items() if plan in self.functions}

    def _record(self, work: Workload, size: Size, plan: TilePlan, samples: Sequence[float]) -> None:
        low, median, high = statistics.quantiles(samples, n=4)
        measurement = Measurement(
            device=device_of(self.target).label,
            target=target_fields(str(self.target)),
            workload=json.loads(to_json(work)),
            size=size_to_json(size),
            plan=dict(plan.to_attr()),
            seconds=median,
            spread=round((high - low) / 2 / median, 4),
            versions=dict(versions_of(plan)),
            machine=self.device.machine,
            library=package_version("relax-fusion"),
        )
        self.database.add(measurement)
        self.tuning.measurements += 1


def _missing(contest: Contest, size: Size, times: Times) -> list[TilePlan]:
    return [plan for plan in contest.plans if plan not in times.get(size, {})]


def _error(made: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Return the largest difference of results, as a part of the largest value of each."""
    worst = 0.0
    for a, b in zip(made, right, strict=True):
        wide = "float32" if a.dtype.itemsize < 4 else "float64"
        one, two = a.astype(wide), b.astype(wide)
        strange = ~np.isfinite(two)
        if strange.any():
            same = strange & ((one == two) | (np.isnan(one) & np.isnan(two)))
            one[same] = two[same] = 0.0
        with np.errstate(invalid="ignore"):
            most = np.abs(two).max(initial=0.0) or 1.0
            apart = np.abs(np.subtract(one, two, out=one), out=one).max(initial=0.0) / most
        worst = max(worst, float(apart) if np.isfinite(apart) else np.inf)
    return worst
