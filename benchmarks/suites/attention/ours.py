"""Ours of `suite`: cases compiled by our pipeline, run by TVM's VM."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.building import Built, compiled, decided, in_halves
from benchmarks.report import plan_words
from benchmarks.suites.attention.cases import Case
from benchmarks.suites.attention.module import Job, module_of
from relax_fusion.estimator.tile_plan import TilePlan

PATTERN = "FuseAttentionChain"


class NotFusedError(Exception):
    """The attention did not become one kernel; what TVM makes of it is not ours to time."""


@dataclass
class Compiled:
    """A function of a compiled module."""

    job: Job
    built: Built

    def plan(self) -> str:
        """Say which kernel computes it with which tiles, or why none does."""
        return plan_of(self.job, self.built.report)

    def call(self, operands: dict[str, Any]) -> Callable[[], Any]:
        """Return the call on tensors of torch, whose memory it shares.

        Raises
        ------
        NotFusedError
            If it is not our kernel.
        """
        if not any(d.fused for d in decisions_of(self.job, self.built.report)):
            raise NotFusedError(self.plan())
        return self.built.call(self.job.function, operands.values())


def job(case: Case, args: argparse.Namespace) -> Job:
    """Return what is to be compiled for a case."""
    return Job(case, args.dtype, args.layout, args.dynamic, args.target)


def build(job: Job) -> Compiled:
    """Compile one function."""
    return Compiled(job, compiled(module_of([job]), job.target, plans=plans_of([job])))


def build_all(jobs: Sequence[Job]) -> dict[Job, Compiled]:
    """Compile many functions in one module; leave out what cannot be compiled.

    Jobs that differ in their plans alone do not go together.
    """

    def build_some(some: list[Job]) -> dict[Job, Compiled]:
        built = compiled(module_of(some), some[0].target, plans=plans_of(some))
        return {job: Compiled(job, built) for job in some}

    made, failed = in_halves(build_some, jobs)
    for job, why in failed.items():
        print(f"NOT COMPILED {job.name}: {why}")
    return made


def plans_of(jobs: Sequence[Job]) -> dict[str, TilePlan]:
    """Return the plans that jobs bring, by the keys of their workloads."""
    found = {}
    for job in jobs:
        if job.plan is not None:
            for decision in decisions_of(job, decided(module_of([job]), job.target)):
                if decision.workload is not None:
                    found[decision.workload.key] = job.plan
    return found


def decisions_of(job: Job, report: Any) -> list[Any]:
    """Return what the pass decided about a function."""
    found = [d for d in report.decisions if d.function == job.function]
    return [d for d in found if d.pattern == PATTERN]


def plan_of(job: Job, report: Any) -> str:
    """Say how a function is computed: plans by range of queries, or why it is not fused."""
    decisions = decisions_of(job, report)
    for decision in decisions:
        if decision.fused and decision.plans is not None:
            ranges = decision.plans.entries
            if len(ranges) == 1:
                return plan_words(ranges[0][1])
            ends = ["" if upper is None else f"to {upper}: " for upper, _ in ranges]
            return "; ".join(e + plan_words(p) for e, (_, p) in zip(ends, ranges, strict=True))
    return "not fused: " + ("; ".join(str(d.decline) for d in decisions) or "not recognised")


def print_plans(args: argparse.Namespace) -> int:
    """Print the plan of every case, compiling nothing."""
    jobs = [job(case, args) for case in args.cases]
    report = decided(module_of(jobs), args.target)
    for each in jobs:
        print(f"{each.name}: {plan_of(each, report)}")
    return 0
