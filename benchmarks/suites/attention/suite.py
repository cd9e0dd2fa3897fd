"""Attention on an NVIDIA GPU: ours against SDPA's back ends and FlexAttention, in one run.

    python -m benchmarks run attention --no-flex        # two minutes
    python -m benchmarks run attention --cases short decode S1 --seconds 500
    python -m benchmarks run attention --resume DATE-bench_attention.json   # what is missing there
    python -m benchmarks run attention --accuracy       # only difficult numbers, on small shapes
    python -m benchmarks run attention --merge A.json B.json                # without a GPU
    python -m benchmarks plot DATE-bench_attention.json                     # without a GPU

Contenders: ours through TVM's VM; the flash and cuDNN back ends of PyTorch's SDPA, which share
heads of keys and values as they are; FlexAttention tuned by torch.compile, its block mask made
beforehand; with --compile, SDPA under torch.compile.  All compute on the same tensors, are captured
into CUDA graphs and timed in turn, L2 flushed before each sample. Results for sampled queries are
compared with float64: ours may err twice as much as SDPA (where SDPA takes no such mask,
FlexAttention, or else separate operators). The exit status is 1 if one of ours is wrong or fails.
JSON and Markdown are written after every case.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.report import Entry, Verdict
from benchmarks.runner import Suite
from benchmarks.suites.attention import report
from benchmarks.suites.attention.cases import (
    CONTENDERS,
    DTYPES,
    GROUPS,
    SDPA,
    Case,
    add_cases,
    selected_by,
)

LAYOUTS = ("bsnh", "bnsh")


class Attention(Suite):
    """The attentions of `cases`."""

    name = "bench_attention"
    device, has_picture = "gpu", True
    plain: ClassVar = {"dtype": "float16", "layout": "bsnh", "sizes": "static"}
    contenders, ours, dtypes = CONTENDERS, ("ours",), DTYPES
    usual = tuple(name for name in CONTENDERS if name != "compile")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add_cases(parser, GROUPS)
        add("--no-flex", action="store_true", help="leave FlexAttention out: 10 to 20 s a case")
        add("--compile", action="store_true", help="time SDPA under torch.compile too")
        add("--layout", default="bsnh", choices=LAYOUTS, help="of all tensors in memory")
        add("--dynamic", action="store_true", help="compile ours for symbolic batch and lengths")
        add("--accuracy", action="store_true", help="only difficult numbers, on small shapes")
        add("--plans", action="store_true", help="only print the plans that ours has; needs no GPU")

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        args.cases = selected_by(parser, args.cases)
        args.contenders = args.contenders or [*cls.usual, *["compile"] * args.compile]

    @classmethod
    def of(cls, args: Namespace) -> Suite:
        if not args.accuracy or args.plot or args.merge:
            return cls(args)
        from benchmarks.suites.attention.accuracy import Accuracy

        return Accuracy(args)

    def without_a_run(self) -> int | None:
        if not self.args.plans:
            return None
        from benchmarks.suites.attention import ours

        return ours.print_plans(self.args)

    def kind(self) -> Entry:
        sizes = "symbolic" if self.args.dynamic else "static"
        return {"dtype": self.args.dtype, "layout": self.args.layout, "sizes": sizes}

    # --- what is measured ------------------------------------------------------------------

    def begin(self) -> None:
        from benchmarks.suites.attention import ours, peers

        self.compiler, self.peers = ours, peers
        self.built: dict[Any, Any] = {}

    def items(self) -> list[Case]:
        return list(self.args.cases)

    def facts(self, item: Case) -> Entry:
        return {
            "case": item.name,
            "group": item.group,
            "bytes": item.bytes,
            "flops": item.flops,
            "floor_us": item.floor_us(self.session.ceilings["copy_tb_s"]),
            **self.session.speeds,
        }

    def absent(self, item: Case) -> set[str]:
        """SDPA has no mask but causal and, in cuDNN, a bias."""
        absent = {
            "flash": item.mask != "",
            "cudnn": item.mask not in ("", "bias"),
            "compile": item.mask != "",
            "flex": self.args.no_flex,
        }
        return {name for name, is_absent in absent.items() if is_absent}

    def prepare(self, items: Sequence[Case]) -> None:
        """Compile all of ours: kernels in parallel, then the functions in one module."""
        from benchmarks import building

        jobs = [self.compiler.job(c, self.args) for c in items if "ours" in self.asked(c)]
        building.fill_cache(self.compiler.build, jobs)
        made = self.compiler.build_all(jobs)
        self.built |= {job.name: compiled for job, compiled in made.items()}

    def measured(self, item: Case) -> Entry:
        """Return times and errors of all contenders."""
        args, timing = self.args, self.session.timing
        problem = self.peers.Problem(item, args.dtype, args.layout, timing.DEVICE)
        reference = problem.reference()
        eager = problem.computed(problem.dtype)
        errors = {"eager": timing.errors_of(eager, reference)}
        del eager

        def check(name: str, call: Any) -> None:
            out = call.checked_result()
            out = problem.heads_first(out) if name == "ours" else out
            errors[name] = timing.errors_of(problem.sampled(out), reference)

        calls, failed = self.session.captured(
            self.asked(item), lambda name: self.contender(name, problem), check
        )
        allowed = allowed_errors(errors)
        return {
            "failed": failed,
            "wrong": [n for n in self.ours if n in errors and not within(errors[n], allowed)],
            "plan": self.built[item.name].plan() if item.name in self.built else "",
            **self.session.times(calls),
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
        if problem.case.name not in self.built:
            raise RuntimeError("it was not compiled; see above")
        return self.built[problem.case.name].call(problem.operands)

    # --- what is said ----------------------------------------------------------------------

    def line(self, entry: Entry, record: Entry) -> str:
        return report.line(entry)

    def markdown(self, record: Entry) -> str:
        return report.markdown(record)

    def verdicts(self, record: Entry) -> list[Verdict]:
        return report.verdicts(report.measured(record))

    def plot(self, record: Entry, path: Path) -> None:
        report.plot(record, path)


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
