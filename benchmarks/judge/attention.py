"""The estimator's plans of attention against measurement on an NVIDIA GPU.

    python scripts/judge_attention.py --cases short decode-b1-8k --seconds 300
    python scripts/judge_attention.py --resume DATE-judge_attention.json
    python scripts/judge_attention.py --from DATE-judge_attention.json   # today's model, no GPU;
                                                 # writes under the date of the timings

For each case all feasible plans (a sample where there are more than --most, with the choice and the
ten first by prediction) are compiled for its sizes, compared with float64, captured into CUDA
graphs and timed in turn, L2 flushed before each sample.  Times include the launch.  The exit status
is 1 if a plan gave a wrong result or none.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks.judge import judgement, run
from benchmarks.judge.judgement import Group
from benchmarks.judge.run import Judge, function_of, kept
from benchmarks.runner import run_or_say_lost
from benchmarks.suites.attention.cases import add_cases, selected_by
from benchmarks.suites.attention.subject import CaseIn
from relax_fusion.tile_plan import TilePlan

SCRIPT = "judge_attention"
DTYPES = ("float16", "bfloat16")
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


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_cases(parser, USUAL)
    run.add_arguments(parser, DTYPES)
    args = parser.parse_args(argv)
    args.cases = selected_by(parser, args.cases)
    return args


class Run(Judge):
    """One run on the GPU."""

    script = SCRIPT

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, CaseIn.from_json)
        from benchmarks import plans
        from benchmarks.suites.attention import peers

        self.peers, self.modules = peers, plans

    def run(self) -> int:
        """Time everything; return the exit status."""
        subjects = [CaseIn(case, self.args.dtype) for case in self.args.cases]
        todo = [subject for subject in subjects if subject.name not in self.groups]
        while todo and not self.late():
            now, todo = todo[:AT_ONCE], todo[AT_ONCE:]
            wanted = self.compiled(now)
            for subject in now:
                if not self.late():
                    plans, feasible = wanted[subject]
                    group = Group(subject, feasible=feasible)
                    self.add(group, partial(self.measure, group, plans))
        return self.finish()

    def compiled(self, subjects: list[CaseIn]) -> dict[CaseIn, tuple[list[TilePlan], int]]:
        """Compile the plans of some cases in parallel; return those to time, of how many."""
        from benchmarks import building

        began = self.elapsed()
        wanted = {s: judgement.selected(s, self.dev, self.args.most) for s in subjects}
        jobs = [
            self.modules.PlanJob(subject.work(), plan, self.args.target)
            for subject, (plans, _) in wanted.items()
            for plan in plans
        ]
        building.fill_cache(self.modules.build, jobs)
        print(f"{len(jobs)} plans compiled in {self.elapsed() - began:.0f} s", flush=True)
        return wanted

    def measure(self, group: Group, plans: list[TilePlan]) -> None:
        """Check and time the plans of a case, whose kernels are in the cache."""
        subject = group.subject
        compiled, failed = self.modules.compile_plans(
            subject.work(), {plan: [None] for plan in plans}, self.target
        )
        group.failed = [kept(p, why) for p, why in failed.items()]
        problem = self.peers.Problem(subject.case, subject.dtype, "bsnh", self.timing.DEVICE)
        reference = problem.reference()
        rounded = self.timing.error_of(problem.rounded(), reference)
        allowed = self.timing.allowed_error(rounded, subject.dtype)

        def right(out: Any) -> str:
            found = problem.sampled(problem.heads_first(out))
            error = self.timing.error_of(found, reference)
            return "" if error <= allowed else f"error {error:.2e}, allowed {allowed:.1e}"

        machines: dict[int, Any] = {}
        tensors = list(problem.operands.values())
        calls = {p: partial(function_of, machines, *made, tensors) for p, made in compiled.items()}
        self.time(group, calls, right)


def main() -> int:
    args = arguments()
    if args.stored:
        return run.judge_stored(SCRIPT, args, CaseIn.from_json)
    return run_or_say_lost(Run(args))


if __name__ == "__main__":
    raise SystemExit(main())
