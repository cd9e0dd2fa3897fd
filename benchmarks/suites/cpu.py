"""Norm, matmul and epilogue on this CPU: ours against TVM, MLC-LLM's pipeline and torch.

    python -m benchmarks run cpu [--models llama-3.2-1b gpt2] [--rows 1 16 128 512] [--rounds 5]

All in one run.  Every contender has a thread per core, kept on its core, and takes its turn in
every round.  The least of the times counts: what else runs on a machine only adds.  Results are
compared with float64 in the same run.  Beside the times stand the machine's rate of multiply-adds
and its memory bandwidth, both measured, and which part of the nearer one we reach.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import tvm
from tvm import ir, relax
from tvm.s_tir import dlight as dl

from benchmarks.building import LOWERING
from benchmarks.cpu_timing import peak_gflops, pin_threads, read_gbytes_per_s
from benchmarks.gpu_timing import allowed_error, error_of
from benchmarks.report import Entry, Verdict
from benchmarks.suite import Suite
from benchmarks.suites.matmul import ours
from benchmarks.suites.matmul.cases import Chain
from benchmarks.suites.matmul.peers import Problem, Weights
from benchmarks.targets import floor_us
from relax_fusion import host_target
from relax_fusion.estimator import format_seconds
from relax_fusion.models.threads import thread_count, use_all_cores
from relax_fusion.timing import in_turn, timed

TVM_GOALS, TORCH_GOAL = {1: 3.0, 128: 50.0, 512: 50.0}, 0.6
"""Least ratios: against both pipelines of TVM by rows, and against torch in float32."""

TVM_FLOPS = {"8b": 5e9}
"""Work beyond which TVM's pipelines, at half a Gflop/s, are not waited for; others are."""

SLOW_S = 0.3
"""What takes longer is timed once, and once only."""

PAUSE_S = 0.25
"""Before each turn, for the threads of the contender before it to stop waiting for work."""

REPEATS = 5

LABELS = {"tvm": "TVM default", "mlc": "MLC", "torch": "torch"}

MODELS = {
    "llama-3.2-1b": ("1b", ("qkv", "gate_up", "out", "down")),
    "gpt2": ("gpt2", ("qkv", "up", "out", "down")),
    "llama-3.1-8b": ("8b", ("qkv", "gate_up", "down")),
}
"""Sizes and cases of `matmul`."""

Item = tuple[Chain, str, int]
"""A chain in a dtype, at a number of rows."""


