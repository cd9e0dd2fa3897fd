"""The estimator's plans of attention against measurement on an NVIDIA GPU.

    python -m benchmarks judge attention --cases short decode-b1-8k --seconds 300
    python -m benchmarks judge attention --resume DATE-judge_attention.json
    python -m benchmarks judge attention --from DATE-judge_attention.json   # today's model, no GPU;
                                                 # writes under the date of the timings

For each case all feasible plans (a sample where there are more than --most, with the choice and the
ten first by prediction) are compiled for its sizes, compared with float64, captured into CUDA
graphs and timed in turn, L2 flushed before each sample.  Times include the launch.  The exit status
is 1 if a plan gave a wrong result or none.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import building
from benchmarks.judge.run import Functions, Judge, Right
from benchmarks.suites.attention.cases import DTYPES, add_cases, selected_by
from benchmarks.suites.attention.subject import CaseIn

USUAL = (
    *("S1", "S3", "S4", "S6", "S7", "S9"),
    *("decode-b1-1k", "decode-b1-8k", "decode-b4-4k", "decode-b16-1k", "decode-b64-4k"),
    *("prefill-512", "prefill-2048", "prefill-8192"),
    *("bias-2048", "alibi-2048", "softcap-2048", "window-8192"),
    *("bert-base-b1", "bert-base-b8", "bert-large-b32", "d64", "d80", "d96", "d256"),
    *("vit-base-b1", "vit-huge-b32", "gpt2-1024", "gpt2-decode-b1", "gpt2-decode-b16"),
)
"""Cases of every kind, of which no plan takes long."""

AT_ONCE = 6
"""Cases whose plans are compiled together, before they are timed."""


class JudgeAttention(Judge):
    """Attentions of every kind, at their sizes."""

    name = "judge_attention"
    dtypes = DTYPES
    subject_of = staticmethod(CaseIn.from_json)

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add_cases(parser, USUAL)
        super().options(parser)

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        args.cases = selected_by(parser, args.cases)

    def items(self) -> list[CaseIn]:
        return [CaseIn(case, self.args.dtype) for case in self.args.cases]

    def together(self, subject: CaseIn) -> Sequence[CaseIn]:
        first = self.todo.index(subject)
        return self.todo[first : first + AT_ONCE]

    def compile(self, subjects: Sequence[CaseIn]) -> None:
        """Fill the cache with the kernels of all plans, in parallel."""
        jobs = [
            self.modules.PlanJob(subject.work(), plan, self.args.target)
            for subject in subjects
            for plan in self.wanted[subject][0]
        ]
        building.fill_cache(self.modules.build, jobs)

    def functions(self, subject: CaseIn) -> tuple[Functions, dict[Any, str], Right]:
        from benchmarks.suites.attention.peers import Problem

        plans = {plan: [None] for plan in self.wanted[subject][0]}
        timing, target = self.session.timing, self.args.target
        compiled, failed = self.modules.compile_plans(subject.work(), plans, target)
        problem = Problem(subject.case, subject.dtype, "bsnh", timing.DEVICE)
        reference = problem.reference()
        rounded = timing.error_of(problem.rounded(), reference)
        right = self.checked(reference, timing.allowed_error(rounded, subject.dtype))
        tensors = list(problem.operands.values())
        calls = {p: partial(b.call, name, tensors) for p, (b, name) in compiled.items()}
        return calls, failed, lambda out: right(problem.sampled(problem.heads_first(out)))
