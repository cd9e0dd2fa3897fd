"""Norm, matmul and epilogue on this CPU: ours against TVM, MLC-LLM's pipeline and torch.

    python -m benchmarks run cpu [--models llama-3.2-1b gpt2] [--rows 1 16 128 512] [--rounds 5]

All in one run.  Every contender has a thread per core, kept on its core, and takes its turn in
every round.  The least of the times counts: what else runs on a machine only adds.  Results are
compared with float64 in the same run.  Beside the times stand the machine's rate of multiply-adds
and its memory bandwidth, both measured, and which part of the nearer one we reach.
"""

from __future__ import annotations

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
from benchmarks.cpu_timing import peak_gflops, pin_threads, read_gbytes_per_s, use_all_cores
from benchmarks.host_timing import in_turn, seconds
from benchmarks.report import Verdict
from benchmarks.runner import Entry, Suite
from benchmarks.suites.cpu_chains import Chain, chains, error_of, inputs_of, module_of, torch_call
from benchmarks.targets import floor_us
from relax_fusion import host_target
from relax_fusion.estimator import format_seconds

TVM_GOALS, TORCH_GOAL = {1: 3.0, 128: 50.0, 512: 50.0}, 0.6
"""Least ratios: against both pipelines of TVM by rows, and against torch in float32."""

TVM_FLOPS = {"llama-3.1-8b": 5e9}
"""Work beyond which TVM's pipelines, at half a Gflop/s, are not waited for; others are."""

SLOW_S = 0.3
"""What takes longer is timed once, and once only."""

PAUSE_S = 0.25
"""Before each turn, for the threads of the contender before it to stop waiting for work."""

REPEATS = 5

LABELS = {"tvm": "TVM default", "mlc": "MLC", "torch": "torch"}

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
        add("--models", nargs="+", default=["llama-3.2-1b", "gpt2", "llama-3.1-8b"])
        add("--rows", type=int, nargs="+", default=[1, 4, 16, 128, 512])
        add("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
        add("--rounds", type=int, default=6)

    def begin(self) -> None:
        self.cores = self.session.facts["cores_used"] = use_all_cores()
        torch.set_num_threads(self.cores)
        torch.ones(256, 512) @ torch.ones(512, 256)  # starts torch's threads, before they are put
        self.compiled: tuple[Any, dict[str, relax.VirtualMachine]] = None, {}

    def items(self) -> Iterator[Item]:
        for dtype in self.args.dtypes:
            for chain in chains(self.args.models):
                if dtype == "float32" or chain.model == self.args.models[0]:
                    yield from ((chain, dtype, rows) for rows in self.args.rows)

    def facts(self, item: Item) -> Entry:
        chain, dtype, rows = item
        return {
            **dict(zip(self.key, (chain.model, chain.label, dtype, rows), strict=True)),
            "flops": chain.flops(rows),
            "bytes": chain.weight_bytes(dtype),
        }

    def absent(self, item: Item) -> tuple[str, ...]:
        chain, dtype, rows = item
        waits = dtype == "float32" and chain.flops(rows) <= TVM_FLOPS.get(chain.model, float("inf"))
        return () if waits else ("tvm", "mlc")

    def is_complete(self, entry: Entry, item: Item) -> bool:
        return "error" not in entry and set(self.asked(item)) <= set(entry["seconds"])

    def machines(self, chain: Chain, dtype: str) -> dict[str, relax.VirtualMachine]:
        """Return a virtual machine for each pipeline; see what this CPU can do meanwhile."""
        if self.compiled[0] != (chain, dtype):
            mod, target = module_of(chain, dtype)[0], host_target()
            every = {who for rows in self.args.rows for who in self.asked((chain, dtype, rows))}
            pipelines: dict[str, Any] = {
                "ours": relax.get_pipeline("relax_fusion", target=target),
                "tvm": relax.get_default_pipeline(target),
                "mlc": mlc_pipeline(target),
            }
            made = {
                w: machine(mod, target, passes) for w, passes in pipelines.items() if w in every
            }
            self.compiled = (chain, dtype), made
            self.measure_limits()
        return self.compiled[1]

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
        machines = self.machines(chain, dtype)
        given = inputs_of(chain, rows, dtype)
        args = [tvm.runtime.from_dlpack(t) for t in given.values()]
        timers = {
            who: torch_timer(torch_call(chain, given))
            if who == "torch"
            else vm_timer(machines[who], args)
            for who in self.asked(item)
        }

        def turn(who: str, number: int) -> list[float]:
            print(f"{self.name_of(self.facts(item))}: {who}  ", end="\r", file=sys.stderr)
            time.sleep(PAUSE_S)
            return timers[who](REPEATS if number else 1)

        found = in_turn(
            {who: partial(turn, who) for who in timers},
            self.args.rounds,
            lambda who, known: min(known[who]) <= SLOW_S,
        )
        errors, allowed = errors_of(chain, machines, args, given)
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
    return lambda repeats: [seconds(call) for _ in range(repeats)]


def vm_timer(vm: relax.VirtualMachine, args: list[Any]) -> Callable[[int], list[float]]:
    timer = vm.time_evaluator("forward", tvm.cpu(), number=1, repeat=REPEATS)

    def run(repeats: int) -> list[float]:
        if repeats == 1:  # the first round: no warm-up run, which would double a slow one
            return [seconds(lambda: vm["forward"](*args))]
        return list(timer(*args).results)

    return run


def errors_of(
    chain: Chain, machines: dict[str, Any], args: list[Any], given: dict[str, Any]
) -> tuple[dict[str, float], float]:
    """Return the errors of ours and torch at 16 rows, and what is allowed."""
    few = {k: t[:16] if k in ("x", "residual") else t for k, t in given.items()}
    exact = torch_call(chain, {name: t.double() for name, t in few.items()})()
    found = {"torch": torch_call(chain, few)()}
    if "ours" in machines:
        found["ours"] = torch.from_dlpack(machines["ours"]["forward"](*args))[: len(exact)]
    errors = {who: error_of(out.float().numpy(), exact) for who, out in found.items()}
    step = float(exact.abs().max()) * torch.finfo(found["torch"].dtype).eps
    return errors, 2 * errors["torch"] + step
