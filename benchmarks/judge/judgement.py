"""Predictions of the estimator against timings: regret and rank correlation.  No GPU."""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.report import plan_words
from benchmarks.runner import read
from relax_fusion.estimator import Choice, Problem, candidates, choose, predict, registry
from relax_fusion.estimator.families.triton_matmul.tiles import triton_plan
from relax_fusion.estimator.registry import FAMILIES, option_of
from relax_fusion.estimator.shape import Size
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.workload import Workload

TOP = 10
"""Plans that are timed in any case: those predicted to be fastest."""

BACKEND = "triton"

WORDS = re.compile(r"(\w+) (\d+)x(\d+)x(\d+) w(\d+) s(\d+)(?: k/(\d+))?((?: \w+=\d+)*)")


class Subject(Protocol):
    """What plans are chosen for: a workload at a size."""

    @property
    def name(self) -> str:
        """For people, and what tells it from others."""

    @property
    def dtype(self) -> str:
        """Of its tensors."""

    @property
    def size(self) -> Size:
        """At which it is priced."""

    @property
    def extent(self) -> int:
        """By which a table of plans is asked: rows, or queries."""

    def work(self, *, symbolic: bool = False) -> Workload:
        """Return what the fusing pass hands to the estimator."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that describe it where groups are stored."""


@dataclass
class Group:
    """Plans of one workload at one size, timed in one run.

    Parameters
    ----------
    subject : Subject
        The workload and the size.
    plans, ms : list of TilePlan, list of float
        The plans whose results were right, and their times.
    wrong, failed : list of dict
        Plans with wrong results, and those that could not be run, with what happened.
    feasible : int
        Plans that the estimator chose from; 0 if that was not recorded.
    """

    subject: Subject
    plans: list[TilePlan] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    feasible: int = 0

    @property
    def name(self) -> str:
        """That of the subject."""
        return self.subject.name

    def to_json(self) -> dict[str, Any]:
        """Return the group as it is stored; plans are words (`plan_words`) with their times."""
        return {
            **self.subject.to_json(),
            "feasible": self.feasible,
            "plans": {plan_words(p): ms for p, ms in zip(self.plans, self.ms, strict=True)},
            "wrong": self.wrong,
            "failed": self.failed,
        }


def from_json(stored: dict[str, Any], subject_of: Callable[[dict[str, Any]], Subject]) -> Group:
    """Read `Group.to_json`, without plans of kernels that are no longer there."""
    names = {name for family in FAMILIES for name in family.names}
    plans = {words: ms for words, ms in stored["plans"].items() if words.split()[0] in names}
    return Group(
        subject_of(stored),
        [plan_of(words) for words in plans],
        list(plans.values()),
        stored.get("wrong", []),
        stored.get("failed", []),
        stored.get("feasible", 0),
    )


def plan_of(words: str) -> TilePlan:
    """Read `plan_words` of a plan of the Triton back end."""
    found = WORDS.fullmatch(words)
    if found is None:
        raise ValueError(f"{words!r} is no plan")
    family, *numbers, own = found.groups(default="1")
    block_m, block_n, block_k, warps, stages, split = map(int, numbers)
    plan = triton_plan(family, (block_m, block_n, block_k), warps, stages, split)
    fields = dict(field.split("=") for field in own.split())
    return registry.plan_of({**plan.to_attr(), **{name: int(n) for name, n in fields.items()}})


def load(path: Path, subject_of: Callable[[dict[str, Any]], Subject]) -> list[Group]:
    """Read the groups of a file of timings."""
    return [from_json(group, subject_of) for group in read(path)["cases"]]


@dataclass(frozen=True)
class Chosen:
    """What the estimator says about a workload, and how long it took.

    Parameters
    ----------
    plan : TilePlan
        For this size, known when compiling.
    from_table : TilePlan
        For this size, by the table for a symbolic one.
    milliseconds : float
        Of a processor, for the longer of the two choices, nothing cached.
    """

    plan: TilePlan
    from_table: TilePlan
    milliseconds: float


