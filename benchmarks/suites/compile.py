"""How long compiling LLaMA-3.1-8B for an H200 takes, and how much memory: no weights, no GPU.

It is the first compilation on a machine that is timed: kernels are kept in an empty directory, not
in the user's cache, so that each one is compiled.  The limit that we hold ourselves to is 20 s and
4 GB on 2 cores; of the processor's time, validation of every match (`--validate`) may take a tenth.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import tvm
from tvm import relax

import relax_fusion
from benchmarks.recording import markdown_table
from benchmarks.report import Entry, Verdict, targets_table
from benchmarks.suite import Suite
from relax_fusion import models
from relax_fusion.equivalence import Checker

LIMIT_S, LIMIT_GB, LIMIT_VALIDATION = 20.0, 4.0, 0.1


def timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return a function that notes the processor's seconds of each call."""

    def run(*args: Any) -> Any:
        start = time.process_time()
        try:
            return call(*args)
        finally:
            spent.append(time.process_time() - start)

    return run


@contextmanager
def empty_cache() -> Iterator[None]:
    """Keep compiled kernels in a directory of its own, which is removed afterwards."""
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.dict(os.environ, RELAX_FUSION_CACHE_DIR=directory),
    ):
        yield


class Compile(Suite):
    """One compilation, from the export on."""

    name = "bench_compile"
    key = axes = ("model",)
    plain: ClassVar = {"validate": "", "max_seq_len": 4096}
    must_reach = True

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add, every = parser.add_argument, "check every match"
        add("--model", nargs=1, default=["llama-3.1-8b"], help="a bundled configuration")
        add("--max-seq-len", type=int, default=4096)
        add("--validate", action="store_const", const="validate", default="", help=every)

    def begin(self) -> None:
        self.checks: list[float] = []
        Checker.check = timed(Checker.check, self.checks)  # type: ignore[method-assign]

    @empty_cache()
    def measured(self, item: tuple[str]) -> Entry:
        stages: list[tuple[str, float]] = []
        start, cpu_start = time.perf_counter(), time.process_time()

        def stage(name: str) -> None:
            stages.append((name, time.perf_counter() - start))
            print(f"[{stages[-1][1]:6.1f} s] {name}", file=sys.stderr, flush=True)

        stage("exporting")
        config = models.zoo_config(*item)
        exported = models.export(config, dtype="float16", max_seq_len=self.args.max_seq_len)
        report = relax_fusion.Report()
        target = relax_fusion.make_target(self.args.target)
        # Every chain is fused, whatever the estimator thinks of it: that is the most work there is.
        pipeline = relax.get_pipeline(
            "relax_fusion",
            target=target,
            report=report,
            progress=stage,
            always_fuse=True,
            validate=bool(self.args.validate),
        )
        tvm.compile(exported.mod, target=target, relax_pipeline=pipeline)
        total, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in kB, macOS in bytes
        ends = [at for _, at in stages[1:]] + [total]
        return {
            "total_s": total,
            "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9,
            "stages_s": {name: end - at for (name, at), end in zip(stages, ends, strict=True)},
            "fused": len(report.fused),
            "declined": len(report.declined),
            "cpu_s": cpu,
            "matches": len(self.checks),
            "validation_cpu_s": sum(self.checks),
        }

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        limits = {
            f"{LIMIT_S:.0f} s over its time": LIMIT_S / entry["total_s"],
            f"{LIMIT_GB:.0f} GB over its memory": LIMIT_GB / entry["peak_rss_gb"],
        }
        if record["validate"]:
            part = entry["validation_cpu_s"] / (entry["cpu_s"] - entry["validation_cpu_s"])
            limits[f"{LIMIT_VALIDATION:.0%} over validation's part"] = LIMIT_VALIDATION / max(
                part, 1e-9
            )
        return [(entry["model"], what, 1.0, measured) for what, measured in limits.items()]

    def line(self, entry: Entry, record: Entry) -> str:
        if "error" in entry:
            return super().line(entry, record)
        text = (
            f"{entry['model']}: {entry['total_s']:.1f} s, peak memory {entry['peak_rss_gb']:.2f} "
            f"GB. {entry['fused']} chains fused, {entry['declined']} left to TVM."
        )
        if record["validate"]:
            checks, rest = entry["validation_cpu_s"], entry["cpu_s"] - entry["validation_cpu_s"]
            text += (
                f" Validation of {entry['matches']} matches: {checks:.2f} s of the processor, "
                f"{checks / rest:.1%} of the {rest:.1f} s of everything else (time of compilers in "
                "other processes is not counted)."
            )
        return text

    def markdown(self, record: Entry) -> str:
        parts = [f"float16, for {record['target']}; the last stage includes code generation."]
        for e in record["cases"]:
            stages = [(name, f"{s:.2f}") for name, s in e.get("stages_s", {}).items()]
            parts += [self.line(e, record), markdown_table([("stage", "seconds"), *stages])]
        return "\n\n".join([*parts, targets_table(self.verdicts(record))])
