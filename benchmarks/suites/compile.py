"""How long compiling LLaMA-3.1-8B for an H200 takes, and how much memory: no weights, no GPU.

The limit that we hold ourselves to is 30 s and 4 GB on 2 cores; of the processor's time, validation
of every match (`--validate`) may take a tenth.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

import relax_fusion
from benchmarks import recording
from relax_fusion import models
from relax_fusion.equivalence import Checker

LIMIT_S, LIMIT_GB, LIMIT_VALIDATION = 30.0, 4.0, 0.1


def timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return a function that notes the processor's seconds of each call."""

    def run(*args: Any) -> Any:
        start = time.process_time()
        try:
            return call(*args)
        finally:
            spent.append(time.process_time() - start)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a bundled configuration")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--validate", action="store_true", help="check every match")
    parser.add_argument("--results", type=Path, default=recording.RESULTS)
    args = parser.parse_args()

    stages: list[tuple[str, float]] = []
    checks: list[float] = []
    Checker.check = timed(Checker.check, checks)  # type: ignore[method-assign]
    start, cpu_start = time.perf_counter(), time.process_time()

    def stage(name: str) -> None:
        stages.append((name, time.perf_counter() - start))
        print(f"[{stages[-1][1]:6.1f} s] {name}", file=sys.stderr, flush=True)

    stage("exporting")
    config = models.zoo_config(args.model)
    exported = models.export(config, dtype="float16", max_seq_len=args.max_seq_len)
    report = relax_fusion.Report()
    target = relax_fusion.make_target(args.target)
    # Every chain is fused, whatever the estimator thinks of it: that is the most work there is.
    pipeline = relax.get_pipeline(
        "relax_fusion",
        target=target,
        report=report,
        progress=stage,
        always_fuse=True,
        validate=args.validate,
    )
    compiled = tvm.compile(exported.mod, target=target, relax_pipeline=pipeline)
    total, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    del compiled
    # Linux counts in kB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

    ends = [at for _, at in stages[1:]] + [total]
    seconds = {name: end - at for (name, at), end in zip(stages, ends, strict=True)}
    record = {
        **recording.facts(),
        "model": args.model,
        "target": args.target,
        "total_s": total,
        "peak_rss_gb": peak_gb,
        "stages_s": seconds,
        "fused": len(report.fused),
        "declined": len(report.declined),
        "cpu_s": cpu,
        "validation_cpu_s": sum(checks),
    }
    rows = [("stage", "seconds")]
    rows += [(name, f"{value:.2f}") for name, value in seconds.items()]
    rows.append(("**total**", f"**{total:.1f}** (limit {LIMIT_S:.0f})"))
    text = (
        f"{args.model}, float16, for {args.target}; the last stage includes code generation.\n\n"
        f"{recording.markdown_table(rows)}\n\n"
        f"Peak memory {peak_gb:.2f} GB (limit {LIMIT_GB:.0f} GB). "
        f"{len(report.fused)} chains fused, {len(report.declined)} left to TVM."
    )
    share = sum(checks) / (cpu - sum(checks))
    if args.validate:
        text += (
            f"\n\nValidation of {len(checks)} matches: {sum(checks):.2f} s of the processor, "
            f"{share:.1%} of the {cpu - sum(checks):.1f} s of everything else "
            f"(limit {LIMIT_VALIDATION:.0%}; time of compilers in other processes is not counted)."
        )
    name = "bench_compile-validate" if args.validate else "bench_compile"
    files = recording.write(name, record, text, args.results)
    print(text)
    print("wrote", *(file.name for file in files), file=sys.stderr)
    reached = total <= LIMIT_S and peak_gb <= LIMIT_GB and share <= LIMIT_VALIDATION
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
