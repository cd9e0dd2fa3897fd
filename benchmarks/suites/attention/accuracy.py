"""Attention on difficult numbers: ours against float64, a line for each with PASS or FAIL."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import building
from benchmarks.gpu_timing import allowed_error
from benchmarks.report import Entry, plan_words
from benchmarks.suite import Suite
from benchmarks.suites.attention import ours
from benchmarks.suites.attention.cases import DTYPES, Case
from benchmarks.suites.attention.module import Job
from benchmarks.suites.attention.peers import Problem
from benchmarks.suites.attention.subject import CaseIn
from relax_fusion import make_target
from relax_fusion.estimator import candidates, predict
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
FEW_HEAD_DIMS = (64, 80, 128)
LARGE = 30.0

Operands = dict[str, torch.Tensor]


def _nothing(operands: Operands) -> None:
    """Leave the numbers as they are drawn."""


def _large_logits(operands: Operands) -> None:
    operands["q"] *= LARGE


def _one(name: str, value: float, operands: Operands) -> None:
    operands[name][0, 1, 1, 3] = value


def _hidden_queries(operands: Operands) -> None:
    operands["mask"][:, :, ::7] = False


def _hidden_keys(operands: Operands) -> None:
    bias = operands["bias"]
    bias[torch.rand(bias.shape, device=bias.device) < 0.5] = -math.inf
    bias[:, :, 1, 0] = 0.0
    bias[:, :, 1, 1:] = -math.inf
    bias[:, :, 2] = -math.inf


EDITS: dict[str, dict[str, Callable[[Operands], None]]] = {
    "": {
        "as drawn": _nothing,
        "large logits": _large_logits,
        "NaN in a query": partial(_one, "q", math.nan),
        "infinity in a query": partial(_one, "q", math.inf),
        "infinity in a key": partial(_one, "k", -math.inf),
    },
    "where": {"queries without a key": _hidden_queries},
    "bias": {"bias of -infinity": _hidden_keys},
}
"""What is done to the operands, by mask."""


@dataclass(frozen=True)
class Probe:
    """One result to be looked at."""

    job: Job
    name: str
    edit: Callable[[Operands], None]

    @property
    def title(self) -> str:
        """Name, shape, dtype and plan."""
        words = "" if self.job.plan is None else plan_words(self.job.plan)
        return f"{self.name}, {self.job.name}, {self.job.dtype}, {words}"


def shapes(mask: str, dtype: str) -> Iterator[Case]:
    """Yield the shapes of a mask: lengths that no tile divides, many tiles, keys all at once."""
    kind, few = mask or "plain", mask != "" or dtype != DTYPES[0]
    for head_dim in FEW_HEAD_DIMS if few else HEAD_DIMS:
        name = f"{kind}-257x385-d{head_dim}"
        yield Case(name, "", (4, 2), (257, 385), head_dim, batch=2, mask=mask)
    if not mask:
        yield Case(f"{kind}-200x512-d64", "", (4, 4), (200, 512), 64, batch=2)
    if mask != "bias":
        yield Case(f"{kind}-2048x2048-d128", "", (8, 2), (2048, 2048), 128, causal=True, mask=mask)


def probes(args: argparse.Namespace) -> list[Probe]:
    """Return all there is to look at: each by the best plan of every family of kernels."""
    dev = device_of(make_target(args.target))
    found = []
    for dtype in DTYPES:
        of_masks = [(case, edits) for m, edits in EDITS.items() for case in shapes(m, dtype)]
        token = Case("plain-1x1-d64", "", (4, 2), (1, 1), 64, batch=2)
        for case, edits in (*of_masks, (token, {"one token": _nothing})):
            for plan in best_of_families(CaseIn(case, dtype), dev):
                job = Job(case, dtype, args.layout, args.dynamic, args.target, plan)
                found += [Probe(job, name, edit) for name, edit in edits.items()]
    return found


def best_of_families(subject: CaseIn, dev: DeviceSpec) -> list[TilePlan]:
    """Return the plan of the least predicted time of each family of kernels."""
    work = subject.work()
    best: dict[str, tuple[float, TilePlan]] = {}
    for plan in candidates(work, dev, "triton"):
        priced = predict(work, plan, dev, subject.size).seconds, plan
        if plan.family not in best or priced[0] < best[plan.family][0]:
            best[plan.family] = priced
    return [plan for _, plan in best.values()]


def build(jobs: Iterable[Job]) -> dict[Job, ours.Compiled]:
    """Compile all jobs, those of one family of kernels together."""
    families: dict[str, list[Job]] = {}
    for job in dict.fromkeys(jobs):
        assert job.plan is not None
        families.setdefault(job.plan.family, []).append(job)
    building.fill_cache(ours.build, [job for jobs in families.values() for job in jobs])
    built: dict[Job, ours.Compiled] = {}
    for of_family in families.values():
        built |= ours.build_all(of_family)
    return built


def judged(out: torch.Tensor, problem: Problem) -> dict[str, Any]:
    """Compare a result with float64.

    It may err twice as much as steps in float32 whose result is rounded, and one rounding step of
    the largest value; what is not finite must be so in the same places.
    """
    exact = problem.reference()
    plain = problem.rounded().double()
    finite = exact.isfinite()
    same = bool((out.isfinite() == finite).all())
    scale = exact[finite].abs().max()
    steps = float((plain - exact)[finite].abs().max() / scale)
    allowed = allowed_error(steps, str(problem.dtype).removeprefix("torch."))
    error = float((out.double() - exact)[finite].abs().max() / scale)
    return {"passed": same and error <= allowed, "off": error, "allowed": allowed, "same": same}


class Accuracy(Suite):
    """The arguments of `Attention`, on other shapes and numbers."""

    name, device = "bench_attention-accuracy", "gpu"
    key = ("probe",)

    def items(self) -> list[Probe]:
        return probes(self.args)

    def facts(self, item: Probe) -> Entry:
        return {"probe": item.title}

    def prepare(self, items: Sequence[Probe]) -> None:
        self.built = build(probe.job for probe in items)

    def measured(self, item: Probe) -> Entry:
        """Compute what a probe asks for."""
        job = item.job
        problem = Problem(job.case, job.dtype, job.layout, self.session.timing.DEVICE)
        item.edit(problem.operands)
        if job not in self.built:
            raise RuntimeError("it was not compiled; see above")
        call = self.session.timing.Call(self.built[job].call(problem.operands))
        return judged(problem.sampled(problem.heads_first(call.checked_result())), problem)

    def is_bad(self, entry: Entry) -> bool:
        return not entry.get("passed", False)

    def line(self, entry: Entry, record: Entry) -> str:
        text = f"{'FAIL' if self.is_bad(entry) else 'PASS'} {entry['probe']}: "
        if "error" in entry:
            return text + entry["error"]
        text += f"error {entry['off']:.1e}, allowed {entry['allowed']:.1e}"
        return text + ("" if entry["same"] else ", not finite in other places")

    def summary(self, record: Entry) -> str:
        passed = sum(not self.is_bad(e) for e in record["cases"])
        return f"{passed} of {len(record['cases'])} passed"

    def markdown(self, record: Entry) -> str:
        lines = "\n".join(f"- {self.line(e, record)}" for e in record["cases"])
        return f"{record['gpu']}; {self.summary(record)}.\n\n{lines}"
