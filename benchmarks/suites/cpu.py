"""Norm, matmul and epilogue on this CPU: ours against TVM, MLC-LLM's pipeline and torch.

    python scripts/bench_cpu.py [--models llama-3.2-1b gpt2] [--rows 1 16 128 512] [--rounds 5]

All in one run.  Every contender has a thread per core, kept on its core, and takes its turn in
every round.  The least of the times counts: what else runs on a machine only adds.  Results are
compared with float64 in the same run.  Beside the times stand the machine's rate of multiply-adds
and its memory bandwidth, both measured, and which part of the nearer one we reach.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.cpu_timing import peak_gflops, pin_threads, read_gbytes_per_s, use_all_cores

CORES = use_all_cores()

import torch  # noqa: E402
import tvm  # noqa: E402
from tvm import ir, relax  # noqa: E402
from tvm.s_tir import dlight as dl  # noqa: E402

from benchmarks.suites.cpu_chains import Chain, chains, error_of, inputs_of, module_of, torch_call  # noqa: E402
from relax_fusion import host_target  # noqa: E402
from relax_fusion.estimator import format_seconds  # noqa: E402

GOALS = {"tvm": {1: 3.0, 128: 50.0, 512: 50.0}, "torch": 0.6}
"""Least ratios: against both pipelines of TVM by rows, and against torch in float32."""

TVM_FLOPS = {"llama-3.1-8b": 5e9}
"""Work beyond which TVM's pipelines, at half a Gflop/s, are not waited for; others are."""

SLOW_S = 0.3
"""What takes longer is timed once, and once only."""

PAUSE_S = 0.25
"""Before each turn, for the threads of the contender before it to stop waiting for work."""

REPEATS = 5


@dataclass
class Case:
    """One chain at one number of rows: seconds and errors by contender."""

    chain: Chain
    rows: int
    dtype: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def best(self, who: str) -> float:
        return min(self.seconds[who])

    def ratio(self, who: str) -> float | None:
        return self.best(who) / self.best("ours") if who in self.seconds else None

    def goal(self, who: str) -> float | None:
        if who == "torch":
            return GOALS["torch"] if self.dtype == "float32" else None
        return GOALS["tvm"].get(self.rows)


def mlc_pipeline(target: tvm.target.Target) -> tvm.ir.transform.Pass:
    """Return the passes that MLC-LLM runs for a CPU, from legalisation on."""
    return tvm.transform.Sequential(
        [
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
            dl.ApplyDefaultSchedule(dl.cpu.GEMV()),
            relax.get_default_pipeline(target),
        ]
    )


def compile_all(chain: Chain, dtype: str, rows: list[int]) -> dict[str, relax.VirtualMachine]:
    """Return a virtual machine for each pipeline that will be timed."""
    mod, _ = module_of(chain, dtype)
    target = host_target()
    pipelines: dict[str, Any] = {"ours": relax.get_pipeline("relax_fusion", target=target)}
    if dtype == "float32" and any(waits_for_tvm(chain, n) for n in rows):
        pipelines |= {"tvm": relax.get_default_pipeline(target), "mlc": mlc_pipeline(target)}
    return {who: machine(mod, target, passes) for who, passes in pipelines.items()}


def waits_for_tvm(chain: Chain, rows: int) -> bool:
    return chain.flops(rows) <= TVM_FLOPS.get(chain.model, float("inf"))


def machine(mod: ir.IRModule, target: Any, passes: Any) -> relax.VirtualMachine:
    with target:
        executable = tvm.compile(mod, target=target, relax_pipeline=passes)
    return relax.VirtualMachine(executable, tvm.cpu())


def measure(case: Case, machines: dict[str, relax.VirtualMachine], rounds: int) -> None:
    """Time every contender in turn, round after round."""
    given = inputs_of(case.chain, case.rows, case.dtype)
    args = [tvm.runtime.from_dlpack(t) for t in given.values()]
    timers: dict[str, Callable[[int], list[float]]] = {"torch": torch_timer(case.chain, given)}
    for who, vm in machines.items():
        if who == "ours" or waits_for_tvm(case.chain, case.rows):
            timers[who] = vm_timer(vm, args)
    for number in range(rounds):
        for who, timer in timers.items():
            known = case.seconds.setdefault(who, [])
            if known and min(known) > SLOW_S:
                continue
            print(f"{label(case)}: {who}, round {number + 1}  ", end="\r", file=sys.stderr)
            time.sleep(PAUSE_S)
            known += timer(REPEATS if number else 1)
    check(case, machines["ours"], args, given)


def torch_timer(chain: Chain, given: dict[str, torch.Tensor]) -> Callable[[int], list[float]]:
    call = torch_call(chain, given)

    def run(repeats: int) -> list[float]:
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        return found

    return run


def vm_timer(vm: relax.VirtualMachine, args: list[Any]) -> Callable[[int], list[float]]:
    timer: dict[int, Any] = {}

    def run(repeats: int) -> list[float]:
        if repeats == 1:  # the first round: no warm-up run, which would double a slow one
            began = time.perf_counter()
            vm["forward"](*args)
            return [time.perf_counter() - began]
        if repeats not in timer:
            timer[repeats] = vm.time_evaluator("forward", tvm.cpu(), number=1, repeat=repeats)
        return list(timer[repeats](*args).results)

    return run


