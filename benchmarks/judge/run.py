"""What judging the estimator on a GPU shares: plans of one workload, checked and timed in turn."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.judge import judgement, report
from benchmarks.judge.judgement import Group, Judged, Judgement, Subject
from benchmarks.report import Entry, plan_words
from benchmarks.runner import conclude, read
from benchmarks.sessions import sentence
from benchmarks.suite import Suite

WHAT = (
    "Median time in ms by plan; CUDA graph replays through the VM, L2 flushed by reading, launch "
    "included. Plans of a group were timed in one run, in turn."
)

Right = Callable[[Any], str]
"""Says what is wrong with a result; nothing if it is right."""

Functions = Mapping[Any, Callable[[], Callable[[], Any]]]
"""What makes the call of a plan, by plan."""


class Judge(Suite, ABC):
    """Times the plans of group after group and judges the model by each."""

    device = "gpu"
    plain: ClassVar = {"dtype": "float16"}
    subject_of: Callable[[Entry], Subject]
    """Reads the subject of an entry."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.judgements: dict[str, Judgement] = {}

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--most", type=int, default=96, help="plans to time at a size")
        add("--from", dest="stored", type=Path, metavar="JSON", help="judge it again")
        add("--note", help="with --from: what a reader must know, kept in the record")

    def without_a_run(self) -> int | None:
        """Judge the timings of a file with the model as it is now, and write that.

        Date, machine and versions stay those of the timings; what the model of then reached is
        kept.
        """
        if self.args.stored is None:
            return None
        record = read(self.args.stored)
        if not any(entry.get("plans") for entry in record["cases"]):
            raise SystemExit(f"{self.args.stored} holds no timings")
        if "overall" in record:
            record.setdefault("overall_when_timed", record["overall"])
        if self.args.note:
            record["note"] = self.args.note
        conclude(self, record)
        return 0

    @property
    def dev(self) -> Any:
        """What the model is asked about."""
        from relax_fusion.hardware.target import device_of, make_target

        return device_of(make_target(self.args.target))

    # --- what is measured ------------------------------------------------------------------

    def begin(self) -> None:
        from benchmarks import plans

        self.modules = plans
        self.session.facts["what"] = WHAT
        self.wanted: dict[Any, tuple[list[Any], int]] = {}

    @abstractmethod
    def together(self, subject: Any) -> Sequence[Any]:
        """Return the subjects whose plans are compiled with those of `subject`, itself first."""

    @abstractmethod
    def compile(self, subjects: Sequence[Any]) -> None:
        """Compile the plans in `wanted` of some subjects."""

    @abstractmethod
    def functions(self, subject: Any) -> tuple[Functions, dict[Any, str], Right]:
        """Return the plans of a subject, why others do not compile, and what checks results."""

    def facts(self, item: Any) -> Entry:
        return item.to_json()

    def prepare(self, items: Sequence[Any]) -> None:
        self.todo = items

    def measured(self, item: Any) -> Entry:
        """Check and time the plans of a subject."""
        if item not in self.wanted:
            now = self.together(item)
            self.wanted = {s: judgement.selected(s, self.dev, self.args.most) for s in now}
            self.compile(now)
        group = Group(item, feasible=self.wanted[item][1])
        functions, failed, right = self.functions(item)
        group.failed = [kept(plan, why) for plan, why in failed.items()]
        calls = {}
        for plan, function in functions.items():
            try:
                call = self.session.timing.Call(function())
                why = right(call.checked_result())
            except Exception as err:
                group.failed.append(kept(plan, sentence(err)))
                self.session.check(err)
                continue
            if why:
                group.wrong.append(kept(plan, why))
            else:
                calls[plan] = call
        samples = self.session.sampler.sample_ms({p: call.launch for p, call in calls.items()})
        group.plans = list(samples)
        group.ms = [round(statistics.median(s), 6) for s in samples.values()]
        return group.to_json()

    def checked(self, reference: Any, allowed: float) -> Right:
        """Return what compares a result with float64."""

        def right(out: Any) -> str:
            error = self.session.timing.error_of(out, reference)
            return "" if error <= allowed else f"error {error:.2e}, allowed {allowed:.1e}"

        return right

    # --- what is said ----------------------------------------------------------------------

    def key_of(self, entry: Entry) -> tuple[str]:
        return (self.subject_of(entry).name,)

    def is_complete(self, entry: Entry, item: Any) -> bool:
        return bool(entry.get("plans"))

    def is_bad(self, entry: Entry) -> bool:
        return "error" in entry or bool(entry["wrong"] or entry["failed"])

    def judged(self, record: Entry) -> Judged:
        """Judge the groups that have timings, each once."""
        timed = (e for e in record["cases"] if e.get("plans"))
        groups = [judgement.from_json(e, self.subject_of) for e in timed]
        for group in groups:
            if group.name not in self.judgements:
                self.judgements[group.name] = judgement.judge(group, self.dev)
        return [(group, self.judgements[group.name]) for group in groups]

    def line(self, entry: Entry, record: Entry) -> str:
        if "error" in entry:
            return super().line(entry, record)
        return report.line(entry, self.judged({"cases": [entry]}))

    def summary(self, record: Entry) -> str:
        judged = self.judged(record)
        return report.summary(judged) if judged else "nothing was timed"

    def markdown(self, record: Entry) -> str:
        """Return the tables, and put how the model fares into the record."""
        judged = self.judged(record)
        parts = [f"{record['gpu']}, {record['dtype']}. {record['what']}", record.get("note", "")]
        if "overall_when_timed" in record:
            parts.append(report.earlier(record["overall_when_timed"]))
        if judged:
            record["overall"] = report.overall(judged)
            parts.append(report.markdown(judged))
        parts.append(report.problems(record["cases"], self.name_of))
        return "\n\n".join(part for part in parts if part)


def kept(plan: Any, why: str) -> dict[str, Any]:
    """Return what is stored of a plan that has no time."""
    return {"plan": plan_words(plan), "why": why}
