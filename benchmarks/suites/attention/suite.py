"""Attention on an NVIDIA GPU: ours against SDPA's back ends and FlexAttention, in one run.

    python scripts/bench_attention.py --no-flex        # two minutes
    python scripts/bench_attention.py --cases short decode S1 --seconds 500
    python scripts/bench_attention.py --resume DATE-bench_attention.json   # what is missing there
    python scripts/bench_attention.py --accuracy       # only difficult numbers, on small shapes
    python scripts/bench_attention.py --merge A.json B.json                # without a GPU
    python scripts/bench_attention.py --plot DATE-bench_attention.json     # without a GPU

Contenders: ours through TVM's VM, and by TIR without Triton if asked for (--contenders ours tir
flash); the flash and cuDNN back ends of PyTorch's SDPA, which share heads of keys and values as
they are; FlexAttention tuned by torch.compile, its block mask made beforehand; with --compile, SDPA
under torch.compile.  All compute on the same tensors, are captured into CUDA graphs and timed in
turn, L2 flushed before each sample.  Results for sampled queries are compared with float64: ours
may err twice as much as SDPA (where SDPA takes no such mask, FlexAttention, or else separate
operators).  The exit status is 1 if one of ours is wrong or fails.  JSON and Markdown are written
after every case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.runner import Bench, conclude, draw, is_complete, merged, run_or_say_lost
from benchmarks.suites.attention import report
from benchmarks.suites.attention.cases import (
    CONTENDERS,
    GROUPS,
    IF_ASKED,
    OURS,
    SDPA,
    Case,
    add_cases,
    selected_by,
)

DTYPES = ("float16", "bfloat16")
LAYOUTS = ("bsnh", "bnsh")
KIND = ("dtype", "layout", "sizes")
USUAL = ("float16", "bsnh", "static")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_cases(parser, GROUPS)
    add("--contenders", nargs="+", choices=CONTENDERS, help="default: all but tir, compile")
    add("--no-flex", action="store_true", help="leave FlexAttention out: 10 to 20 s a case")
    add("--compile", action="store_true", help="time SDPA under torch.compile too")
    add("--dtype", default="float16", choices=DTYPES)
    add("--layout", default="bsnh", choices=LAYOUTS, help="of all tensors in memory")
    add("--dynamic", action="store_true", help="compile ours for symbolic batch and lengths")
    add("--target", default="h200", help="what ours is compiled for")
    add("--accuracy", action="store_true", help="only difficult numbers, on small shapes")
    add("--plans", action="store_true", help="only print the plans that ours has; needs no GPU")
    add("--seconds", type=float, help="start no case after so many seconds")
    add("--resume", type=Path, help="JSON of an earlier run to complete")
    add("--results", type=Path, default=recording.RESULTS, help="directory to write")
    add("--merge", type=Path, nargs="+", metavar="JSON", help="make one record of several runs")
    add("--plot", type=Path, metavar="JSON", help="only draw the roofline of a run")
    args = parser.parse_args(argv)
    args.cases = selected_by(parser, args.cases)
    return args


def contenders_of(args: argparse.Namespace, case: Case) -> list[str]:
    """Return who is timed: SDPA has no mask but causal and, in cuDNN, a bias."""
    usual = [n for n in CONTENDERS if n not in IF_ASKED or (n == "compile" and args.compile)]
    asked = args.contenders or usual
    absent = {
        "flash": case.mask != "",
        "cudnn": case.mask not in ("", "bias"),
        "compile": case.mask != "",
        "flex": args.no_flex,
    }
    return [name for name in CONTENDERS if name in asked and not absent.get(name, False)]


def kind_of(args: argparse.Namespace) -> dict[str, str]:
    """Return what makes runs comparable."""
    sizes = "symbolic" if args.dynamic else "static"
    return {"layout": args.layout, "sizes": sizes}


def file_name(record: dict[str, Any]) -> str:
    """Return the name of a run's files, without the date."""
    kinds = (record[name] for name in KIND)
    return "-".join(["bench_attention", *(k for k in kinds if k not in USUAL)])


