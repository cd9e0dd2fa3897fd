"""Predicted times of whole models against those that were measured on an H200 and kept.

    python -m benchmarks judge models [--cases decode prefill encoders]

A decoded token and a prompt of LLaMA and GPT-2, BERT and GPT-2 whole: each is compiled as far as
its kernels are chosen, and what they add to a call is summed up, fused chains and others.  Times
are those of CUDA graphs in `bench_decode`, `bench_prefill` and `bench_encoders`.  No GPU is needed.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tvm import ir

from benchmarks.report import Entry
from benchmarks.runner import read
from benchmarks.suite import Suite, done
from relax_fusion import Report, make_target
from relax_fusion.cli.explain import _PHASES
from relax_fusion.hardware.target import device_of
from relax_fusion.options import make_options
from relax_fusion.phases import run_phases
from relax_fusion.report.calls import call_at

RESULTS, DATE = Path(__file__).parents[1] / "results", "2026-11-29"
DECODE = ("batch1", "batch8", "batch1-q4f16_1", "batch1-gpt2", "batch1-llama-3.2-1b")
GOAL = 0.08
"""What predictions may be off in the mean."""


class Item(NamedTuple):
    """A model that was timed.

    Parameters
    ----------
    kind : str
        Which benchmark timed it.
    model, sizes : str
        What it is.
    function : str
        Which was called.
    values : dict of str to int
        Its symbolic sizes.
    measured_s : float
        Seconds of ours.
    entry : dict
        Of the record.
    """

    kind: str
    model: str
    sizes: str
    function: str
    values: dict[str, int]
    measured_s: float
    entry: Entry

    def module(self, target: str) -> ir.IRModule:
        """Return the model, with random weights or none."""
        entry = self.entry
        if self.kind == "encoders":
            from benchmarks.suites import encoders

            sizes = entry["case"], entry["sequences"], entry["tokens"]
            return encoders.imported(encoders.Item(*sizes, target))[0]
        from benchmarks.suites.decode import step

        asked = {name: entry[name] for name in ("model", "vocab", "quantization", "batch")}
        longest = max(self.values.values())
        made = step.export_model(Namespace(**asked), entry["layers"], self.function, longest)
        return made.mod


def _entries(name: str) -> list[Entry]:
    return done(read(RESULTS / f"{DATE}-bench_{name}.json"))


def kept() -> Iterator[Item]:
    """Yield what was timed."""
    for name in DECODE:
        for e in _entries(f"decode-{name}"):
            text = f"batch {e['batch']}, context {e['context']} {e['quantization']}".strip()
            sizes, seconds = {"total_len": e["context"] + 1}, e["times"]["graphs"]["token_s"]
            yield Item("decode", e["model"], text, "decode", sizes, seconds, e)
    for e in _entries("prefill-batch1"):
        text = f"{e['tokens']} tokens, {e['layers']} layers"
        sizes = {"seq_len": e["tokens"], "total_len": e["tokens"]}
        yield Item("prefill", e["model"], text, "prefill", sizes, 1e-6 * e["us"]["graph"], e)
    for e in _entries("encoders"):
        text, seconds = f"{e['sequences']} x {e['tokens']} tokens", 1e-6 * e["us"]["ours"]
        yield Item("encoders", e["case"], text, "main", {}, seconds, e)


class JudgeModels(Suite):
    """Models whose times were kept."""

    name = "judge_models"
    cases = ("decode", "prefill", "encoders")
    key = ("kind", "model", "sizes")
    head = (*key, "measured, us", "predicted, us", "predicted / measured", "fused", "others")

    def items(self) -> list[Item]:
        return [item for item in kept() if item.kind in self.args.cases]

    def facts(self, item: Item) -> Entry:
        return {name: getattr(item, name) for name in self.key}

    def is_complete(self, entry: Entry, item: Any) -> bool:
        return "error" not in entry

    def measured(self, item: Item) -> Entry:
        """Predict a call of a model."""
        target, report = self.args.target, Report()
        told = {"report": report, "variable_bounds": item.values}
        run_phases(make_options(target, told), _PHASES)(item.module(target))
        spec = device_of(make_target(target))
        call = call_at(report, item.function, item.values, spec)
        return {
            "measured_s": item.measured_s,
            "fused_s": call.fused_s,
            "others_s": call.rest_s,
            "predicted_s": call.seconds,
        }

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        names = ("measured_s", "predicted_s", "fused_s", "others_s")
        measured, predicted, *parts = (f"{1e6 * entry[name]:.0f}" for name in names)
        ratio = f"{entry['predicted_s'] / entry['measured_s']:.3f}"
        return *map(str, self.key_of(entry)), measured, predicted, ratio, *parts

    def intro(self, record: Entry) -> str:
        ratios = [e["predicted_s"] / e["measured_s"] for e in done(record)]
        if not ratios:
            return ""
        errors = [abs(ratio - 1) for ratio in ratios]
        mean = statistics.fmean(errors)
        return (
            f"Off by {mean:.1%} in the mean (the goal is {GOAL:.0%}: "
            f"{'reached' if mean <= GOAL else 'missed'}), {max(errors):.1%} at most."
        )
