"""A step on several GPUs: ours against one GPU of ours, and PyTorch's tensor parallelism.

    python -m benchmarks run parallel [--workers 2] [--cases decode prefill] [--batch 1]

One run on a machine with as many NVIDIA GPUs. The model is a LLaMA with random weights that all
contenders draw alike, float16, on the GPUs. ``one GPU`` and ``ours`` are what users call, a token
with a full context, or a prompt; ``no graph`` launches what a token takes one by one, ``NCCL`` has
all-reduces that are not our kernels. PyTorch's step has weights cut as ours, NCCL by
`torch.distributed`, and is a CUDA graph on each worker: ``torch`` of its operators, and
``torch.compile`` of its compiled layers. The floor is the bytes of a GPU at the bandwidth of a
copy, or its operations, and two all-reduces a layer as a graph of all-reduces takes them. Logits
are compared with PyTorch's in float32 on the same workers.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks import building
from benchmarks.report import Entry, Verdict, two_digits
from benchmarks.sessions import sentence
from benchmarks.suites.decode import step as steps
from benchmarks.suites.decode.library import Library, built, started
from benchmarks.suites.decode.prefill import floor_flops
from benchmarks.suites.decode.step import Steps
from benchmarks.targets import floor_us
from relax_fusion import models
from relax_fusion.models import LlamaConfig

OURS, TORCH = ("one GPU", "ours", "no graph", "NCCL"), ("torch", "torch.compile")
LEAST = {
    ("decode", 1, 2): 1.6,
    ("decode", 8, 2): 1.65,
    ("decode", 1, 4): 2.4,
    ("prefill", 1, 2): 1.7,
}
"""How many times as fast as one GPU so many workers are to be, of a step and a batch."""

LEAST_TORCH = 1.2
"""The same against the best of PyTorch, for a token of one sequence."""

DEVICE = "cuda"


class Parallel(Steps):
    """A token or a prompt on several GPUs."""

    name = "bench_parallel"
    key = ("step", "workers", "model", "batch", "tokens", "layers", "vocab")
    cases = ("decode", "prefill")
    contenders = usual = (*OURS, *TORCH)
    ours = OURS
    plain: ClassVar = {**Steps.plain, "workers": ""}
    head = (
        *("step", "tokens", "floor, ms", *contenders, "host of ours", "one GPU / ours"),
        *("PyTorch / ours", "floor / ours", "all-reduce, us"),
        *("error: eager", *OURS, "allowed", "ours from one GPU"),
    )

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        super().options(parser)
        add = parser.add_argument
        add("--workers", type=int, default=2, help="how many, each with a GPU (default: 2)")
        most = "or what the model has positions for"
        add("--context", type=int, help=f"tokens before that of a decode (default 1024, {most})")
        add("--tokens", type=int, help=f"of a prompt (default 4096, {most})")
        help_ = "keep compiled steps here, and take those that are; another machine's do as well"
        add("--libraries", type=Path, metavar="DIR", help=help_)
        add("--compile-only", action="store_true", help="compile steps into --libraries, no more")
        help_ = "seconds that a contender has for everything (default: 240)"
        add("--limit", type=float, default=240.0, help=help_)

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        super().check(parser, args)
        config = models.zoo_config(args.model)
        if not isinstance(config, LlamaConfig):
            parser.error(f"--model {args.model}: PyTorch's side is a LLaMA")
        if args.quantization:
            parser.error("--quantization: weights are drawn on GPUs, and not quantised there")
        if args.compile_only and args.libraries is None:
            parser.error("--compile-only needs --libraries")
        if args.workers < 2:
            parser.error("--workers must be at least 2")
        most = config.max_position
        args.context = min(1024, most - 1) if args.context is None else args.context
        args.tokens = min(4096, most) if args.tokens is None else args.tokens
        for what, least, last in (("context", 1, most - 1), ("tokens", 2, most)):
            if not least <= getattr(args, what) <= last:
                parser.error(f"--{what} must be from {least} to {last}")
        try:
            models.export(config, max_seq_len=2, shards=args.workers)
        except models.ConfigError as err:
            parser.error(f"--workers: {err}")

    def kind(self) -> Entry:
        return {**super().kind(), "workers": f"{self.args.workers}gpus"}

    def items(self) -> list[str]:
        return list(self.args.cases)

    def facts(self, item: str) -> Entry:
        args = self.args
        known = {name: getattr(args, name) for name in self.key if hasattr(args, name)}
        return known | {"step": item, "tokens": self.library(item, "one GPU").total}

    def absent(self, item: str) -> Sequence[str]:
        left = ("torch.compile",) if self.args.no_compile else ()
        return left if item == "decode" else (*left, "no graph")

    @cached_property
    def _own(self) -> Any:
        return tempfile.TemporaryDirectory()

    def library(self, item: str, contender: str = "ours") -> Library:
        return Library(self.args, item, contender, self.args.libraries or Path(self._own.name))

    def without_a_run(self) -> int | None:
        if not self.args.compile_only:
            return None
        self.prepare(self.items())
        return 0

    def prepare(self, items: Sequence[str]) -> None:
        """Compile all libraries at once that are not there."""
        needed = [
            self.library(item, name)
            for item in items
            for name in self.asked(item)
            if name in OURS and name != "NCCL"
        ]
        building.fill_cache(built, [library for library in needed if not library.path.exists()])

    def measured(self, item: str) -> Entry:
        """Time everybody, one after the other, each with workers of its own."""
        self.session.free()
        asked = self.asked(item)
        found: Entry = {"us": {}, "host_us": {}, "compile_s": {}, "drawing_s": {}, "failed": {}}
        logits = dict[str, Any]()
        for name in (n for n in asked if n in OURS):
            try:
                logits[name] = self.of_ours(item, name, found)
            except Exception as err:
                found["failed"][name] = sentence(err)
        logits |= self.of_torch(item, [n for n in asked if n in TORCH], found)
        errors = {}
        if "exact" in logits:
            exact = logits.pop("exact")
            errors = {name: steps.error(value, exact) for name, value in logits.items()}
            found |= self.judged(errors, "float16")
        if {"one GPU", "ours"} <= set(logits):
            found["apart"] = steps.error(logits["ours"], logits["one GPU"])
        return {**found, **self.floor(item, found.get("all_reduce_us", 0.0)), "errors": errors}

    def job(self, library: Library) -> Any:
        """Return what workers are told of a step."""
        from benchmarks.suites.decode.shard import Job

        return Job(replace(library.exported, mod=None), library.step, library.total, DEVICE)

    def of_ours(self, item: str, name: str, found: Entry) -> Any:
        """Time ours on one worker or on all; return the logits."""
        from benchmarks.suites.decode import shard

        library = self.library(item, "ours" if name == "NCCL" else name)
        path, job = built(library), self.job(library)
        with started(library.shards, DEVICE, self.args.limit, name != "NCCL") as workers:
            return self.noted(workers.call(shard.ours, job, str(path)), name, found)

    def of_torch(self, item: str, names: Sequence[str], found: Entry) -> dict[str, Any]:
        """Time PyTorch's; return logits by name, exact ones among them."""
        from benchmarks.suites.decode import shard

        torch, logits, left = self.session.torch, dict[str, Any](), [*names]
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                started(self.args.workers, "cpu", self.args.limit) as workers,
            ):
                job = self.job(self.library(item))
                answers = workers.call(shard.begin_torch, job, f"{folder}/store")
                for name in ("exact", "eager"):
                    logits[name] = torch.from_numpy(answers[0][name])
                found["all_reduce_us"] = 1e6 * max(a["all_reduce_s"] for a in answers)
                while left:
                    answers = workers.call(shard.time_torch, left[0] == "torch.compile")
                    logits[left[0]] = self.noted(answers, left[0], found)
                    del left[0]
        except Exception as err:
            name = left[0] if left else "eager"
            found["failed"][name] = sentence(err)
            logits |= self.of_torch(item, left[1:], found) if left[1:] else {}
        return logits

    def noted(self, answers: Sequence[Entry], name: str, found: Entry) -> Any:
        """Keep what workers say of a contender, the slowest's; return the logits."""
        for what, where, factor in (
            *(("s", "us", 1e6), ("host_s", "host_us", 1e6)),
            *(("compile_s", "compile_s", 1), ("drawing_s", "drawing_s", 1)),
        ):
            if what in answers[0]:
                found[where][name] = factor * max(answer[what] for answer in answers)
        print(f"{name}: {1e-3 * found['us'][name]:.3f} ms", flush=True)
        logits = answers[0]["logits"]
        return self.session.torch.from_numpy(np.ascontiguousarray(logits))

    def floor(self, item: str, all_reduce_us: float) -> Entry:
        """Return the least time of a step on all workers, and what it consists of."""
        library = self.library(item)
        batch, count = self.args.batch, self.args.workers
        moved = steps.floor_bytes(library.exported, batch, library.total)
        whole = self.library(item, "one GPU").exported
        flops = floor_flops(whole, batch, library.total) / count if item == "prefill" else 0
        work = floor_us(moved, flops, self.session.ceilings["copy_tb_s"])
        sums = 2 * self.args.layers * all_reduce_us
        return {"floor_us": work + sums, "work_us": work, "sums_us": sums, "floor_bytes": moved}

    # --- what is said ----------------------------------------------------------------------

    def intro(self, record: Entry) -> str:
        args = self.args
        return (
            f"{args.workers} of {record['gpu']}; {args.layers} layers of {args.model}'s widths, "
            f"vocabulary {args.vocab}, float16, batch {args.batch}; ms, medians of several times "
            "on the slowest worker, L2 not flushed.  Errors are relative to the largest logit."
        )

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        def milliseconds(us: float | None) -> str:
            return "" if us is None else f"{1e-3 * us:.3f}"

        def error(value: float | None) -> str:
            return "" if value is None else f"{value:.1e}"

        errors, ours = entry["errors"], entry["us"].get("ours")
        return (
            *(entry["step"], str(entry["tokens"]), milliseconds(entry["floor_us"])),
            *(milliseconds(entry["us"].get(name)) for name in self.contenders),
            milliseconds(entry["host_us"].get("ours")),
            *(two_digits(ratio(entry, who)) for who in (OURS[:1], TORCH)),
            "" if ours is None else f"{entry['floor_us'] / ours:.0%}",
            f"{entry.get('all_reduce_us', 0):.1f}",
            *(error(errors.get(name)) for name in ("eager", *OURS)),
            *(error(entry.get(name)) for name in ("allowed_error", "apart")),
        )

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        at = entry["step"], entry["batch"], entry["workers"]
        wanted = [("one GPU", OURS[:1], LEAST.get(at))]
        wanted += [("PyTorch", TORCH, LEAST_TORCH if at[:2] == ("decode", 1) else None)]
        name = f"{entry['step']} of batch {entry['batch']}, {entry['workers']} GPUs"
        found = [(f"vs {what}", least, ratio(entry, who)) for what, who, least in wanted]
        return [(name, *v) for v in found if v[1] is not None and v[2] is not None]


def ratio(entry: Entry, against: Sequence[str]) -> float | None:
    """Return the best time of some contenders over ours; None if one is missing."""
    times = entry["us"]
    best = min((times[name] for name in against if name in times), default=None)
    return None if best is None or "ours" not in times else best / times["ours"]
