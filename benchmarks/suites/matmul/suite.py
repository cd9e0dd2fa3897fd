"""Norm -> matmul, gated FFN and plain matmul on an NVIDIA GPU, ours against peers, in one run.

    python -m benchmarks run matmul                    # everything; half an hour with torch.compile
    python -m benchmarks run matmul --sizes 8b --cases qkv --seconds 500
    python -m benchmarks run matmul --resume DATE-bench_matmul.json   # what is missing there
    python -m benchmarks plot DATE-bench_matmul.json                  # the picture, without a GPU

Contenders: ours through TVM's VM; ours with the norm and silu * up as kernels of their own; ours
with separate weights, without Triton, by TIR, and by both (if asked for: --contenders ours separate
tir triton cublas); with --quantization also TVM's kernels as MLC-LLM chooses them; PyTorch
eager; torch.compile max-autotune; the bare matmuls by cuBLAS; TVM without our passes.  All compute
on the same tensors, are captured into CUDA graphs and timed in turn, L2 flushed before each sample.
Every result is compared with float64; the exit status is 1 if one of ours is wrong or fails. JSON
and Markdown are written after every case.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.report import Entry, Verdict
from benchmarks.runner import Suite
from benchmarks.suites.matmul import report
from benchmarks.suites.matmul.cases import (
    CASES,
    CONTENDERS,
    DTYPES,
    OURS,
    ROWS,
    SEPARABLE,
    SIZES,
    Chain,
)
from relax_fusion.quantization import QUANTIZATIONS

TVM_ROWS = (1, 16, 256, 1024)

Item = tuple[Chain, int]
"""A chain, and its rows."""


class Matmul(Suite):
    """The chains of `cases`, each at several numbers of rows."""

    name = "bench_matmul"
    device, has_picture = "gpu", True
    axes = ("sizes", "cases", "rows")
    plain: ClassVar = {"dtype": "float16", "rows": "symbolic", "quantization": ""}
    key = ("size", "case", "rows")
    cases, contenders, ours, dtypes = CASES, CONTENDERS, OURS, DTYPES
    usual = tuple(n for n in CONTENDERS if n not in ("separate", "tir", "triton"))

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
        add("--rows", type=int, nargs="+", default=list(ROWS))
        add("--tvm-rows", type=int, nargs="*", default=list(TVM_ROWS), help="rows to time TVM at")
        add("--quantization", default="", choices=("", *QUANTIZATIONS), help="of the weights")
        add("--static", action="store_true", help="compile ours for each row count")
        add("--no-compile", action="store_true", help="leave torch.compile out")

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        if min(args.rows, default=1) < 1:
            parser.error(f"--rows {min(args.rows)}: must be at least 1")

    def kind(self) -> Entry:
        kind = {"dtype": self.args.dtype, "rows": "static" if self.args.static else "symbolic"}
        return {**kind, "quantization": self.args.quantization}

    def stem(self, record: Entry) -> str:
        return super().stem(record) + ("-tir" if "tir" in (self.args.contenders or ()) else "")

    # --- what is measured ------------------------------------------------------------------

    def begin(self) -> None:
        from benchmarks.suites.matmul import ours, peers

        self.compiler, self.peers = ours, peers
        self.weights: Any = None
        self.built: dict[Any, Any] = {}

    def items(self) -> list[Item]:
        stored = self.args.quantization
        return [(Chain(case, size, stored), rows) for size, case, rows in super().items()]

    def facts(self, item: Item) -> Entry:
        chain, rows = item
        return {
            "size": chain.size,
            "case": chain.case,
            "rows": rows,
            "bytes": chain.bytes(rows),
            "flops": chain.flops(rows),
            "floor_us": chain.floor_us(rows, self.session.ceilings["copy_tb_s"]),
            **self.session.speeds,
        }

    def absent(self, item: Item) -> set[str]:
        """There is one way of ours for a matmul that has no norm and one weight."""
        chain, rows = item
        absent = {
            "unfused": chain.case in ("out", "down"),
            "separate": chain.case not in SEPARABLE,
            "compile": self.args.no_compile,
            "tvm": rows not in self.args.tvm_rows or bool(chain.quantization),
            "mlc": not chain.quantization,
        }
        return {name for name, is_absent in absent.items() if is_absent}

    def job(self, chain: Chain, way: str, rows: int) -> Any:
        fixed = rows if self.args.static or way == "tvm" or (way == "mlc" and rows == 1) else None
        at = rows if way == "mlc" else 0
        return self.compiler.Job(chain, way, fixed, self.args.dtype, self.args.target, at)

    def prepare(self, items: Sequence[Item]) -> None:
        from benchmarks import building

        asked = [(item, way) for item in items for way in self.asked(item) if way in OURS]
        jobs = dict.fromkeys(self.job(chain, way, rows) for (chain, rows), way in asked)
        building.fill_cache(self.compiler.build, jobs)

    def problem(self, chain: Chain, rows: int) -> Any:
        """Return the tensors; the parameters are those of the last case if they can be."""
        if self.weights is None or self.weights.chain != chain:
            self.weights, self.built = None, {}  # free them first
            self.weights = self.peers.Weights(chain, self.args.dtype, self.session.timing.DEVICE)
        return self.peers.Problem(self.weights, rows)

    def measured(self, item: Item) -> Entry:
        """Return times and errors of all contenders."""
        problem, error_of = self.problem(*item), self.session.timing.error_of
        reference = problem.reference()
        errors = {"eager": error_of(problem.eager(), reference)}
        allowed = self.session.timing.allowed_error(errors["eager"], self.args.dtype)
        kernels: dict[str, Any] = {}

        def check(name: str, call: Any) -> None:
            if name not in ("cublas", "eager"):
                errors[name] = error_of(call.checked_result(), reference)

        calls, failed = self.session.captured(
            self.asked(item), lambda name: self.contender(name, problem, kernels), check
        )
        return {
            "failed": failed,
            "wrong": [name for name, e in errors.items() if not e <= allowed],
            "kernels": kernels,
            **self.session.times(calls),
            "errors": errors,
            "allowed_error": allowed,
        }

    def contender(self, name: str, problem: Any, kernels: dict[str, Any]) -> Callable[[], Any]:
        """Return the call that is to be captured."""
        if name == "eager":
            return problem.eager
        if name == "compile":
            return problem.compiled()
        if name == "cublas":
            return problem.bare()
        job = self.job(problem.chain, name, problem.rows)
        if job not in self.built:
            self.built[job] = self.compiler.build(job)
        compiled = self.built[job]
        kernels[name] = compiled.kernels(problem.rows)
        return compiled.call(problem.inputs, problem.weights.by_name)

    # --- what is said ----------------------------------------------------------------------

    def line(self, entry: Entry, record: Entry) -> str:
        return report.line(entry)

    def markdown(self, record: Entry) -> str:
        return report.markdown(record, self.verdicts(record))

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        return report.verdicts(entry)

    def plot(self, record: Entry, path: Path) -> None:
        report.plot(record, path)
