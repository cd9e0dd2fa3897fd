"""The estimator against measurement on an NVIDIA GPU: are its first choices the fastest?

    python scripts/judge_estimator.py --sizes 8b --seconds 500
    python scripts/judge_estimator.py --sizes 8b --resume DATE-judge_estimator.json
    python scripts/judge_estimator.py --from DATE-judge_estimator.json   # today's model, no GPU;
                                                 # writes under the date of the timings

For each case and number of rows all feasible plans (a sample where there are more than --most, with
the choice and the ten first by prediction) are compiled for symbolic rows, compared with float64,
captured into CUDA graphs and timed in turn, L2 flushed before each sample.  Times include the
launch.  The exit status is 1 if a plan gave a wrong result or none.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks.judge import judgement, run
from benchmarks.judge.judgement import Group
from benchmarks.judge.run import Judge, function_of, kept
from benchmarks.runner import run_or_say_lost
from benchmarks.suites.matmul.cases import DTYPES, SIZES, Chain
from benchmarks.suites.matmul.subject import CASES, ROWS, ChainAt, range_uppers

SCRIPT = "judge_estimator"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    run.add_arguments(parser, DTYPES)
    return parser.parse_args(argv)


class Run(Judge):
    """One run on the GPU."""

    script = SCRIPT

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, ChainAt.from_json)
        from benchmarks import plans
        from benchmarks.suites.matmul import peers

        self.peers, self.modules = peers, plans

    def run(self) -> int:
        """Time everything; return the exit status."""
        for size in self.args.sizes:
            for case in self.args.cases:
                chain = Chain(case, size)
                at = [ChainAt(chain, rows, self.args.dtype) for rows in self.args.rows]
                todo = [subject for subject in at if subject.name not in self.groups]
                if todo and not self.late():
                    self.chain(chain, todo)
        return self.finish()

    def chain(self, chain: Chain, subjects: list[ChainAt]) -> None:
        """Compile the plans of all numbers of rows together, then time them."""
        uppers = range_uppers(subjects[0], self.dev)
        ranges: dict[Any, list[int | None]] = {}
        wanted = {}
        for subject in subjects:
            wanted[subject] = judgement.selected(subject, self.dev, self.args.most)
            upper = next(u for u in uppers if u is None or subject.rows <= u)
            for plan in wanted[subject][0]:
                ranges.setdefault(plan, []).append(upper)
        began = self.elapsed()
        work = subjects[0].work(symbolic=True)
        compiled, failed = self.modules.compile_plans(work, ranges, self.target)
        took = self.elapsed() - began
        print(f"{chain.size} {chain.case}: {len(compiled)} plans compiled in {took:.0f} s")
        weights = self.peers.Weights(chain, self.args.dtype, self.timing.DEVICE)
        machines: dict[int, Any] = {}
        for subject in subjects:
            if self.late():
                return
            plans, feasible = wanted[subject]
            group = Group(subject, feasible=feasible)
            group.failed = [kept(p, failed[p]) for p in plans if p in failed]
            calls = {p: (machines, *compiled[p]) for p in plans if p in compiled}
            self.add(group, partial(self.measure, group, weights, calls))

    def measure(self, group: Group, weights: Any, compiled: dict[Any, tuple[Any, ...]]) -> None:
        """Check and time the plans of a group."""
        problem = self.peers.Problem(weights, group.subject.rows)
        reference = problem.reference()
        eager = self.timing.error_of(problem.eager(), reference)
        allowed = self.timing.allowed_error(eager, self.args.dtype)

        def right(out: Any) -> str:
            error = self.timing.error_of(out, reference)
            return "" if error <= allowed else f"error {error:.2e}, allowed {allowed:.1e}"

        tensors = operands(problem)
        calls = {p: partial(function_of, *made, tensors) for p, made in compiled.items()}
        self.time(group, calls, right)


def operands(problem: Any) -> list[Any]:
    """Return the tensors of a problem in the order in which a kernel takes them."""
    tensors = dict(problem.inputs)
    return [tensors.pop("x"), *problem.weights.by_name.values(), *tensors.values()]


def main() -> int:
    args = arguments()
    if args.stored:
        return run.judge_stored(SCRIPT, args, ChainAt.from_json)
    return run_or_say_lost(Run(args))


if __name__ == "__main__":
    raise SystemExit(main())
