"""Chains of matmuls as one kernel, apart, and in torch, on an NVIDIA GPU, in one run.

G1 to G12 and S1 to S9 of MCFuser (SC'24), adapters of LoRA, blocks of models that no pattern is
for, and random chains.  They come as `torch.export` writes them, with weights as operands.
Everything is captured into CUDA graphs, and L2 is flushed before each replay.  "apart" has no
chains: matmuls with what stands around them, and attention by its own kernels; "fused" fuses
whether that pays or not, attention too by the chain engine; "tuned" does so with plans that were
measured; "chosen" fuses where the estimator expects a gain.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks import building
from benchmarks.report import Entry
from benchmarks.suite import Suite, done
from benchmarks.suites.chains.cases import NAMED, case_of, exported, sampled
from relax_fusion.studio.bench.torch_peers import TUNED, under_compile
from relax_fusion.tuning import tune

PASSES = ("FuseChains",)

WAYS = ("apart", "fused", "chosen", "tuned")
"""How ours computes a chain."""


@dataclass(frozen=True)
class Job:
    """A chain to be compiled for a target."""

    way: str
    case: str
    target: str
    database: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.case}, {self.way}"

    def options(self) -> dict[str, Any]:
        """Return the options of the pipeline."""
        if self.way in ("apart", "chosen"):
            return {"disable": PASSES} if self.way == "apart" else {}
        return {"always_fuse": True, "disable": case_of(self.case).others}


def build(job: Job) -> building.Built:
    """Compile a chain."""
    mod = exported(job.case)[1]
    return building.compiled(mod, job.target, database=job.database, **job.options())


class OfChains(Suite):
    """What suites share whose cases are chains, with names or random."""

    device = "gpu"
    cases = tuple(NAMED)

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        number = "random chains beside (with no --cases: instead of) those with names"
        parser.add_argument("--random", type=int, metavar="N", default=0, help=number)
        parser.add_argument("--seed", type=int, default=0, help="of random chains")

    @classmethod
    def arguments(cls, argv: Sequence[str] | None = None) -> Namespace:
        args = super().arguments(argv)
        if args.random and args.cases == list(cls.cases):
            args.cases = []
        return args

    def items(self) -> list[str]:
        return [*self.args.cases, *sampled(self.args.random, self.args.seed)]

    def facts(self, item: str) -> Entry:
        return {"case": item}


class Chains(OfChains):
    """Chains of fixed sizes; ours may err twice as much as torch."""

    name = "bench_chains"
    contenders = ("torch", "compile", *WAYS)
    usual = ("torch", "compile", "apart", "fused", "chosen")
    ours = WAYS
    head = ("chain", "torch, us", "torch.compile", *WAYS, "chosen: kernels of")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        super().options(parser)
        help = "times of plans, for tuned (default: measured first, into a file that is not kept)"
        parser.add_argument("--database", type=Path, metavar="FILE", help=help)

    def prepare(self, items: Sequence[str]) -> None:
        jobs = [self.job(name, case) for case in items for name in self.asked(case) if name in WAYS]
        building.fill_cache(build, [job for job in jobs if job.way != "tuned"])
        for job in jobs:
            if job.way == "tuned" and job.database is not None:
                options = {"backend": "triton", **job.options()}
                tune(exported(job.case)[1], job.database, job.target, **options)

    def job(self, way: str, case: str) -> Job:
        """Return what is compiled for a contender."""
        if way == "tuned" and self.args.database is None:
            self.args.database = Path(mkdtemp(), "times.jsonl")
        return Job(way, case, self.args.target, self.args.database if way == "tuned" else None)

    @torch.no_grad()
    def measured(self, item: str) -> Entry:
        """Return microseconds and errors of a chain."""
        timing, case = self.session.timing, case_of(item)
        module, _, *operands = exported(item)
        inputs, weights = ([t.to(timing.DEVICE) for t in some] for some in operands)
        exact = module.double().to(timing.DEVICE)(*(t.double() for t in inputs))
        module = module.to(case.dtype)
        eager = case.peer or module
        errors = {"torch": timing.error_of(eager(*inputs), exact)}
        allowed = timing.allowed_error(errors["torch"], str(case.dtype).removeprefix("torch."))
        kernels: list[str] = []

        def contender(name: str) -> Callable[[], Any]:
            if name == "torch":
                return lambda: eager(*inputs)
            if name == "compile":
                return under_compile(lambda: module(*inputs), TUNED, dynamic=False)
            built = build(self.job(name, item))
            if name == "chosen":
                kernels.extend(sorted({d.pattern for d in built.report.decisions if d.fused}))
            return built.call("main", [*inputs, *weights])

        asked = self.asked(item)
        found = self.session.compared(asked, contender, exact, errors, allowed)
        return {**found, "kernels": kernels}

    def intro(self, record: Entry) -> str:
        said = f"{record['gpu']}; medians of CUDA graph replays, L2 flushed before each."
        return f"{said}\n\n{gains(done(record))}"

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        times = {name: f"{t:.2f}" for name, t in entry["us"].items()}
        cells = (times.get(name, "") for name in self.contenders)
        return entry["case"], *cells, ", ".join(entry["kernels"])

    def summary(self, record: Entry) -> str:
        return gains(done(record))


PEERS = {"better of torch": ("torch", "compile"), "apart": ("apart",)}
"""What ours is compared with: the fastest of these that was timed."""


def gains(entries: Sequence[Entry]) -> str:
    """Return how many times as fast ours is, as geometric means and the worst, by kind."""
    lines = []
    for (kind, found), way, (name, peers) in product(_kinds(entries).items(), WAYS, PEERS.items()):
        ratios = _ratios(found, way, peers)
        if ratios and way not in peers:
            worst = min(ratios, key=ratios.__getitem__)
            lines.append(
                f"- {kind}: {way} against {name} {geometric_mean(ratios.values()):.2f}, "
                f"worst {ratios[worst]:.2f} ({worst}), {len(ratios)} chains"
            )
    return "\n".join(lines)


def _ratios(entries: Sequence[Entry], way: str, peers: Sequence[str]) -> dict[str, float]:
    """Return the times of the better peer over ours by case, where both were timed."""
    found = {}
    for entry in entries:
        theirs = [entry["us"][name] for name in peers if name in entry["us"]]
        if way in entry["us"] and theirs:
            found[entry["case"]] = min(theirs) / entry["us"][way]
    return found


def _kinds(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return entries by what they are of: G, S, LoRA, random, and blocks of models."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        first = entry["case"].split()[0]
        known = first if first in ("LoRA", "random") else "blocks"
        if first[1:].isdigit():
            known = f"{first[0]}1 to {first[0]}{12 if first[0] == 'G' else 9}"
        found.setdefault(known, []).append(entry)
    return found
