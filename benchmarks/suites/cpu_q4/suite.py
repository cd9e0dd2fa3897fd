"""A token by 4-bit weights on this CPU: ours, with rows of int8, in float32, and two peers.

    python -m benchmarks run cpu_q4 [--threads 2] [--layers 22] [--rows 1 4]

A decoder of TinyLlama's widths with random weights, in groups of 32 with float32 scales, without
its attention, which is no matter of weights: norms, projections, feed-forward networks and
residuals are the same graph for all.  Rows are float32.  onnxruntime and OpenVINO are timed with
sums in float32, as ours are, and with rows rounded to int8 ("int8"), which is another result: the
errors against float64 stand beside the times.  All take turns, and the least of the times counts.
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Collection
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from benchmarks.report import Entry, Verdict
from benchmarks.sessions import sentence
from benchmarks.suite import Suite
from benchmarks.suites.cpu_q4 import graphs
from benchmarks.suites.cpu_q4.model import Model, Widths
from relax_fusion import host_target
from relax_fusion.estimator import format_seconds
from relax_fusion.timing import in_turn, timed

GOALS = {"float32": 1.5, **dict.fromkeys(("ort", "ort_int8", "openvino", "openvino_int8"), 0.9)}
"""Least ratios of their times to ours."""

LABELS = {
    "int8": "ours, int8",
    "float32": "ours, float32",
    "ort": "onnxruntime",
    "ort_int8": "onnxruntime, int8",
    "openvino": "OpenVINO",
    "openvino_int8": "OpenVINO, int8",
}
WIDTHS = Widths()

CALLS = 5
"""In a round."""

PAUSE_S = 0.25
"""Before each turn, for the threads of the contender before it to stop waiting for work."""


class CpuQ4(Suite):
    """Numbers of rows of one model."""

    name = "bench_cpu_q4"
    key, axes = ("rows",), ("rows",)
    has_target = False
    contenders = usual = ("ours", *LABELS)
    plain: ClassVar = {"threads": 2}
    head = ("rows", "ours", *LABELS.values(), "errors, in this order")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--rows", type=int, nargs="+", default=[1, 4])
        add("--layers", type=int, default=22)
        add("--threads", type=int, default=2)
        add("--rounds", type=int, default=6)

    def begin(self) -> None:
        os.environ["TVM_NUM_THREADS"] = str(self.args.threads)
        self.session.facts["layers"] = self.args.layers
        self.calls: dict[str, graphs.Timed] = {}
        self.failed: dict[str, str] = {}

    def absent(self, item: Any) -> Collection[str]:
        missing = {"ort": "onnxruntime", "openvino": "openvino"}
        return [
            who for who in LABELS if find_spec(missing.get(who.partition("_")[0], "tvm")) is None
        ]

    def is_complete(self, entry: Entry, item: Any) -> bool:
        return "error" not in entry and set(self.asked(item)) <= set(entry["seconds"])

    def compile(self, item: Any) -> None:
        """Compile the model for all, once."""
        threads, target = self.args.threads, host_target()
        self.model = model = Model(WIDTHS, self.args.layers)
        makers: dict[str, Callable[[], graphs.Timed]] = {
            "ours": partial(graphs.by_us, model, True, target),
            "int8": partial(graphs.by_us, model, True, target, allow_int8_rows=True),
            "float32": partial(graphs.by_us, model, False, target),
            "ort": partial(graphs.by_onnxruntime, model, threads, 0),
            "ort_int8": partial(graphs.by_onnxruntime, model, threads, 4),
            "openvino": partial(graphs.by_openvino, model, threads, 0),
            "openvino_int8": partial(graphs.by_openvino, model, threads, 32),
        }
        x = np.ones((1, WIDTHS.hidden), "float32")
        for who in self.asked(item):
            try:
                self.calls[who] = makers[who]()
                self.calls[who](x)
            except Exception as err:
                self.failed[who] = sentence(err)
                self.calls.pop(who, None)

    def measured(self, item: tuple[int]) -> Entry:
        """Time every contender in turn, round after round."""
        if not self.calls:
            self.compile(item)
        x = np.random.default_rng(1).standard_normal((item[0], WIDTHS.hidden)).astype("float32")

        def turn(call: graphs.Timed, _: int) -> list[float]:
            time.sleep(PAUSE_S)
            return [timed(lambda: call(x))[1] for _ in range(CALLS)]

        found = in_turn({who: partial(turn, c) for who, c in self.calls.items()}, self.args.rounds)
        exact = self.model.exact(x)
        errors = {
            who: float(np.abs(call(x) - exact).max() / np.abs(exact).max())
            for who, call in self.calls.items()
        }
        return {
            "seconds": {who: min(s) for who, s in found.items()},
            "median_seconds": {who: statistics.median(s) for who, s in found.items()},
            "bytes": sum(w.bytes for w in self.model.weights),
            "errors": errors,
            "wrong": ["ours"] * (errors.get("ours", 0.0) > 1.2 * errors.get("float32", 1.0)),
            "failed": self.failed,
        }

    # --- what is said ----------------------------------------------------------------------

    def intro(self, record: Entry) -> str:
        return (
            f"{record['threads']} threads, {record['layers']} layers of TinyLlama's widths, "
            "attention left out.  Least times, and in brackets theirs over ours.  Errors are the "
            "largest against float64, over the largest value."
        )

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        taken, errors = entry["seconds"], entry["errors"]
        ours = taken.get("ours")
        cells = [format_seconds(ours) if ours else ""]
        for who in LABELS:
            ratio = f" ({taken[who] / ours:.2f}x)" if ours and who in taken else ""
            cells.append(format_seconds(taken[who]) + ratio if who in taken else "")
        told = ", ".join(f"{errors[who]:.0e}" for who in ("ours", *LABELS) if who in errors)
        return str(entry["rows"]), *cells, told

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        taken = entry["seconds"]
        if entry["rows"] != 1 or "ours" not in taken:
            return []
        return [
            (self.name_of(entry), f"vs {LABELS[who]}", goal, taken[who] / taken["ours"])
            for who, goal in GOALS.items()
            if who in taken
        ]
