"""How long compiling LLaMA-3.1-8B for an H200 takes, and how much memory: no weights, no GPU.

The limit that we hold ourselves to is 30 s and 4 GB on 2 cores.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import _record
import tvm
from tvm import relax

import relax_fusion
from relax_fusion import models

LIMIT_S, LIMIT_GB = 30.0, 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a bundled configuration")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--results", type=Path, default=_record.RESULTS, help="directory to write")
    args = parser.parse_args()

    stages: list[tuple[str, float]] = []
    start = time.perf_counter()

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
        "relax_fusion", target=target, report=report, progress=stage, always_fuse=True
    )
    compiled = tvm.compile(exported.mod, target=target, relax_pipeline=pipeline)
    total = time.perf_counter() - start
    del compiled
    # Linux counts in kB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

    ends = [at for _, at in stages[1:]] + [total]
    seconds = {name: end - at for (name, at), end in zip(stages, ends, strict=True)}
    record = {
        **_record.facts(),
        "model": args.model,
        "target": args.target,
        "total_s": total,
        "peak_rss_gb": peak_gb,
        "stages_s": seconds,
        "fused": len(report.fused),
        "declined": len(report.declined),
    }
    rows = [("stage", "seconds")]
    rows += [(name, f"{value:.2f}") for name, value in seconds.items()]
    rows.append(("**total**", f"**{total:.1f}** (limit {LIMIT_S:.0f})"))
    text = (
        f"{args.model}, float16, for {args.target}; the last stage includes code generation.\n\n"
        f"{_record.markdown_table(rows)}\n\n"
        f"Peak memory {peak_gb:.2f} GB (limit {LIMIT_GB:.0f} GB). "
        f"{len(report.fused)} chains fused, {len(report.declined)} left to TVM."
    )
    files = _record.write("bench_compile", record, text, args.results)
    print(text)
    print("wrote", *(file.name for file in files), file=sys.stderr)
    return 0 if total <= LIMIT_S and peak_gb <= LIMIT_GB else 1


if __name__ == "__main__":
    sys.exit(main())
