"""Models of transformers on this CPU: ours, PyTorch, inductor, onnxruntime, OpenVINO.

    python -m benchmarks run imported [--families vit whisper_enc] [--threads 2] [--rounds 6]

The small models of ``scripts/import_models.py`` with random weights, float32.  Ours is
``torch.compile(backend="relax_fusion")``, inductor PyTorch's own backend of that; onnxruntime and
OpenVINO read the file that PyTorch's exporter writes, where they are installed.  All take turns,
and the least of the times counts.  Results are compared with float64.  Every model is to be as fast
as in PyTorch, and on average 1.5 times, and 1.15 times as fast as by inductor.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Collection
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Entry, Verdict
from benchmarks.sessions import sentence
from benchmarks.suite import Suite, done
from relax_fusion.estimator import format_seconds
from relax_fusion.timing import in_turn, timed

LEAST, LEAST_MEAN, LEAST_INDUCTOR = 1.0, 1.5, 1.15
"""How many times as fast as PyTorch a model is to be; all on average; and as inductor."""

CALLS = 15
"""In a round."""

Call = Callable[[], Any]
Make = Callable[[str], tuple[Any, ...]]


class Imported(Suite):
    """Families of small models."""

    name = "bench_imported"
    key, axes = ("family",), ("families",)
    has_target, must_reach = False, True
    contenders = usual = ("ours", "eager", "inductor", "onnxruntime", "openvino")
    head = (
        "family",
        "ours",
        "PyTorch eager",
        "inductor",
        "onnxruntime",
        "OpenVINO",
        "error",
        "PyTorch's",
    )

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--families", nargs="+", default=[], metavar="FAMILY", help="default: all")
        add("--rounds", type=int, default=6)
        add("--threads", type=int, default=1)

    def begin(self) -> None:
        os.environ["TVM_NUM_THREADS"] = str(self.args.threads)
        torch.set_num_threads(self.args.threads)
        self.makers = self.families()
        unknown = [name for name in self.args.families if name not in self.makers]
        if unknown:
            raise SystemExit(f"{unknown[0]!r} is no family; there are {', '.join(self.makers)}")

    def families(self) -> dict[str, Any]:
        """Return what makes each model."""
        return families()

    def items(self) -> list[tuple[str]]:
        return [(family,) for family in self.args.families or self.makers]

    def absent(self, item: Any) -> Collection[str]:
        return [who for who in ("onnxruntime", "openvino") if find_spec(who) is None]

    def is_complete(self, entry: Entry, item: Any) -> bool:
        return "error" not in entry and set(self.asked(item)) <= set(entry["seconds"])

    @torch.no_grad()
    def measured(self, item: tuple[str]) -> Entry:
        """Time every contender in turn, round after round."""
        torch.manual_seed(0)
        model, inputs = made(self.makers[item[0]])
        threads = self.args.threads
        makers: dict[str, Callable[[], Call]] = {
            "ours": partial(compiled, model, inputs, "relax_fusion"),
            "eager": lambda: lambda: model(*inputs),
            "inductor": partial(compiled, model, inputs, "inductor"),
            "onnxruntime": partial(by_onnxruntime, model, inputs, threads),
            "openvino": partial(by_openvino, model, inputs, threads),
        }
        calls: dict[str, Call] = {}
        failed: dict[str, str] = {}
        for who in self.asked(item):
            try:
                calls[who] = makers[who]()
                calls[who]()
            except Exception as err:  # of three other libraries; the entry says what failed
                failed[who] = sentence(err)
        ready = {who: partial(turn, call) for who, call in calls.items() if who not in failed}
        found = in_turn(ready, self.args.rounds)
        results = {who: torch.as_tensor(calls[who]()).double() for who in found}
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        exact = model.double()(*wide)
        errors = {
            who: float((y - exact).abs().max() / exact.abs().max()) for who, y in results.items()
        }
        return {
            "seconds": {who: min(s) for who, s in found.items()},
            "median_seconds": {who: statistics.median(s) for who, s in found.items()},
            "errors": errors,
            "wrong": ["ours"] * (errors.get("ours", 0.0) > 4 * errors.get("eager", 1.0)),
            "failed": failed,
        }

    # --- what is said ----------------------------------------------------------------------

    def intro(self, record: Entry) -> str:
        return (
            f"{self.args.threads} threads, float32, two layers, 256 wide, batches of two; least "
            "times, and in brackets theirs over ours.  Errors are the largest, over the largest "
            "value."
        )

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        taken, errors = entry["seconds"], entry["errors"]
        ours = taken.get("ours")
        cells = [format_seconds(ours) if ours else ""]
        for who in self.contenders[1:]:
            ratio = f" ({taken[who] / ours:.2f}x)" if ours and who in taken else ""
            cells.append(format_seconds(taken[who]) + ratio if who in taken else "")
        shown = (f"{errors[who]:.1e}" if who in errors else "" for who in ("ours", "eager"))
        return entry["family"], *cells, *shown

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        taken = entry["seconds"]
        if not {"ours", "eager"} <= set(taken):
            return []
        return [(entry["family"], "vs PyTorch eager", LEAST, taken["eager"] / taken["ours"])]

    def verdicts(self, record: Entry) -> list[Verdict]:
        each = [v for e in done(record) for v in self.goals(e, record)]
        if not each:
            return []
        mean = statistics.mean(measured for *_, measured in each)
        found = [*each, ("the mean", "vs PyTorch eager", LEAST_MEAN, mean)]
        taken = [entry["seconds"] for entry in done(record)]
        ratios = [t["inductor"] / t["ours"] for t in taken if {"inductor", "ours"} <= set(t)]
        if ratios:
            found.append(("the mean", "vs inductor", LEAST_INDUCTOR, statistics.mean(ratios)))
        return found


def families() -> dict[str, Make]:
    """Return what makes a model and its inputs, by the attention that it computes."""
    from scripts.import_models import FAMILIES

    return FAMILIES


def turn(call: Call, _: int) -> list[float]:
    return [timed(call)[1] for _ in range(CALLS)]


def made(make: Make) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and its inputs, with PyTorch's attention if it has that."""
    try:
        model, inputs = make("sdpa")[:2]
    except ValueError:
        model, inputs = make("eager")[:2]
    return model.eval(), inputs


def compiled(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], backend: str) -> Call:
    """Compile a model by a backend of ``torch.compile``."""
    torch._dynamo.reset()
    fast = torch.compile(model, backend=backend)
    return lambda: fast(*inputs)


def by_onnxruntime(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with tempfile.TemporaryDirectory() as folder:
        path = as_onnx(model, inputs, Path(folder))
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feed = dict(zip(names, (x.numpy() for x in inputs), strict=True))
    return lambda: session.run(None, feed)[0]


def by_openvino(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], threads: int) -> Call:
    import openvino

    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    with tempfile.TemporaryDirectory() as folder:
        path = as_onnx(model, inputs, Path(folder))
        compiled = openvino.Core().compile_model(path, "CPU", options)
    arrays, request = [x.numpy() for x in inputs], compiled.create_infer_request()
    return lambda: request.infer(arrays)[0]


def as_onnx(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path) -> str:
    """Write a model as PyTorch's current exporter does; return the file's name."""
    path = folder / "model.onnx"
    torch.onnx.export(
        model, inputs, path, dynamo=True, external_data=False, opset_version=18, verbose=False
    )
    return str(path)
