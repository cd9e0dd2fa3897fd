"""How well does the estimator choose CPU plans? Times a sample of candidates beside its prices.

    python -m benchmarks judge cpu [--sample 10] [--seed 0] [--cases norm_qkv down]

For each workload and number of rows: the plan that the estimator takes, its regret (its time over
the best measured time, less one), and the rank correlation of predicted and measured times.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import tvm
from tvm.runtime import tensor

from benchmarks.cpu_timing import pin_threads
from benchmarks.judge.judgement import spearman
from benchmarks.report import Entry
from benchmarks.suite import Suite, done
from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.estimator import candidates, predict
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of, host_target
from relax_fusion.models.threads import use_all_cores
from relax_fusion.timing import in_turn
from relax_fusion.workload import DynamicDim, GatedFFN, Norm, NormMatmul, Projection

RMS, ROWS = Norm("rms", 1e-5), DynamicDim("rows")
SIZES = (1, 4, 16, 64, 256)
WORKLOADS: dict[str, NormMatmul | GatedFFN] = {
    "norm_qkv": NormMatmul(ROWS, 1536, (Projection(3072, "nk"),), RMS, "float32", "float32"),
    "norm_gated": GatedFFN(ROWS, 1024, 3072, "nk", True, True, "silu", RMS, "float32", "float32"),
    "o_proj": NormMatmul(
        ROWS, 2048, (Projection(2048, "nk", ("residual",)),), None, "float32", "float32"
    ),
    "down": NormMatmul(
        ROWS, 4096, (Projection(1024, "nk", ("residual",)),), None, "float32", "float32"
    ),
    "norm_qkv_kn": NormMatmul(ROWS, 768, (Projection(2304, "kn"),), RMS, "float32", "float32"),
}
SLOWEST = 4
"""A plan that takes this many times as long as the best is not timed again."""


Item = tuple[str, int]
"""A workload, and its rows."""


def compiled(work: NormMatmul | GatedFFN, plan: TilePlan) -> tvm.runtime.Module:
    """Return the kernel of `work` under `plan`."""
    func = build_prim_func(work, PlanTable.single(plan))
    schedule = FusedRule().apply(func, host_target(), False)
    return tvm.compile(schedule.mod, target=host_target()).jit()


def arguments(
    func: tvm.tirx.PrimFunc, rows: int, rng: np.random.Generator
) -> list[tvm.runtime.Tensor]:
    """Return inputs (and outputs, which are overwritten) for the parameters of `func`."""
    shapes = [
        [d if isinstance(d, int) else None for d in map(_fixed, p.ty.shape)] for p in func.params
    ]
    return [
        tensor(rng.standard_normal([rows if d is None else d for d in shape], np.float32))
        for shape in shapes
    ]


def _fixed(dim: tvm.tirx.Expr) -> int | None:
    return int(dim) if isinstance(dim, tvm.tirx.IntImm) else None


def sample(
    work: NormMatmul | GatedFFN, dev: DeviceSpec, count: int, rng: random.Random
) -> list[TilePlan]:
    """Return the plans that the estimator takes, its runners-up and some at random."""
    found = list(candidates(work, dev))
    wanted: dict[TilePlan, None] = {}
    for rows in SIZES:
        ranked = sorted(found, key=lambda plan: predict(work, plan, dev, rows).seconds)
        wanted.update(dict.fromkeys(ranked[:2]))
    wanted.update(dict.fromkeys(rng.sample(found, min(count, len(found)))))
    return list(wanted)


class JudgeCpu(Suite):
    """Five workloads of small models, at several numbers of rows."""

    name = "judge_cpu"
    key = ("workload", "rows")
    cases = tuple(WORKLOADS)
    case_options = ("--cases", "--workload")
    has_target = False
    head = (
        *(*key, "plans", "chosen", "ms", "predicted, ms", "best", "ms"),
        *("Gflop/s", "regret", "rank correlation"),
    )

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--sample", type=int, default=10, help="random plans per workload")
        add("--rounds", type=int, default=8, help="times that each plan is timed")
        add("--seed", type=int, default=0)
        add("--name", default=cls.name, help="of the files, behind the date")

    def stem(self, record: Entry) -> str:
        return str(self.args.name)

    def begin(self) -> None:
        use_all_cores()
        self.dev, self.made = device_of(host_target()), ("", list[tuple[TilePlan, Any]]())
        self.session.facts["vector_bytes"] = self.dev.vector_bytes

    def items(self) -> Iterator[Item]:
        return product(self.args.cases, SIZES)

    def kernels(self, name: str) -> list[tuple[TilePlan, Any]]:
        """Return the plans of a workload and their kernels; those of the last one are kept."""
        if name != self.made[0]:
            draw = random.Random(f"{self.args.seed} {name}")
            plans = sample(WORKLOADS[name], self.dev, self.args.sample, draw)
            self.made = name, [(plan, compiled(WORKLOADS[name], plan)) for plan in plans]
        return self.made[1]

    def measured(self, item: Item) -> Entry:
        """Time the plans of a workload in turn; the least of each counts."""
        (name, rows), work = item, WORKLOADS[item[0]]
        kernels = self.kernels(name)
        func = build_prim_func(work, PlanTable.single(kernels[0][0]))
        args = arguments(func, rows, np.random.default_rng(rows))
        kernels[0][1]["main"](*args)  # starts the threads
        pin_threads()

        def turn(kernel: Any, number: int) -> list[float]:
            print(f"{name}, {rows} rows: round {number + 1}", end="\r", file=sys.stderr)
            return list(kernel.time_evaluator("main", tvm.cpu(), number=1, repeat=3)(*args).results)

        found = in_turn(
            {plan: partial(turn, kernel) for plan, kernel in kernels},
            self.args.rounds,
            lambda plan, times: min(times[plan]) < SLOWEST * min(min(s) for s in times.values()),
        )
        return {
            "flops": work.flops(rows=rows),
            "plans": [
                {
                    **asdict(plan),
                    "predicted_s": predict(work, plan, self.dev, rows).seconds,
                    "measured_s": min(times),
                }
                for plan, times in found.items()
            ],
        }

    def intro(self, record: Entry) -> str:
        judged = [judged_of(e) for e in done(record)]
        if not judged:
            return ""
        regret, rank = fmean(j["regret"] for j in judged), fmean(j["rank"] for j in judged)
        return f"Mean regret {regret:.3g}, mean rank correlation {rank:.3g}."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        j = judged_of(entry)
        numbers = (j["rate"], j["regret"], j["rank"])
        times = (f"{1e3 * s:.3g}" for s in (j["measured_s"], j["predicted_s"], j["best_s"]))
        taken, predicted, best = times
        names = (entry["workload"], str(entry["rows"]), str(len(entry["plans"])))
        plans = (j["chosen"], taken, predicted, j["best"], best)
        return *names, *plans, *(f"{number:.3g}" for number in numbers)


def judged_of(entry: Entry) -> dict[str, Any]:
    """Return regret and correlation of a workload at a number of rows."""
    plans = entry["plans"]
    chosen, best = (min(plans, key=lambda p: p[by]) for by in ("predicted_s", "measured_s"))
    return {
        **{name: chosen[name] for name in ("predicted_s", "measured_s")},
        "chosen": tile(chosen),
        "best": tile(best),
        "best_s": best["measured_s"],
        "rate": entry["flops"] / chosen["measured_s"] * 1e-9,
        "regret": chosen["measured_s"] / best["measured_s"] - 1,
        "rank": spearman(*([p[by] for p in plans] for by in ("predicted_s", "measured_s"))),
    }


def tile(plan: dict[str, Any]) -> str:
    """Return the numbers of a CPU plan that vary."""
    text = "{family} {block_m}x{block_n} reg {reg_m}x{reg_n} lanes {lanes}"
    return text.format_map(plan).lstrip()
