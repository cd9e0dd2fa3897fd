"""Prefill and decode of the demo models on this CPU: TVM's default pipeline against ours.

Both are compiled and run in one process, in alternation, with the same weights and tokens.  Where
torch is installed, the time of the model's matmuls alone in torch is given as a yardstick.
The goal is decode at least 1.5 times and prefill at least 10 times as fast as TVM's default.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser
from functools import partial
from typing import Any

from benchmarks.report import Entry, Verdict
from benchmarks.suite import Suite
from relax_fusion import host_target, models
from relax_fusion.cli.build import build, build_default
from relax_fusion.estimator import format_seconds
from relax_fusion.studio.measure import Plan, Run, measure
from relax_fusion.timing import in_turn, seconds

GOALS = {"decode": 1.5, "prefill": 10.0}
REPEATS = {"tvm": 1, "ours": 5}
"""Runs in a round: TVM's default is slow enough to be steady."""


class Demo(Suite):
    """Prompts of the demo models, and tokens behind them."""

    name = "bench_demo"
    key, axes = ("model", "prompt"), ("models", "prompts")
    has_target, must_reach = False, True
    head = (
        *("model", "prompt", "prefill by TVM default", "ours", "ratio"),
        *("decode by TVM default", "ours", "ratio", "prefill, torch's matmuls only"),
    )

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add, lengths = parser.add_argument, "prefill lengths (default: 16 64)"
        add("--models", nargs="+", default=["demo-llama", "demo-gpt2"])
        add("--prompts", type=int, nargs="+", default=[16, 64], help=lengths)
        add("--rounds", type=int, default=2, help="default: 2")

    def begin(self) -> None:
        self.compiled = ("", None, {})

    def runs(self, model: str) -> tuple[Any, dict[str, Any]]:
        """Return an exported model and what runs it; those of the last one are kept."""
        if model != self.compiled[0]:
            print(f"{model}: compiling", file=sys.stderr)
            length, target = max(self.args.prompts) + 128, host_target()
            exported = models.export(models.zoo_config(model), max_seq_len=length)
            weights = models.random_weights(exported)
            made = {"tvm": build_default(exported, target), "ours": build(exported, target)}
            runs = {who: partial(measure, each, exported, weights) for who, each in made.items()}
            self.compiled = model, exported, runs
        return self.compiled[1:]

    def measured(self, item: tuple[str, int]) -> Entry:
        model, prompt = item
        exported, runs = self.runs(model)

        def turn(who: str, _: int) -> list[Run]:
            return [runs[who](Plan(prompt, REPEATS[who], REPEATS[who]))]

        found = in_turn({who: partial(turn, who) for who in runs}, self.args.rounds)
        steps = {
            step: {
                who: [s for run in each for s in getattr(run, f"{step}_s")]
                for who, each in found.items()
            }
            for step in GOALS
        }
        return {"seconds": steps, "torch_matmuls_s": torch_matmuls(prompt, exported)}

    def intro(self, record: Entry) -> str:
        return "float32, medians; both contenders in one process, in turn."

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        medians = {step: medians_of(entry, step) for step in GOALS}
        name = self.name_of(entry)
        return [
            (f"{name} {step}", "vs TVM default", GOALS[step], theirs / ours)
            for step, (theirs, ours) in medians.items()
        ]

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        cells = []
        for step in ("prefill", "decode"):
            theirs, ours = medians_of(entry, step)
            cells += [format_seconds(theirs), format_seconds(ours), f"{theirs / ours:.1f}x"]
        torch_s = entry["torch_matmuls_s"]
        cells.append(format_seconds(statistics.median(torch_s)) if torch_s else "")
        return entry["model"], str(entry["prompt"]), *cells


def medians_of(entry: Entry, step: str) -> tuple[float, ...]:
    """Return the seconds of TVM's default and ours."""
    return tuple(statistics.median(entry["seconds"][step][who]) for who in ("tvm", "ours"))


def torch_matmuls(rows: int, exported: models.ExportedModel) -> list[float]:
    """Return the seconds that torch needs for the matmuls with weights, and nothing else."""
    try:
        import torch
    except ImportError:
        return []
    matmuls = []
    for param in exported.params:
        # The embedding is also the head, which sees the last position only; tables are no matmul.
        if len(param.shape) == 2 and "wpe" not in param.name and "rope" not in param.name:
            out, width = param.shape
            m = 1 if out == exported.config.vocab_size else rows
            matmuls.append((torch.ones(m, width), torch.ones(out, width)))
    with torch.no_grad():
        times = [seconds(lambda: [x @ w.T for x, w in matmuls]) for _ in range(6)]
    return times[1:]