class Cpu(Suite):
    """Chains of three models' widths."""

    name = "bench_cpu"
    key = ("model", "chain", "dtype", "rows")
    has_target = False
    must_reach = True
    contenders = usual = ("ours", *LABELS)
    head = (*key, "ours", "Gflop/s", "part of", *LABELS.values())

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--models", nargs="+", default=list(MODELS), choices=MODELS)
        add("--rows", type=int, nargs="+", default=[1, 4, 16, 128, 512])
        add("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
        add("--rounds", type=int, default=6)

    def begin(self) -> None:
        use_all_cores()
        self.cores = self.session.facts["cores_used"] = thread_count()
        torch.set_num_threads(self.cores)
        torch.ones(256, 512) @ torch.ones(512, 256)  # starts torch's threads, before they are put
        self.key_of_compiled: Any = None

    def items(self) -> Iterator[Item]:
        for dtype in self.args.dtypes:
            for model in self.args.models[: None if dtype == "float32" else 1]:
                size, cases = MODELS[model]
                yield from ((Chain(c, size), dtype, n) for c in cases for n in self.args.rows)

    def facts(self, item: Item) -> Entry:
        chain, dtype, rows = item
        return {
            **dict(zip(self.key, (chain.size, chain.case, dtype, rows), strict=True)),
            "flops": chain.flops(rows),
            "bytes": math.prod(chain.weights["w"]) * getattr(torch, dtype).itemsize,
        }

    def absent(self, item: Item) -> tuple[str, ...]:
        chain, dtype, rows = item
        waits = dtype == "float32" and chain.flops(rows) <= TVM_FLOPS.get(chain.size, float("inf"))
        return () if waits else ("tvm", "mlc")

    def is_complete(self, entry: Entry, item: Item) -> bool:
        return "error" not in entry and set(self.asked(item)) <= set(entry["seconds"])

    def compile(self, chain: Chain, dtype: str) -> None:
        """Compile a chain by every pipeline, unless it is that of the last case; see the limits."""
        if self.key_of_compiled == (chain, dtype):
            return
        self.key_of_compiled, target = (chain, dtype), host_target()
        mod, self.function, names = ours.exported(ours.Job(chain, "ours", None, dtype, "host"))
        self.weights = Weights(chain, dtype, "cpu")
        self.parameters = [self.weights.by_name[name] for name in names]
        every = {who for rows in self.args.rows for who in self.asked((chain, dtype, rows))}
        pipelines: dict[str, Any] = {
            "ours": relax.get_pipeline("relax_fusion", target=target),
            "tvm": relax.get_default_pipeline(target),
            "mlc": mlc_pipeline(target),
        }
        self.machines = {w: machine(mod, target, pipelines[w]) for w in pipelines if w in every}
        self.measure_limits()

    def measure_limits(self) -> None:
        """Keep the best that the machine has shown so far."""
        facts, cores = self.session.facts, self.cores
        if "peak_gflops" not in facts:
            peak_gflops(cores)  # starts TVM's threads
            pin_threads()
        for name, limit in (("peak_gflops", peak_gflops), ("read_gbytes_per_s", read_gbytes_per_s)):
            facts[name] = max(facts.get(name, 0.0), limit(cores))

    def measured(self, item: Item) -> Entry:
        """Time every contender in turn, round after round."""
        chain, dtype, rows = item
        self.compile(chain, dtype)
        problem = Problem(self.weights, rows)
        tensors = [*(t.unsqueeze(0) for t in problem.inputs.values()), *self.parameters]
        args = [tvm.runtime.from_dlpack(t) for t in tensors]
        timers = {"torch": torch_timer(problem.eager)}
        for who, vm in self.machines.items():
            timers[who] = vm_timer(vm, self.function, args)

        def turn(who: str, number: int) -> list[float]:
            print(f"{self.name_of(self.facts(item))}: {who}  ", end="\r", file=sys.stderr)
            time.sleep(PAUSE_S)
            return timers[who](REPEATS if number else 1)

        found = in_turn(
            {who: partial(turn, who) for who in self.asked(item)},
            self.args.rounds,
            lambda who, known: min(known[who]) <= SLOW_S,
        )
        few = problem.first(16)
        exact, results = few.reference(), {"torch": few.eager()}
        if "ours" in found:
            out = torch.from_dlpack(self.machines["ours"][self.function](*args))
            results["ours"] = out[0, : len(exact)]
        errors = {who: error_of(out, exact) for who, out in results.items()}
        allowed = allowed_error(errors["torch"], dtype)
        return {
            "seconds": {who: min(s) for who, s in found.items()},
            "median_seconds": {who: statistics.median(s) for who, s in found.items()},
            "errors": errors,
            "wrong": [who for who in errors if who != "torch" and not errors[who] <= allowed],
        }

    # --- what is said ----------------------------------------------------------------------

    def intro(self, record: Entry) -> str:
        peak, read = record.get("peak_gflops", 0.0), record.get("read_gbytes_per_s", 0.0)
        return (
            f"{record['cores_used']} cores reach {peak:.0f} Gflop/s of multiply-adds and read "
            f"{read:.1f} GB/s from memory.  Least times; in brackets, theirs over ours.  More than "
            "all of the memory bandwidth: the weights stay in the third-level cache."
        )

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        taken = entry["seconds"]
        names, ours = map(str, self.key_of(entry)), taken.get("ours")
        if ours is None:
            times = {who: format_seconds(s) for who, s in taken.items()}
            return *names, "", "", "", *(times.get(who, "") for who in LABELS)
        speeds = 1e-3 * record["read_gbytes_per_s"], 1e-3 * record["peak_gflops"]
        bound = [floor_us(*what, *speeds) for what in ((entry["bytes"], 0), (0, entry["flops"]))]
        part = f"{1e-6 * max(bound) / ours:.0%} {'memory' if bound[0] > bound[1] else 'FMA'}"
        theirs = {w: f"{format_seconds(s)} ({s / ours:.3g}x)" for w, s in taken.items()}
        rate = f"{entry['flops'] / ours * 1e-9:.0f}"
        return *names, format_seconds(ours), rate, part, *(theirs.get(w, "") for w in LABELS)

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        taken, goals = entry["seconds"], dict.fromkeys(("tvm", "mlc"), TVM_GOALS.get(entry["rows"]))
        goals["torch"] = TORCH_GOAL if entry["dtype"] == "float32" else None
        return [
            (self.name_of(entry), f"vs {LABELS[who]}", goal, taken[who] / taken["ours"])
            for who, goal in goals.items()
            if goal is not None and {who, "ours"} <= set(taken)
        ]


def mlc_pipeline(target: tvm.target.Target) -> tvm.ir.transform.Pass:
    """Return the passes that MLC-LLM runs for a CPU, from legalisation on."""
    passes = [getattr(relax.transform, name)() for name in LOWERING]
    schedules = dl.ApplyDefaultSchedule(dl.cpu.GEMV())
    return tvm.transform.Sequential([*passes, schedules, relax.get_default_pipeline(target)])


def machine(mod: ir.IRModule, target: Any, passes: Any) -> relax.VirtualMachine:
    with target:
        executable = tvm.compile(mod, target=target, relax_pipeline=passes)
    return relax.VirtualMachine(executable, tvm.cpu())


def torch_timer(call: Callable[[], Any]) -> Callable[[int], list[float]]:
    return lambda repeats: [timed(call)[1] for _ in range(repeats)]


def vm_timer(
    vm: relax.VirtualMachine, function: str, args: list[Any]
) -> Callable[[int], list[float]]:
    timer = vm.time_evaluator(function, tvm.cpu(), number=1, repeat=REPEATS)

    def run(repeats: int) -> list[float]:
        if repeats == 1:  # the first round: no warm-up run, which would double a slow one
            return [timed(lambda: vm[function](*args))[1]]
        return list(timer(*args).results)

    return run
