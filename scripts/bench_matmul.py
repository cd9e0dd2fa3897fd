"""Norm -> matmul, gated FFN and plain matmul on an NVIDIA GPU, ours against peers, in one run.

    python scripts/bench_matmul.py                     # everything; half an hour with torch.compile
    python scripts/bench_matmul.py --sizes 8b --cases qkv --seconds 500
    python scripts/bench_matmul.py --resume DATE-bench_matmul.json   # what is missing there
    python scripts/bench_matmul.py --plot DATE-bench_matmul.json     # the picture, without a GPU

Contenders: ours through TVM's VM; ours with the norm and silu * up as kernels of their own;
PyTorch eager; torch.compile max-autotune; the bare matmuls by cuBLAS; TVM without our passes.  All
compute on the same tensors, are captured into CUDA graphs and timed in turn, L2 flushed before each
sample.  Every result is compared with float64; the exit status is 1 if one of ours is wrong or
fails.  JSON and Markdown are written after every case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _matmul_report as report
import _record
from _matmul_cases import CASES, CONTENDERS, DTYPES, OURS, ROWS, SIZES, Chain

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TVM_ROWS = (1, 16, 256, 1024)


class DeviceLostError(Exception):
    """The GPU answers no more, as after an illegal access: what follows cannot be measured."""


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
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--target", default="h200", help="what ours is compiled for")
    parser.add_argument("--seconds", type=float, help="start no case after so many seconds")
    parser.add_argument("--resume", type=Path, help="JSON of an earlier run to complete")
    parser.add_argument("--results", type=Path, default=_record.RESULTS, help="directory to write")
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
    return [name for name in CONTENDERS if not absent.get(name, False)]


def key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["size"], entry["case"], entry["rows"]


def earlier_entries(args: argparse.Namespace) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the entries of the run to resume.

    Raises
    ------
    SystemExit
        If that run was of another kind.
    """
    if args.resume is None:
        return {}
    record = json.loads(args.resume.read_text(encoding="utf-8"))
    for name, wanted in (("dtype", args.dtype), ("rows", rows_kind(args))):
        if record.get(name) != wanted:
            raise SystemExit(f"--resume: {name} is {record.get(name)!r} there, {wanted!r} here")
    return {key_of(e): e for e in record["cases"]}


def is_complete(args: argparse.Namespace, entry: dict[str, Any]) -> bool:
    """Tell whether everybody who is asked for was timed."""
    wanted = contenders_of(args, entry["case"], entry["rows"])
    return "error" not in entry and set(wanted) <= set(entry["us"])


def rows_kind(args: argparse.Namespace) -> str:
    return "static" if args.static else "symbolic"


