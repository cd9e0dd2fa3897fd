"""``relax-fusion demo``: TVM's pipeline and ours, side by side, with nothing but the install."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..estimator import format_seconds
from ..hardware.target import device_of, host_target, make_target
from ..models import Config, ExportedModel, export, random_weights, zoo_config
from ..models.threads import use_all_cores
from ..report import Report
from ..report.tables import table
from .build import build, build_default, cuda_kernels
from .console import Console
from .explain import summary
from .measure import Plan, Run, compare, measure, timed

PROMPT = 16
"""Prompt tokens: TVM's default pipeline needs about a second for each on two cores."""

OURS = Plan(PROMPT, decode_steps=8, prefill_runs=5)
THEIRS = Plan(PROMPT, decode_steps=3, prefill_runs=1, warm=False)
"""Runs of seconds need neither repetition nor warming up."""


@dataclass(frozen=True)
class Comparison:
    """One model, compiled twice."""

    name: str
    report: Report
    default: Run
    fused: Run
    worst: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether no logit differs by more than rounding can explain."""
        return self.worst <= self.tolerance  # false for NaN as well

    @property
    def record(self) -> dict[str, Any]:
        """The comparison as JSON."""
        runs = {"tvm_default": self.default, "relax_fusion": self.fused}
        return {
            "model": self.name,
            "agrees": self.agrees,
            "largest_difference": self.worst,
            "tolerance": self.tolerance,
            "prompt_tokens": PROMPT,
            "prefill_s": {name: run.prefill for name, run in runs.items()},
            "decode_s": {name: run.decode for name, run in runs.items()},
            "compile_s": {name: run.compile_s for name, run in runs.items()},
            **summary(self.report),
        }


def demo_command(args: argparse.Namespace, console: Console) -> int:
    """Compare on this machine, cross-compile for another, print a table."""
    use_all_cores()  # before TVM has made its threads
    start = time.perf_counter()
    device = device_of(host_target())
    console.step(f"this machine: {device.label}")
    comparisons = []
    for name in ("demo-llama", "demo-gpt2"):
        comparison = _compare(name, _config(name, args.quick), console)
        comparisons.append(comparison)
        if not args.json:
            console.result(_agreement(comparison))
    cross = _cross_compile(_config("demo-llama", args.quick), console)
    seconds = time.perf_counter() - start
    if args.json:
        models = [c.record for c in comparisons]
        console.json({"models": models, "cross_compile": cross, "seconds": round(seconds, 1)})
    else:
        console.result(_end(comparisons, cross, seconds))
    return 0 if all(c.agrees for c in comparisons) else 1


def _config(name: str, quick: bool) -> Config:
    config = zoo_config(name)
    if not quick:
        return config
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
    sizes |= {"num_heads": 4, "num_layers": 1}
    if config.family == "llama":
        sizes |= {"num_kv_heads": 2}
    return replace(config, **sizes)


def _compare(name: str, config: Config, console: Console) -> Comparison:
    """Compile a model in both ways and run both with the same weights and tokens."""
    target = host_target()
    exported = export(config, max_seq_len=128)
    count = sum(prod(param.shape) for param in exported.params)
    console.step(f"{name}: making {count / 1e6:.0f} M random weights")
    weights = random_weights(exported)
    console.step(f"{name}: compiling with TVM's default pipeline")
    executable, compile_s = timed(lambda: build_default(exported, target))
    console.step(f"{name}: running it (a naive loop; this is the slow part)")
    default = replace(measure(executable, exported, weights, THEIRS), compile_s=compile_s)
    console.step(f"{name}: compiling with relax_fusion")
    report = Report()
    executable, compile_s = timed(lambda: build(exported, target, report=report))
    console.step(f"{name}: running it")
    fused = replace(measure(executable, exported, weights, OURS), compile_s=compile_s)
    worst, tolerance = compare(default.logits, fused.logits, exported)
    return Comparison(name, report, default, fused, worst, tolerance)


def _cross_compile(config: Config, console: Console) -> dict[str, Any]:
    """Compile for a GPU that need not be here."""
    console.step("demo-llama: cross-compiling for H200, float16")
    exported: ExportedModel = export(config, dtype="float16", max_seq_len=1024)
    report = Report()
    target = make_target("h200")
    executable, seconds = timed(lambda: build(exported, target, report=report))
    kernels = cuda_kernels(executable)
    return {
        "model": "demo-llama",
        "target": "h200",
        "arch": str(target.attrs["arch"]),
        "seconds": round(seconds, 2),
        "cuda_kernels": len(kernels),
        "functions": list(exported.functions),
        **summary(report),
    }


def _agreement(c: Comparison) -> str:
    verdict = "agree" if c.agrees else "DISAGREE"
    return (
        f"\n{c.name}: what was fused\n\n{c.report.text()}\n\n"
        f"{c.name}: outputs {verdict}: the logits differ by at most {c.worst:.1e}; rounding "
        f"explains up to {c.tolerance:.1e}\n"
    )


def _end(comparisons: list[Comparison], cross: dict[str, Any], seconds: float) -> str:
    rows: list[tuple[str, ...]] = [("model", "step", "TVM default", "relax_fusion", "speed-up")]
    for c in comparisons:
        for step, theirs, ours in (
            (f"prefill, {PROMPT} tokens", c.default.prefill, c.fused.prefill),
            ("decode, per token", c.default.decode, c.fused.decode),
        ):
            times = (format_seconds(theirs), format_seconds(ours))
            rows.append((c.name, step, *times, f"{theirs / ours:.0f}x"))
    fused = sum(cross["fused"].values())
    return (
        f"\n{table(rows)}\n\n"
        f"Cross-compiled {cross['model']} (float16) for an H200 in {cross['seconds']:.1f} s, "
        f"without a GPU: {' and '.join(cross['functions'])},\n{cross['cuda_kernels']} CUDA kernels "
        f"for {cross['arch']}, with {fused} chains fused "
        "(relax-fusion explain demo-llama --target h200).\n"
        f"All of it took {seconds:.0f} s."
    )
