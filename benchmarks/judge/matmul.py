"""The estimator against measurement on an NVIDIA GPU: are its first choices the fastest?

    python -m benchmarks judge matmul --sizes 8b --seconds 500
    python -m benchmarks judge matmul --sizes 8b --resume DATE-judge_matmul.json
    python -m benchmarks judge matmul --from DATE-judge_matmul.json   # today's model, no GPU;
                                                 # writes under the date of the timings

For each case and number of rows all feasible plans (a sample where there are more than --most, with
the choice and the ten first by prediction) are compiled for symbolic rows, compared with float64,
captured into CUDA graphs and timed in turn, L2 flushed before each sample.  Times include the
launch.  The exit status is 1 if a plan gave a wrong result or none.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.judge.run import Functions, Judge, Right
from benchmarks.suites.matmul.cases import DTYPES, SIZES, Chain
from benchmarks.suites.matmul.subject import CASES, ROWS, ChainAt, range_uppers


class JudgeMatmul(Judge):
    """The chains of LLaMA that are one workload, at several numbers of rows."""

    name = "judge_matmul"
    cases, dtypes = CASES, DTYPES
    subject_of = staticmethod(ChainAt.from_json)

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
        parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
        super().options(parser)

    def items(self) -> Iterator[ChainAt]:
        for size in self.args.sizes:
            for case in self.args.cases:
                chain, dtype = Chain(case, size), self.args.dtype
                yield from (ChainAt(chain, rows, dtype) for rows in self.args.rows)

    def together(self, subject: ChainAt) -> Sequence[ChainAt]:
        return [s for s in self.todo if s.chain == subject.chain]

    def compile(self, subjects: Sequence[ChainAt]) -> None:
        """Compile the plans of all numbers of rows of a chain in one module."""
        from benchmarks.suites.matmul.peers import Weights

        uppers = range_uppers(subjects[0], self.dev)
        ranges: dict[Any, list[int | None]] = {}
        for subject in subjects:
            upper = next(u for u in uppers if u is None or subject.rows <= u)
            for plan in self.wanted[subject][0]:
                ranges.setdefault(plan, []).append(upper)
        work, target = subjects[0].work(symbolic=True), self.args.target
        self.compiled, self.failed = self.modules.compile_plans(work, ranges, target)
        self.weights = Weights(subjects[0].chain, self.args.dtype, self.session.timing.DEVICE)

    def functions(self, subject: ChainAt) -> tuple[Functions, dict[Any, str], Right]:
        from benchmarks.suites.matmul.peers import Problem

        plans, timing = self.wanted[subject][0], self.session.timing
        problem = Problem(self.weights, subject.rows)
        reference = problem.reference()
        eager = timing.error_of(problem.eager(), reference)
        right = self.checked(reference, timing.allowed_error(eager, self.args.dtype))
        tensors = operands(problem)
        found = {p: self.compiled[p] for p in plans if p in self.compiled}
        calls = {p: partial(built.call, name, tensors) for p, (built, name) in found.items()}
        return calls, {p: self.failed[p] for p in plans if p in self.failed}, right


def operands(problem: Any) -> list[Any]:
    """Return the tensors of a problem in the order in which a kernel takes them."""
    tensors = dict(problem.inputs)
    return [tensors.pop("x"), *problem.weights.by_name.values(), *tensors.values()]