class Bench:
    """One run on the GPU; torch and TVM are imported here, for the picture needs neither."""

    def __init__(self, args: argparse.Namespace) -> None:
        import _gpu_timing
        import _matmul_ours
        import _matmul_torch
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("bench_matmul needs an NVIDIA GPU; --plot FILE.json does not")
        self.args, self.torch = args, torch
        self.timing, self.ours, self.peers = _gpu_timing, _matmul_ours, _matmul_torch
        self.began = time.monotonic()
        self.entries = earlier_entries(args)
        self.sampler = self.timing.Sampler()
        self.ceilings = self.timing.ceilings(self.sampler)
        self.record = {
            **_record.facts(),
            "gpu": torch.cuda.get_device_name(),
            "dtype": args.dtype,
            "rows": rows_kind(args),
            "target": args.target,
            **self.ceilings,
            "cases": [],
        }

    def job(self, chain: Chain, way: str, rows: int) -> Any:
        fixed = rows if self.args.static or way == "tvm" else None
        return self.ours.Job(chain, way, fixed, self.args.dtype, self.args.target)

    def todo(self) -> Iterator[tuple[Chain, int]]:
        """Yield what to measure, important sizes and cases first."""
        for size in self.args.sizes:
            for case in self.args.cases:
                for rows in self.args.rows:
                    entry = self.entries.get((size, case, rows))
                    if entry is None or not is_complete(self.args, entry):
                        yield Chain(case, size), rows

    def run(self) -> int:
        """Measure everything; return the exit status."""
        ceilings = ", ".join(f"{k} {v:.3f}" for k, v in self.ceilings.items())
        print(f"{self.record['gpu']}: {ceilings}", flush=True)
        todo = list(self.todo())
        jobs = {
            self.job(chain, way, rows): None
            for chain, rows in todo
            for way in OURS
            if way in contenders_of(self.args, chain.case, rows)
        }
        for sentence in self.ours.fill_cache(jobs):
            print(f"NOT COMPILED {sentence}", flush=True)
        print(f"{len(jobs)} modules compiled in {self.elapsed():.0f} s", flush=True)
        weights = None
        for chain, rows in todo:
            if self.args.seconds is not None and self.elapsed() > self.args.seconds:
                print(f"stopped after {self.elapsed():.0f} s; complete it with --resume")
                break
            if weights is None or weights.chain != chain:
                weights, self.built = None, {}  # free them first
                weights = self.peers.Weights(chain, self.args.dtype, self.timing.DEVICE)
            entry = self.entry(weights, rows)
            self.entries[key_of(entry)] = entry
            print(report.line(entry), flush=True)
            self.write()
        return self.finish()

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def entry(self, weights: Any, rows: int) -> dict[str, Any]:
        """Measure one case at one number of rows; what fails is part of the entry."""
        chain = weights.chain
        entry: dict[str, Any] = {
            "size": chain.size,
            "case": chain.case,
            "rows": rows,
            "bytes": chain.bytes(rows),
            "flops": chain.flops(rows),
            "floor_us": chain.floor_us(rows, self.ceilings["copy_tb_s"]),
            "copy_tb_s": self.ceilings["copy_tb_s"],
            "launch_us": self.ceilings["launch_us"],
        }
        try:
            return entry | self.measured(self.peers.Problem(weights, rows))
        except DeviceLostError:
            raise
        except Exception as err:
            self.check_device(err)
            return entry | {"error": _sentence(err)}
        finally:
            self.torch.cuda.empty_cache()

    def measured(self, problem: Any) -> dict[str, Any]:
        """Return times and errors of all contenders."""
        reference = problem.reference()
        errors = {"eager": self.timing.error_of(problem.eager(), reference)}
        allowed = self.timing.allowed_error(errors["eager"], self.args.dtype)
        found: dict[str, Any] = {"failed": {}, "wrong": [], "no_graph": {}, "kernels": {}}
        calls = {}
        for name in contenders_of(self.args, problem.chain.case, problem.rows):
            try:
                call = self.timing.Call(self.contender(name, problem, found["kernels"]))
                if name not in ("cublas", "eager"):
                    errors[name] = self.timing.error_of(call.checked_result(), reference)
                calls[name] = call
            except Exception as err:
                self.check_device(err)
                found["failed"][name] = _sentence(err)
        del reference
        found["wrong"] = [name for name, e in errors.items() if not e <= allowed]
        found["no_graph"] = {n: c.why_no_graph for n, c in calls.items() if c.graph is None}
        samples = self.sampler.sample_ms({name: call.launch for name, call in calls.items()})
        found["us"] = {n: 1e3 * statistics.median(s) for n, s in samples.items()}
        found["tenths_us"] = {n: _tenths(s) for n, s in samples.items()}
        found["samples"] = {n: len(s) for n, s in samples.items()}
        return {**found, "errors": errors, "allowed_error": allowed}

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
            self.built[job] = self.ours.build(job)
        compiled = self.built[job]
        kernels[name] = compiled.kernels(problem.rows)
        return compiled.call(problem.inputs, problem.weights.by_name)

    def check_device(self, cause: Exception) -> None:
        """Tell an error of one contender from one that leaves the GPU unusable."""
        try:
            self.torch.cuda.synchronize()
        except Exception as err:
            raise DeviceLostError(f"{_sentence(cause)}; then {_sentence(err)}") from cause

    def write(self) -> None:
        self.record["cases"] = list(self.entries.values())
        _record.write(
            name_of(self.record), self.record, report.markdown(self.record), self.args.results
        )

    def finish(self) -> int:
        """Draw, say what was reached and return the exit status."""
        self.write()
        print(report.summary(self.record))
        stem = self.args.results / f"{self.record['date']}-{name_of(self.record)}"
        draw(stem.with_name(stem.name + ".json"))
        bad = [e for e in self.entries.values() if is_bad(e)]
        for e in bad:
            print("WRONG OR FAILED", *key_of(e))
        return int(bool(bad))


def is_bad(entry: dict[str, Any]) -> bool:
    """Tell whether something of ours gave a wrong result or none."""
    return "error" in entry or any(n in entry["wrong"] or n in entry["failed"] for n in OURS)


def name_of(record: dict[str, Any]) -> str:
    """Return the name of a run's files, without the date."""
    kinds = [record["dtype"], record["rows"]]
    usual = ("float16", "symbolic")
    return "-".join(["bench_matmul", *(k for k in kinds if k not in usual)])


def draw(path: Path) -> bool:
    """Draw the roofline of a record beside it; say so if that cannot be done here."""
    picture = path.with_suffix(".svg")
    try:
        report.plot(json.loads(path.read_text(encoding="utf-8")), picture)
    except ImportError:
        print(f"no matplotlib here: python scripts/bench_matmul.py --plot {path.name} elsewhere")
        return False
    print(picture)
    return True


def _tenths(samples: list[float]) -> list[float]:
    """Return the first and the last tenth of samples, from ms to us."""
    ordered = sorted(samples)
    return [round(1e3 * ordered[int(p * (len(ordered) - 1))], 2) for p in (0.1, 0.9)]


def _sentence(err: BaseException) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())[:300]}"


def main() -> int:
    args = arguments()
    if args.plot is not None:
        return 0 if draw(args.plot) else 1
    bench = Bench(args)
    try:
        return bench.run()
    except DeviceLostError as err:
        bench.write()
        print(f"the GPU is lost: {err}; complete this run with --resume", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