def ask(subject: Subject, dev: DeviceSpec) -> Chosen:
    """Let the estimator choose."""
    uncached = getattr(choose, "__wrapped__", choose)
    plans, longest = [], 0.0
    for symbolic in (False, True):
        work = subject.work(symbolic=symbolic)
        began = time.process_time()
        choice = uncached(work, dev, always=True, backend=BACKEND)
        longest = max(longest, 1e3 * (time.process_time() - began))
        if not isinstance(choice, Choice):
            raise ValueError(f"{subject.name}: the estimator declines: {choice}")
        plans.append(choice.plans.plan_for(subject.extent))
    return Chosen(*plans, longest)


def selected(subject: Subject, dev: DeviceSpec, most: int) -> tuple[list[TilePlan], int]:
    """Return the plans to time, and how many were feasible.

    All, or where there are more than `most`: the first `TOP` by prediction, what is chosen, and a
    sample of the others, always the same.
    """
    work, chosen = subject.work(), ask(subject, dev)
    found = list(candidates(work, dev, BACKEND))
    found.sort(key=lambda plan: predict(work, plan, dev, subject.size).seconds)
    kept = list(dict.fromkeys([chosen.plan, chosen.from_table, *found[:TOP]]))
    rest = [plan for plan in found if plan not in kept]
    draw = random.Random(f"{subject.name} {subject.dtype}")
    kept += draw.sample(rest, min(len(rest), max(0, most - len(kept))))
    return kept, len(found)


@dataclass(frozen=True)
class Judgement:
    """How the model fares on a group.

    Parameters
    ----------
    chosen, best : int
        Indices of plans: the choice (if it was not timed, the timed plan of the least predicted
        time, and the slowest of these), and the fastest.
    predicted_ms : list of float
        Of every plan.
    regret, table_regret : float
        Part that the choice for this size, or the table's, loses to the best; NaN if the table's
        was not timed.
    correlation : float
        Spearman's, of predicted and measured times; NaN for fewer than three plans.
    superseded : int
        Timed plans that are candidates no more.  They count as the best, but not as the choice,
        nor in `correlation`.
    correlation_of_all : float
        As `correlation`, with those.
    choice_timed : bool
        Whether the choice is among the timed plans.
    choose_ms : float
        What choosing took of a processor.
    """

    chosen: int
    best: int
    predicted_ms: list[float]
    regret: float
    table_regret: float
    correlation: float
    superseded: int
    correlation_of_all: float
    choice_timed: bool
    choose_ms: float


def judge(group: Group, dev: DeviceSpec) -> Judgement:
    """Compare the model of now with the timings of a group, which must have some."""
    said, subject = ask(group.subject, dev), group.subject
    works = [subject.work(symbolic=symbolic) for symbolic in (False, True)]
    problem = Problem(works[0], dev)
    plans = [option_of(plan, problem).plan for plan in group.plans]
    predicted = [1e3 * predict(works[0], p, dev, subject.size).seconds for p in plans]
    best = min(range(len(predicted)), key=group.ms.__getitem__)
    known = {p for w in works for p in candidates(w, dev, BACKEND)}
    kept = [i for i, p in enumerate(plans) if p in known]
    timed = said.plan in plans
    # Of equal predictions the slowest, lest the order of the file decide in our favour
    among = kept or range(len(predicted))
    first = min(among, key=lambda i: (predicted[i], -group.ms[i]))
    chosen = plans.index(said.plan) if timed else first
    table = math.nan
    if said.from_table in plans:
        table = group.ms[plans.index(said.from_table)] / group.ms[best] - 1
    return Judgement(
        chosen,
        best,
        predicted,
        group.ms[chosen] / group.ms[best] - 1,
        table,
        spearman([predicted[i] for i in kept], [group.ms[i] for i in kept]),
        len(predicted) - len(kept),
        spearman(predicted, group.ms),
        timed,
        said.milliseconds,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; NaN for fewer than three pairs or constant ranks."""
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return math.nan
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of every value; equal ones share the mean of theirs."""
    ordered = sorted(values)
    first = {v: i for i, v in reversed(list(enumerate(ordered)))}
    last = {v: i for i, v in enumerate(ordered)}
    return [(first[v] + last[v]) / 2 for v in values]


Judged = list[tuple[Group, Judgement]]


def judge_all(groups: Sequence[Group], dev: DeviceSpec) -> Judged:
    """Judge every group that has timings."""
    return [(g, judge(g, dev)) for g in groups if g.plans]
