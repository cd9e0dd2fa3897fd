"""Prefill and decode of the demo models on this CPU: TVM's default pipeline against ours.

Both are compiled and run in one process, in alternation, with the same weights and tokens.  Where
torch is installed, the time of the model's matmuls alone in torch is given as a yardstick.
The goal is decode at least 1.5 times and prefill at least 10 times as fast as TVM's default.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import recording
from relax_fusion import host_target, models
from relax_fusion.cli.build import build, build_default
from relax_fusion.cli.measure import tokens
from relax_fusion.estimator import format_seconds

GOALS = {"decode": 1.5, "prefill": 10.0}
DECODE_CONTEXT = 16
OURS_PER_ROUND = 5
"""Runs of our pipeline for each run of the default one, which is slow enough to be steady."""


@dataclass
class Case:
    """One measurement: seconds by contender."""

    model: str
    step: str
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, who: str) -> float:
        return statistics.median(self.seconds[who])

    @property
    def ratio(self) -> float:
        return self.median("tvm_default") / self.median("relax_fusion")

    @property
    def goal(self) -> float:
        return GOALS[self.step.split()[0]]


def measure_model(name: str, prompts: list[int], rounds: int, cases: list[Case]) -> None:
    exported = models.export(models.zoo_config(name), max_seq_len=max(prompts) + 128)
    weights = models.random_weights(exported)
    target = host_target()
    say(f"{name}: compiling")
    runners = {
        "tvm_default": models.Generator(build_default(exported, target), exported, weights),
        "relax_fusion": models.Generator(build(exported, target), exported, weights),
    }
    for runner in runners.values():
        runner.decode(1)  # starts the threads, touches the weights
    ids = tokens(max(prompts), exported.config.vocab_size)
    for step in ["decode", *(f"prefill {n}" for n in prompts)]:
        case = Case(name, step)
        cases.append(case)
        for round_ in range(rounds):
            say(f"{name}: {step}, round {round_ + 1} of {rounds}")
            for who, runner in runners.items():
                repeat = OURS_PER_ROUND if who == "relax_fusion" else 1
                case.seconds.setdefault(who, []).extend(
                    one(runner, step, ids) for _ in range(repeat)
                )
        add_torch(case, exported)


def one(runner: models.Generator, step: str, ids: np.ndarray) -> float:
    """Seconds of one prompt, or of one token after a short one."""
    if step == "decode":
        # Rows of the cache need not hold a real context to be read at full cost.
        runner.length = DECODE_CONTEXT
        return timed(lambda: runner.decode(int(ids[0])))
    runner.reset()
    return timed(lambda: runner.prefill(ids[: int(step.split()[1])]))


def add_torch(case: Case, exported: models.ExportedModel) -> None:
    """Add the seconds that torch needs for the matmuls with weights, and nothing else."""
    try:
        import torch
    except ImportError:
        return
    rows = 1 if case.step == "decode" else int(case.step.split()[1])
    vocab = exported.config.vocab_size
    matmuls = []
    for param in exported.params:
        # The embedding is also the head, which sees the last position only; tables are no matmul.
        if len(param.shape) == 2 and "wpe" not in param.name and "rope" not in param.name:
            out, width = param.shape
            m = 1 if out == vocab else rows
            matmuls.append((torch.ones(m, width), torch.ones(out, width)))
    with torch.no_grad():
        case.seconds["torch_matmuls_only"] = [
            timed(lambda: [x @ w.T for x, w in matmuls]) for _ in range(OURS_PER_ROUND + 1)
        ][1:]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_markdown(cases: list[Case]) -> str:
    rows = [("model", "step", "TVM default", "relax_fusion", "ratio", "goal", "torch matmuls only")]
    for case in cases:
        torch_s = case.seconds.get("torch_matmuls_only")
        rows.append(
            (
                case.model,
                case.step,
                format_seconds(case.median("tvm_default")),
                format_seconds(case.median("relax_fusion")),
                f"{case.ratio:.1f}x",
                f"{case.goal}x",
                format_seconds(statistics.median(torch_s)) if torch_s else "",
            )
        )
    return "float32, medians; both contenders in one process, in turn.\n\n" + (
        recording.markdown_table(rows)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["demo-llama", "demo-gpt2"])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[16, 64], help="prefill lengths (default: 16 64)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="default: 2")
    parser.add_argument("--results", type=Path, default=recording.RESULTS)
    args = parser.parse_args()
    facts = recording.facts()
    cases: list[Case] = []
    for name in args.models:
        measure_model(name, args.prompts, args.rounds, cases)
    record = {
        **facts,
        "cases": [
            {"model": c.model, "step": c.step, "ratio": c.ratio, "seconds": c.seconds}
            for c in cases
        ],
    }
    text = as_markdown(cases)
    files = recording.write("bench_demo", record, text, args.results)
    print(text)
    say("wrote " + " ".join(file.name for file in files))
    return 0 if all(case.ratio >= case.goal for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
