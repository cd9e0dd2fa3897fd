"""Prefill and decode of the demo models on this CPU: TVM's default pipeline against ours.

Both are compiled and run in one process, in alternation, with the same weights and tokens.  Where
torch is installed, the time of the model's matmuls alone in torch is given as a yardstick.
The goal is decode at least 1.5 times and prefill at least 10 times as fast as TVM's default.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.host_timing import in_turn, seconds
from benchmarks.report import Verdict
from benchmarks.runner import Entry, Suite
from relax_fusion import host_target, models
from relax_fusion.cli.build import build, build_default
from relax_fusion.cli.measure import tokens
from relax_fusion.estimator import format_seconds

GOALS = {"decode": 1.5, "prefill": 10.0}
DECODE_CONTEXT = 16
REPEATS = {"ours": 5, "tvm": 1}
"""Runs in a round: TVM's default is slow enough to be steady."""

Item = tuple[str, str]
"""A model, and a step: ``decode``, or ``prefill`` and a number of tokens."""


class Demo(Suite):
    """A token, and prompts, of the demo models."""

    name = "bench_demo"
    key = ("model", "step")
    has_target = False
    must_reach = True
    head = ("model", "step", "TVM default", "relax_fusion", "ratio", "torch matmuls only")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add, lengths = parser.add_argument, "prefill lengths (default: 16 64)"
        add("--models", nargs="+", default=["demo-llama", "demo-gpt2"])
        add("--prompts", type=int, nargs="+", default=[16, 64], help=lengths)
        add("--rounds", type=int, default=2, help="default: 2")

    def items(self) -> Iterator[Item]:
        steps = ["decode", *(f"prefill {n}" for n in self.args.prompts)]
        return ((model, step) for model in self.args.models for step in steps)

    def facts(self, item: Item) -> Entry:
        return dict(zip(self.key, item, strict=True))

    def compiled(self, model: str) -> None:
        """Compile a model, unless it is that of the last case."""
        if model == getattr(self, "model", None):
            return
        print(f"{model}: compiling", file=sys.stderr)
        length = max(self.args.prompts) + 128
        self.model, target = model, host_target()
        self.exported = models.export(models.zoo_config(model), max_seq_len=length)
        weights = models.random_weights(self.exported)
        self.runners = {
            who: models.Generator(make(self.exported, target), self.exported, weights)
            for who, make in (("tvm", build_default), ("ours", build))
        }
        for runner in self.runners.values():
            runner.decode(1)  # starts the threads, touches the weights

    def measured(self, item: Item) -> Entry:
        model, step = item
        self.compiled(model)
        ids = tokens(max(self.args.prompts), self.exported.config.vocab_size)

        def timer(who: str, _: int) -> list[float]:
            return [one(self.runners[who], step, ids) for _ in range(REPEATS[who])]

        found = in_turn({who: partial(timer, who) for who in self.runners}, self.args.rounds)
        return {"seconds": {**found, **torch_matmuls(step, self.exported)}}

    def intro(self, record: Entry) -> str:
        return "float32, medians; both contenders in one process, in turn."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        medians = {who: statistics.median(s) for who, s in entry["seconds"].items()}
        times = {who: format_seconds(s) for who, s in medians.items()}
        ratio = f"{medians['tvm'] / medians['ours']:.1f}x"
        names = (entry["model"], entry["step"], times["tvm"], times["ours"])
        return *names, ratio, times.get("torch_matmuls_only", "")

    def verdicts(self, record: Entry) -> list[Verdict]:
        found = []
        for e in (e for e in record["cases"] if "error" not in e):
            theirs, ours = (statistics.median(e["seconds"][who]) for who in ("tvm", "ours"))
            goal = GOALS[e["step"].split()[0]]
            found.append((self.name_of(e), "vs TVM default", goal, theirs / ours))
        return found


def one(runner: models.Generator, step: str, ids: np.ndarray) -> float:
    """Return the seconds of one prompt, or of one token after a short one."""
    if step == "decode":
        # Rows of the cache need not hold a real context to be read at full cost.
        runner.length = DECODE_CONTEXT
        return seconds(lambda: runner.decode(int(ids[0])))
    runner.reset()
    return seconds(lambda: runner.prefill(ids[: int(step.split()[1])]))


def torch_matmuls(step: str, exported: models.ExportedModel) -> dict[str, list[float]]:
    """Return the seconds that torch needs for the matmuls with weights, and nothing else."""
    try:
        import torch
    except ImportError:
        return {}
    rows = 1 if step == "decode" else int(step.split()[1])
    matmuls = []
    for param in exported.params:
        # The embedding is also the head, which sees the last position only; tables are no matmul.
        if len(param.shape) == 2 and "wpe" not in param.name and "rope" not in param.name:
            out, width = param.shape
            m = 1 if out == exported.config.vocab_size else rows
            matmuls.append((torch.ones(m, width), torch.ones(out, width)))
    call: Callable[[], Any] = lambda: [x @ w.T for x, w in matmuls]  # noqa: E731
    with torch.no_grad():
        call()
        return {"torch_matmuls_only": [seconds(call) for _ in range(REPEATS["ours"])]}
