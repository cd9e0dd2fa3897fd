"""Chains of matmuls in float32 as one kernel, and apart, on this CPU, in one run.

    python -m benchmarks run cpu_chains [--cases G5 G8] [--random 8] [--rounds 20]

G1 to G12 of MCFuser (SC'24), adapters of several middles and numbers of rows, blocks of models, and
random chains.  "apart" has no chains: matmuls with what stands around them; "fused" fuses whether
that pays or not; "chosen" fuses where the estimator expects a gain.  Contenders take turns, and the
least time counts: what else runs on a machine only adds.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tvm
from tvm import relax

from benchmarks.cpu_timing import peak_gflops, pin_threads
from benchmarks.gpu_timing import allowed_error, error_of
from benchmarks.report import Entry
from benchmarks.suite import done
from benchmarks.suites.chains.cases import NAMED, Adapter, Case, case_of, export
from benchmarks.suites.chains.suite import PASSES, OfChains, gains
from benchmarks.suites.cpu import vm_timer
from relax_fusion import Report, host_target
from relax_fusion.models.threads import thread_count, use_all_cores
from relax_fusion.timing import in_turn

WIDTH = 768

ADAPTERS = {
    f"adapter of {rank} in {WIDTH}, {rows} rows": Case(
        partial(Adapter, WIDTH, rank), ((rows, WIDTH), (rows, WIDTH))
    )
    for rank in (16, 32, 64, 128)
    for rows in (1, 16, 64, 128, 256, 512)
}

BLOCKS = (
    *("tokens of Mixer-B/32, 16 images", "MLP of ViT-Ti/16, 8 images"),
    *("three layers of 64, 65536 rows", "three layers of 128, 8192 rows"),
    *("norms between 256, 4096 rows", "adapter of 64 in 768, 2048 rows"),
    *("bottleneck of 64 in 768, 1024 rows", "memory of 64 in 512, 4096 rows"),
)

CASES = {name: NAMED[name] for name in (*(f"G{n}" for n in range(1, 13)), *BLOCKS)} | ADAPTERS

WAYS = ("apart", "fused", "chosen")

PAUSE_S = 0.02
"""Before each turn, for the threads of the contender before it to stop waiting for work."""

REPEATS = 4


@dataclass
class Compiled:
    """A chain by one of the ways, and the passes whose kernels it has."""

    machine: relax.VirtualMachine
    kernels: list[str]


class CpuChains(OfChains):
    """Chains in float32; ours may err twice as much as torch."""

    name, device = "bench_cpu_chains", "cpu"
    has_target = False
    cases = tuple(CASES)
    contenders = usual = ours = WAYS
    head = ("chain", "apart, us", "Gflop/s", "fused", "chosen", "chosen: kernels of")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        super().options(parser)
        parser.add_argument("--rounds", type=int, default=20, help="turns of each contender")

    def begin(self) -> None:
        use_all_cores()
        facts, cores = self.session.facts, thread_count()
        self.target = host_target()  # which counts the cores that this thread may use
        peak_gflops(cores)  # starts TVM's threads
        pin_threads()
        facts |= {"cores_used": cores, "peak_gflops": peak_gflops(cores)}
        torch.set_num_threads(cores)

    @torch.no_grad()
    def measured(self, item: str) -> Entry:
        """Return microseconds and errors of a chain."""
        case = replace(CASES.get(item) or case_of(item), dtype=torch.float32)
        module, mod, *operands = export(case)
        tensors = [tensor for some in operands for tensor in some]
        args = [tvm.runtime.tensor(t.numpy().copy()) for t in tensors]
        eager = module(*operands[0])
        exact = module.double()(*(t.double() for t in operands[0]))
        found = {way: compiled(mod, way, self.target) for way in self.asked(item)}

        def turn(way: str) -> Callable[[int], list[float]]:
            timer = vm_timer(found[way].machine, "main", args)

            def run(number: int) -> list[float]:
                time.sleep(PAUSE_S)
                return timer(REPEATS)

            return run

        taken = in_turn({way: turn(way) for way in found}, self.args.rounds)
        results = {way: each.machine["main"](*args)[0].numpy() for way, each in found.items()}
        errors = {way: error_of(torch.from_numpy(r.copy()), exact) for way, r in results.items()}
        allowed = allowed_error(error_of(eager, exact), "float32")
        return {
            "us": {way: 1e6 * min(each) for way, each in taken.items()},
            "errors": errors,
            "wrong": [way for way, error in errors.items() if not error <= allowed],
            "flops": flops_of(module, operands[0]),
            "kernels": found["chosen"].kernels if "chosen" in found else [],
        }

    def intro(self, record: Entry) -> str:
        peak, cores = record.get("peak_gflops", 0.0), record.get("cores_used", 0)
        said = f"{cores} cores, which reach {peak:.0f} Gflop/s of multiply-adds; least times."
        return f"{said}\n\n{gains(done(record))}"

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        us = entry["us"]
        apart = us.get("apart", float("nan"))
        ratios = (f"{apart / us[way]:.2f}" if way in us else "" for way in WAYS[1:])
        rate = f"{1e-3 * entry['flops'] / apart:.0f}"
        return entry["case"], f"{apart:.1f}", rate, *ratios, ", ".join(entry["kernels"])

    def summary(self, record: Entry) -> str:
        return gains(done(record))


def compiled(mod: tvm.ir.IRModule, way: str, target: tvm.target.Target) -> Compiled:
    """Compile a chain for this CPU."""
    report = Report()
    options: dict[str, Any] = {}
    if way != "chosen":
        options = {"disable": PASSES} if way == "apart" else {"always_fuse": True}
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report, **options)
    executable = tvm.compile(mod, target=target, relax_pipeline=pipeline)
    kernels = sorted({d.pattern for d in report.decisions if d.fused})
    return Compiled(relax.VirtualMachine(executable, tvm.cpu()), kernels)


def flops_of(module: torch.nn.Module, inputs: list[torch.Tensor]) -> float:
    """Return the operations of the matmuls of a module."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(*(t.double() for t in inputs))
    return float(counter.get_total_flops())
