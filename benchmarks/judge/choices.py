"""What does a plan of a range of rows lose to the best plan of each size, and how long is choosing?

    python -m benchmarks judge choices [--sizes 300] [--seed 0] [--target h200]

All of it by price, on the processor: matmuls of seventeen models, whose number of rows is symbolic,
at sizes from 1 to 16384: those beside bounds of ranges, and others drawn evenly by their logarithm.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from benchmarks.report import Entry
from benchmarks.suite import Suite, done
from benchmarks.suites.matmul.cases import Chain
from benchmarks.suites.matmul.models import MODELS
from relax_fusion.errors import Decline
from relax_fusion.estimator import Problem, choose
from relax_fusion.estimator.ranges import Range
from relax_fusion.estimator.registry import ON_CHANGE, options
from relax_fusion.estimator.search import asked_in, price
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import DynamicDim

LARGEST = 16384
BOUNDS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BOUNDS += (1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
LIMIT, LIMIT_MS = 0.04, 30.0
"""What a size may lose, and the processor's time for a workload, that we hold ourselves to."""


def sizes_drawn(count: int, seed: int) -> list[int]:
    """Return `count` numbers of rows, those beside `BOUNDS` among them."""
    draw, found = random.Random(seed), {LARGEST, *(b + more for b in BOUNDS for more in (0, 1))}
    while len(found) < count:
        found.add(round(LARGEST ** draw.random()))
    return sorted(found)


class JudgeChoices(Suite):
    """Matmuls with symbolic rows."""

    name = "judge_choices"
    key = ("case", "model")
    cases = ("qkv", "gate_up", "up", "out", "down", "plain")
    axes = ("cases", "models")
    plain: ClassVar = {"sizes": 300, "seed": 0}
    head = ("chain", "model", "ms", "kernels", "mean loss, %", "worst, %", "at", "above 4 %, %")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
        parser.add_argument(
            "--sizes", type=int, default=300, help="numbers of rows, beside bounds at least"
        )
        parser.add_argument("--seed", type=int, default=0, help="of the sizes that are drawn")

    def begin(self) -> None:
        self.device = device_of(make_target(self.args.target))
        self.sizes = sizes_drawn(self.args.sizes, self.args.seed)

    def items(self) -> Iterator[tuple[str, str]]:
        for case, model in super().items():
            if case != ("gate_up" if MODELS[model].biases else "up"):
                yield case, model

    def is_complete(self, entry: Entry, item: tuple[str, str]) -> bool:
        return "error" not in entry

    def measured(self, item: tuple[str, str]) -> Entry:
        (work,) = Chain(*item).works(DynamicDim("rows"), "float16")
        for forget in ON_CHANGE:  # models have workloads in common
            forget()
        start = time.process_time()
        choice = choose(work, self.device, always=True)
        spent = time.process_time() - start
        if isinstance(choice, Decline):
            raise ValueError(f"{choice.reason}: {choice.detail}")
        found = list(options(Problem(work, self.device)))
        (priced,) = price([(found, self.sizes)])
        place = {option.plan: i for i, option in enumerate(found)}
        own = [place[choice.plans.plan_for(rows=size)] for size in self.sizes]
        offered = [asked_in(found, Range.of(n)) for n in self.sizes]
        best = [float(each.seconds.min()) for each in price(offered)]
        loss = priced.seconds[np.arange(len(own)), own] / best - 1
        return {
            "ms": 1e3 * spent,
            "kernels": len({plan for _, plan in choice.plans.boxes}),
            "loss": float(loss.mean()),
            "worst": float(loss.max()),
            "at": self.sizes[int(loss.argmax())],
            "above": float((loss > LIMIT).mean()),
        }

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        loss, worst, above = (f"{100 * entry[name]:.2f}" for name in ("loss", "worst", "above"))
        numbers = f"{entry['ms']:.0f}", str(entry["kernels"]), loss, worst, str(entry["at"]), above
        return entry["case"], entry["model"], *numbers

    def intro(self, record: Entry) -> str:
        return f"{record['target']}, {record['sizes']} sizes\n\n{self.summary(record)}"

    def summary(self, record: Entry) -> str:
        found = done(record)
        if not found:
            return ""
        each = {
            name: [e[name] for e in found] for name in ("ms", "kernels", "loss", "above", "worst")
        }
        mean = {name: statistics.mean(numbers) for name, numbers in each.items()}
        return (
            f"- {mean['loss']:.2%} lost in the mean, {max(each['worst']):.1%} at worst; more than "
            f"{LIMIT:.0%} (the limit) at {mean['above']:.2%} of {len(found)} workloads' sizes\n"
            f"- choosing takes {statistics.median(each['ms']):.0f} ms of the processor in the "
            f"median, {mean['ms']:.0f} in the mean, {max(each['ms']):.0f} at most (the limit is "
            f"{LIMIT_MS:.0f})\n- {mean['kernels']:.1f} kernels for a workload"
        )
