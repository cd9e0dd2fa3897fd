"""Fused kernels on a GPU: against the same chain left to TVM, and against the estimator.

The chains of a LLaMA layer, compiled for each number of rows with our passes and without, beside
what the estimator predicts of both.  It is the benchmark of the TIR kernels (``--backend tir``);
`matmul`, whose options it has, compares with other peers.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import ClassVar

from benchmarks.report import Entry
from benchmarks.suite import Suite
from benchmarks.suites.matmul.suite import Item, Matmul
from relax_fusion.estimator import format_seconds


class Layer(Matmul):
    """Ours by one back end, and TVM."""

    name, has_picture = "bench_layer", False
    cases = tuple(case for case in Matmul.cases if case != "ffn")
    case_options = ("--cases", "--chains")
    plain: ClassVar = {"backend": "", "dtype": "float16"}
    head = (
        *("size", "chain", "rows", "ours", "left to TVM", "ratio"),
        *("predicted fused", "predicted unfused"),
    )
    line, markdown = Suite.line, Suite.markdown

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        super().options(parser)
        parser.add_argument("--backend", default="triton", choices=("triton", "tir"))
        parser.set_defaults(sizes=["8b"], rows=[1, 16, 64, 256, 1024, 4096], static=True)

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        super().check(parser, args)
        args.tvm_rows, args.way = args.rows, "tir" if args.backend == "tir" else "ours"
        args.contenders = args.contenders or [args.way, "tvm"]

    kind, stem = Suite.kind, Suite.stem

    def measured(self, item: Item) -> Entry:
        found = super().measured(item)
        chain, rows = item
        compiled = self.built.get(self.job(chain, self.args.way, rows))
        return {**found, "predicted_s": compiled.predicted_s() if compiled else (0.0, 0.0)}

    def intro(self, record: Entry) -> str:
        return f"{record['gpu']}; medians of CUDA graph replays, L2 flushed before each."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        times = [entry["us"].get(name) for name in (self.args.way, "tvm")]
        cells = ["" if t is None else format_seconds(1e-6 * t) for t in times]
        cells.append("" if None in times else f"{times[1] / times[0]:.2f}")
        return *map(str, self.key_of(entry)), *cells, *map(format_seconds, entry["predicted_s"])
