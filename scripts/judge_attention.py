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
import sys
from functools import partial
from pathlib import Path
from typing import Any

import _judge
import _judgement as judgement
from _attention_cases import add_cases, selected_by
from _attention_subject import CaseIn
from _bench import run_or_say_lost
from _judge import Judge, function_of, kept
from _judgement import Group

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_cases(parser, USUAL)
    _judge.add_arguments(parser, DTYPES)
    args = parser.parse_args(argv)
    args.cases = selected_by(parser, args.cases)
    return args


class Run(Judge):
    """One run on the GPU."""

    script = SCRIPT

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, CaseIn.from_json)
        import _attention_torch
        import _plan_module

        self.peers, self.modules = _attention_torch, _plan_module

    def run(self) -> int:
        """Time everything; return the exit status."""
        for case in self.args.cases:
            subject = CaseIn(case, self.args.dtype)
            if subject.name not in self.groups and not self.late():
                group = Group(subject)
                self.add(group, partial(self.measure, group, subject))
        return self.finish()

    def measure(self, group: Group, subject: CaseIn) -> None:
        """Compile, check and time the plans of a case."""
        plans, group.feasible = judgement.selected(subject, self.dev, self.args.most)
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
        return _judge.judge_stored(SCRIPT, args, CaseIn.from_json)
    return run_or_say_lost(Run(args))


if __name__ == "__main__":
    raise SystemExit(main())