def check(case: Case, vm: relax.VirtualMachine, args: list[Any], given: dict[str, Any]) -> None:
    """Compare with float64, at few rows of many."""
    exact = torch_call(case.chain, {name: t.double() for name, t in first_rows(given).items()})()
    ours = torch.from_dlpack(vm["forward"](*args))[: len(exact)]
    theirs = torch_call(case.chain, first_rows(given))()
    for who, result in (("ours", ours), ("torch", theirs)):
        case.errors[who] = error_of(result.float().numpy(), exact)
    step = float(exact.abs().max()) * torch.finfo(theirs.dtype).eps
    if case.errors["ours"] > 2 * case.errors["torch"] + step:
        raise SystemExit(f"{label(case)}: wrong results, errors {case.errors}")


def first_rows(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep 16 rows of x and the residual."""
    return {k: t[:16] if k in ("x", "residual") else t for k, t in given.items()}


def label(case: Case) -> str:
    return f"{case.chain.model} {case.chain.label} {case.dtype}, {case.rows} rows"


def reached(case: Case, limits: dict[str, float]) -> tuple[str, float]:
    """Return the nearer limit, compute or memory, and the part of it that we reach."""
    compute = case.chain.flops(case.rows) / limits["peak_gflops"] * 1e-9
    memory = case.chain.weight_bytes(case.dtype) / limits["read_gbytes_per_s"] * 1e-9
    bound = "memory" if memory > compute else "FMA"
    return bound, max(compute, memory) / case.best("ours")


def as_markdown(cases: list[Case], limits: dict[str, float]) -> str:
    head = ("model", "chain", "dtype", "rows", "ours", "Gflop/s", "part of", "TVM default", "MLC")
    table: list[tuple[str, ...]] = [(*head, "torch", "goals")]
    for case in cases:
        bound, part = reached(case, limits)
        rate = case.chain.flops(case.rows) / case.best("ours") * 1e-9
        times = [ratio_text(case, who) for who in ("tvm", "mlc", "torch")]
        table.append(
            (
                *(case.chain.model, case.chain.label, case.dtype, str(case.rows)),
                *(format_seconds(case.best("ours")), f"{rate:.0f}", f"{part:.0%} {bound}"),
                *times,
                verdict(case),
            )
        )
    peak, read = limits["peak_gflops"], limits["read_gbytes_per_s"]
    return (
        f"{CORES} cores reach {peak:.0f} Gflop/s of multiply-adds and read {read:.1f} GB/s from "
        "memory.  Least times; in brackets, theirs over ours.  More than all of the memory "
        "bandwidth: the weights stay in the third-level cache.\n\n"
        f"{recording.markdown_table(table)}"
    )


def ratio_text(case: Case, who: str) -> str:
    ratio = case.ratio(who)
    return "" if ratio is None else f"{format_seconds(case.best(who))} ({ratio:.3g}x)"


def verdict(case: Case) -> str:
    """Say which goals were missed."""
    goals = {who: case.goal(who) for who in ("tvm", "mlc", "torch") if who in case.seconds}
    asked = {who: goal for who, goal in goals.items() if goal is not None}
    missed = [f"{who} {goal}x" for who, goal in asked.items() if (case.ratio(who) or 0) < goal]
    return "" if not asked else "missed: " + ", ".join(missed) if missed else "reached"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "gpt2", "llama-3.1-8b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128, 512])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--results", type=Path, default=recording.RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(CORES)
    torch_warm_up()
    facts, cases = recording.facts(), []
    limits = {"peak_gflops": 0.0, "read_gbytes_per_s": 0.0}
    for dtype in args.dtypes:
        for chain in chains(args.models):
            if dtype != "float32" and chain.model != args.models[0]:
                continue
            machines = compile_all(chain, dtype, args.rows)
            if not limits["peak_gflops"]:
                peak_gflops(CORES)  # starts TVM's threads
                pin_threads()
            limits["peak_gflops"] = max(limits["peak_gflops"], peak_gflops(CORES))
            limits["read_gbytes_per_s"] = max(limits["read_gbytes_per_s"], read_gbytes_per_s(CORES))
            for rows in args.rows:
                case = Case(chain, rows, dtype)
                measure(case, machines, args.rounds)
                cases.append(case)
    record = {
        **facts,
        "cores_used": CORES,
        **limits,
        "cases": [as_record(c, limits) for c in cases],
    }
    text = as_markdown(cases, limits)
    files = recording.write("bench_cpu", record, text, args.results)
    print(text)
    print("wrote " + " ".join(file.name for file in files), file=sys.stderr)
    return 0 if not any(verdict(case).startswith("missed") for case in cases) else 1


def torch_warm_up() -> None:
    """Start torch's threads, before they are pinned."""
    x = torch.ones(256, 512)
    x @ x.T


def as_record(case: Case, limits: dict[str, float]) -> dict[str, Any]:
    bound, part = reached(case, limits)
    return {
        "model": case.chain.model,
        "chain": case.chain.label,
        "dtype": case.dtype,
        "rows": case.rows,
        "seconds": {who: min(s) for who, s in case.seconds.items()},
        "median_seconds": {who: statistics.median(s) for who, s in case.seconds.items()},
        "part": part,
        "bound": bound,
        "errors": case.errors,
    }


if __name__ == "__main__":
    sys.exit(main())