class AttentionBench(Bench):
    """One run on the GPU; an item of it is a case."""

    script = "bench_attention"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, report, kind_of(args))

        from benchmarks.suites.attention import peers

        self.peers = peers
        self.built: dict[str, Any] = {}

    @staticmethod
    def key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
        return (entry["case"],)

    def file_name(self) -> str:
        return file_name(self.record)

    def todo(self) -> list[Case]:
        """Return the cases that are not measured yet, important ones first."""
        return [
            case
            for case in self.args.cases
            if (case.name,) not in self.entries
            or not is_complete(self.entries[case.name,], contenders_of(self.args, case))
        ]

    def run(self) -> int:
        """Measure everything; return the exit status."""
        self.say_ceilings()
        todo = self.todo()
        self.build(todo)
        self.measure_all(todo)
        return self.finish()

    def build(self, cases: Sequence[Case]) -> None:
        """Compile all of ours: kernels in parallel, then the functions in one module."""
        from benchmarks import building
        from benchmarks.suites.attention import ours

        jobs = {
            way: [ours.job(c, self.args, way) for c in cases if way in contenders_of(self.args, c)]
            for way in OURS
        }
        began = self.elapsed()
        for why in building.fill_cache(ours.build, jobs["ours"]):
            print(f"NOT COMPILED {why}", flush=True)
        kernels = self.elapsed()
        for way, asked in jobs.items():
            made = ours.build_all(asked)
            self.built |= {(way, job.name): compiled for job, compiled in made.items()}
        took = f"kernels in {kernels - began:.0f} s, modules in {self.elapsed() - kernels:.0f} s"
        print(f"{len(self.built)} functions compiled, {took}", flush=True)

    def facts(self, item: Case) -> dict[str, Any]:
        return {
            "case": item.name,
            "group": item.group,
            "bytes": item.bytes,
            "flops": item.flops,
            "floor_us": item.floor_us(self.ceilings["copy_tb_s"]),
        }

    def measured(self, item: Case) -> dict[str, Any]:
        """Return times and errors of all contenders."""
        args = self.args
        problem = self.peers.Problem(item, args.dtype, args.layout, self.timing.DEVICE)
        reference = problem.reference()
        eager = problem.computed(problem.dtype)
        errors = {"eager": self.timing.errors_of(eager, reference)}
        del eager

        def check(name: str, call: Any) -> None:
            out = call.checked_result()
            out = problem.heads_first(out) if name in OURS else out
            errors[name] = self.timing.errors_of(problem.sampled(out), reference)

        calls, failed = self.captured(
            contenders_of(args, item), lambda name: self.contender(name, problem), check
        )
        allowed = allowed_errors(errors)
        return {
            "failed": failed,
            "wrong": [n for n in OURS if n in errors and not within(errors[n], allowed)],
            "plan": "; ".join(
                self.built[way, item.name].plan() for way in OURS if (way, item.name) in self.built
            ),
            **self.times(calls),
            "errors": errors,
            "allowed_errors": allowed,
        }

    def contender(self, name: str, problem: Any) -> Callable[[], Any]:
        """Return the call that is to be captured."""
        if name in SDPA:
            return problem.sdpa(name)
        if name == "compile":
            return problem.compiled()
        if name == "flex":
            return problem.flex()
        if (name, problem.case.name) not in self.built:
            raise RuntimeError("it was not compiled; see above")
        return self.built[name, problem.case.name].call(problem.operands)


def allowed_errors(errors: dict[str, list[float]]) -> list[float]:
    """Return twice the largest and the mean error of the float16 attention to be compared with.

    SDPA counts where it takes the case (of two back ends the one that errs more); else
    FlexAttention; else the operators one by one, scores rounded between them.
    """
    peers = [errors[n] for n in SDPA if n in errors] or [
        errors["flex"] if "flex" in errors else errors["eager"]
    ]
    return [2 * max(kind) for kind in zip(*peers, strict=True)]


def within(found: list[float], allowed: list[float]) -> bool:
    """Tell whether errors are in bounds; NaN is not."""
    return all(e <= a for e, a in zip(found, allowed, strict=True))


def ours_plans(args: argparse.Namespace) -> int:
    """Print the plan of every case."""
    from benchmarks.suites.attention import ours

    return ours.print_plans(args)


def main() -> int:
    args = arguments()
    if args.plot is not None:
        return 0 if draw(args.plot, report.plot, "bench_attention") else 1
    if args.merge:
        record = merged(args.merge, KIND, AttentionBench.key_of)
        return conclude(record, report, ("bench_attention", file_name(record)), args)
    if args.plans:
        return ours_plans(args)
    if args.accuracy:
        from benchmarks.suites.attention import accuracy

        return run_or_say_lost(accuracy.Accuracy(args))
    return run_or_say_lost(AttentionBench(args))


if __name__ == "__main__":
    raise SystemExit(main())
