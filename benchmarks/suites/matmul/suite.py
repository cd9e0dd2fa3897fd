"""Norm -> matmul, gated FFN and plain matmul on an NVIDIA GPU, ours against peers, in one run.

    python scripts/bench_matmul.py                     # everything; half an hour with torch.compile
    python scripts/bench_matmul.py --sizes 8b --cases qkv --seconds 500
    python scripts/bench_matmul.py --resume DATE-bench_matmul.json   # what is missing there
    python scripts/bench_matmul.py --plot DATE-bench_matmul.json     # the picture, without a GPU

Contenders: ours through TVM's VM; ours with the norm and silu * up as kernels of their own; ours
without Triton, by TIR (if asked for: --contenders ours tir cublas); PyTorch eager; torch.compile
max-autotune; the bare matmuls by cuBLAS; TVM without our passes.  All compute on the same tensors,
are captured into CUDA graphs and timed in turn, L2 flushed before each sample.  Every result is
compared with float64; the exit status is 1 if one of ours is wrong or fails.  JSON and Markdown are
written after every case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.runner import Bench, draw, is_complete, run_or_say_lost
from benchmarks.suites.matmul import report
from benchmarks.suites.matmul.cases import (
    CASES,
    CONTENDERS,
    DTYPES,
    OURS,
    ROWS,
    SIZES,
    USUAL,
    Chain,
)

TVM_ROWS = (1, 16, 256, 1024)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument(
        "--tvm-rows", type=int, nargs="*", default=list(TVM_ROWS), help="rows to time TVM at"
    )
    parser.add_argument("--dtype", default="float16", choices=DTYPES)
    parser.add_argument("--static", action="store_true", help="compile ours for each row count")
    parser.add_argument("--contenders", nargs="+", default=list(USUAL), choices=CONTENDERS)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--target", default="h200", help="what ours is compiled for")
    parser.add_argument("--seconds", type=float, help="start no case after so many seconds")
    parser.add_argument("--resume", type=Path, help="JSON of an earlier run to complete")
    parser.add_argument("--results", type=Path, default=recording.RESULTS)
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw the roofline of a run")
    args = parser.parse_args(argv)
    if min(args.rows, default=1) < 1:
        parser.error(f"--rows {min(args.rows)}: must be at least 1")
    return args


def contenders_of(args: argparse.Namespace, case: str, rows: int) -> list[str]:
    """Return who is timed: there is no other way of ours for a matmul that has no norm."""
    absent = {
        "unfused": case in ("out", "down"),
        "compile": args.no_compile,
        "tvm": rows not in args.tvm_rows,
    }
    return [n for n in CONTENDERS if n in args.contenders and not absent.get(n, False)]


def rows_kind(args: argparse.Namespace) -> str:
    return "static" if args.static else "symbolic"


class MatmulBench(Bench):
    """One run on the GPU; an item of it is a chain and a number of rows."""

    script = "bench_matmul"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, report, {"rows": rows_kind(args)})
        from benchmarks import building
        from benchmarks.suites.matmul import ours, peers

        self.compiler, self.peers = ours, peers
        self.fill_cache = building.fill_cache
        self.weights: Any = None
        self.built: dict[Any, Any] = {}

    @staticmethod
    def key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
        return entry["size"], entry["case"], entry["rows"]

    def file_name(self) -> str:
        kinds = [self.args.dtype, rows_kind(self.args)]
        kinds += ["tir"] if "tir" in self.args.contenders else []
        return "-".join(["bench_matmul", *(k for k in kinds if k not in ("float16", "symbolic"))])

    def job(self, chain: Chain, way: str, rows: int) -> Any:
        fixed = rows if self.args.static or way == "tvm" else None
        return self.compiler.Job(chain, way, fixed, self.args.dtype, self.args.target)

    def todo(self) -> Iterator[tuple[Chain, int]]:
        """Yield what to measure, important sizes and cases first."""
        for size in self.args.sizes:
            for case in self.args.cases:
                for rows in self.args.rows:
                    entry = self.entries.get((size, case, rows))
                    wanted = contenders_of(self.args, case, rows)
                    if entry is None or not is_complete(entry, wanted):
                        yield Chain(case, size), rows

    def run(self) -> int:
        """Measure everything; return the exit status."""
        self.say_ceilings()
        todo = list(self.todo())
        jobs = {
            self.job(chain, way, rows): None
            for chain, rows in todo
            for way in OURS
            if way in contenders_of(self.args, chain.case, rows)
        }
        for why in self.fill_cache(self.compiler.build, jobs):
            print(f"NOT COMPILED {why}", flush=True)
        print(f"{len(jobs)} modules compiled in {self.elapsed():.0f} s", flush=True)
        self.measure_all(todo)
        return self.finish()

    def facts(self, item: tuple[Chain, int]) -> dict[str, Any]:
        chain, rows = item
        return {
            "size": chain.size,
            "case": chain.case,
            "rows": rows,
            "bytes": chain.bytes(rows),
            "flops": chain.flops(rows),
            "floor_us": chain.floor_us(rows, self.ceilings["copy_tb_s"]),
        }

    def problem(self, chain: Chain, rows: int) -> Any:
        """Return the tensors; the parameters are those of the last case if they can be."""
        if self.weights is None or self.weights.chain != chain:
            self.weights, self.built = None, {}  # free them first
            self.weights = self.peers.Weights(chain, self.args.dtype, self.timing.DEVICE)
        return self.peers.Problem(self.weights, rows)

    def measured(self, item: tuple[Chain, int]) -> dict[str, Any]:
        """Return times and errors of all contenders."""
        problem = self.problem(*item)
        reference = problem.reference()
        errors = {"eager": self.timing.error_of(problem.eager(), reference)}
        allowed = self.timing.allowed_error(errors["eager"], self.args.dtype)
        kernels: dict[str, Any] = {}

        def check(name: str, call: Any) -> None:
            if name not in ("cublas", "eager"):
                errors[name] = self.timing.error_of(call.checked_result(), reference)

        names = contenders_of(self.args, problem.chain.case, problem.rows)
        calls, failed = self.captured(
            names, lambda name: self.contender(name, problem, kernels), check
        )
        return {
            "failed": failed,
            "wrong": [name for name, e in errors.items() if not e <= allowed],
            "kernels": kernels,
            **self.times(calls),
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


def main() -> int:
    args = arguments()
    if args.plot is not None:
        return 0 if draw(args.plot, report.plot, "bench_matmul") else 1
    return run_or_say_lost(MatmulBench(args))


if __name__ == "__main__":
    raise SystemExit(main())
