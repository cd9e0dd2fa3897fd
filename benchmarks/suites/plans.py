"""Models of transformers on this CPU by our fusion plans, by TVM's FuseOps, by TVM's own pipeline.

    python -m benchmarks run plans [--families vit swin] [--threads 2] [--rounds 6]

Families of small models with random weights, brought in by our importer.  ``ours`` is our
pipeline, ``fuseops`` the same with FuseOps in place of our plans, ``default`` what TVM compiles by
itself.  All take turns, and the least of the times counts.  Kernels are the calls of PrimFuncs in a
run, and errors the largest distance from float64, over the largest value.  Ours is to be no slower
than with FuseOps, of fewer kernels, and at most 1.2 times as far from float64 as TVM.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import tvm
from tvm import ir, relax

from benchmarks.report import Entry, Verdict
from benchmarks.suite import done
from benchmarks.suites.groups import pipeline_with
from benchmarks.suites.imported import Imported, made
from relax_fusion import Report, make_target
from relax_fusion.estimator import format_seconds
from relax_fusion.frontends.torch import from_exported_program
from relax_fusion.timing import in_turn, timed

LEAST, MOST_ERROR = 0.95, 1.2
"""How many times as fast as with FuseOps, less what noise is left; how many times TVM's error."""

EXACT = 2e-6
"""Errors in float32 below which the order of sums decides who is nearer."""

CALLS = 10
"""In a round."""


class Plans(Imported):
    """Families of small models."""

    name = "bench_plans"
    contenders = usual = ("ours", "fuseops", "default")
    dtypes = ("float32", "float16")
    head = ("family", "kernels: ours", "a layer", "FuseOps", "TVM", *usual, "error", "TVM's")

    def families(self) -> dict[str, Any]:
        return families()

    @torch.no_grad()
    def measured(self, item: tuple[str]) -> Entry:
        torch.manual_seed(0)
        model, inputs = made(self.makers[item[0]])
        kind = getattr(torch, self.args.dtype)
        model, inputs = model.to(kind), tuple(_as(x, kind) for x in inputs)
        mod = from_exported_program(torch.export.export(model, inputs, strict=False))
        exact = reference(model, inputs)
        args = [tvm.runtime.tensor(x.numpy()) for x in inputs]
        calls: dict[str, Callable[[], Any]] = {}
        kernels, results, layer = {}, {}, None
        for who in self.asked(item):
            report = Report()
            machine = relax.VirtualMachine(compiled(mod, who, report), tvm.cpu())
            kernels[who] = launches(machine, args)
            calls[who] = lambda main=machine["main"]: main(*args)
            results[who] = _first(calls[who]()).numpy().astype("float64")
            layer = next((c.per_layer for c in report.coverage if who == "ours"), layer)
        turns = {
            who: lambda _, c=call: [timed(c)[1] for _ in range(CALLS)]
            for who, call in calls.items()
        }
        found = in_turn(turns, self.args.rounds)
        errors = {w: float(abs(y - exact).max() / abs(exact).max()) for w, y in results.items()}
        return {
            "seconds": {who: min(taken) for who, taken in found.items()},
            "median_seconds": {who: statistics.median(taken) for who, taken in found.items()},
            "kernels": kernels,
            "layer": layer,
            "errors": errors,
            "wrong": [w for w, e in errors.items() if e > self.most_error(errors)],
        }

    def most_error(self, errors: dict[str, float]) -> float:
        least = EXACT if self.args.dtype == "float32" else EXACT * 2**13
        return max(MOST_ERROR * errors.get("default", np.inf), least)

    # --- what is said ----------------------------------------------------------------------

    def kind(self) -> Entry:
        return {"dtype": self.args.dtype, "threads": self.args.threads}

    def stem(self, record: Entry) -> str:
        return self.name if record["dtype"] == "float32" else f"{self.name}-{record['dtype']}"

    def intro(self, record: Entry) -> str:
        return f"{record['threads']} threads, {record['dtype']}, least times in turn."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        kernels, taken, errors = (entry[field] for field in ("kernels", "seconds", "errors"))
        counts = [
            kernels.get("ours"),
            entry["layer"],
            kernels.get("fuseops"),
            kernels.get("default"),
        ]
        times = [format_seconds(taken[who]) if who in taken else "" for who in self.usual]
        wrong = [f"{errors[who]:.1e}" if who in errors else "" for who in ("ours", "default")]
        return entry["family"], *("" if n is None else str(n) for n in counts), *times, *wrong

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        taken, kernels, family = entry["seconds"], entry["kernels"], entry["family"]
        if not {"ours", "fuseops"} <= set(taken):
            return []
        fewer = kernels["fuseops"] - kernels["ours"]
        return [
            (family, "times as fast as with FuseOps", LEAST, taken["fuseops"] / taken["ours"]),
            (family, "kernels fewer than with FuseOps", 1, float(fewer)),
        ]

    def verdicts(self, record: Entry) -> list[Verdict]:
        return [v for entry in done(record) for v in self.goals(entry, record)]


def reference(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> np.ndarray:
    """Return what a model computes in float64, or in float32 where it has an operator of that."""
    for kind in (torch.float64, torch.float32):
        try:
            found = model.to(kind)(*(_as(x, kind) for x in inputs))
        except RuntimeError:  # PyTorch's grouped matmuls
            continue
        return found.double().numpy()
    raise ValueError("the model computes nothing in float32")


def families() -> dict[str, Any]:
    """Return what makes a model and its inputs, by the attention that it computes."""
    from scripts._families import FAMILIES

    return FAMILIES


def compiled(mod: ir.IRModule, who: str, report: Report) -> tvm.runtime.Executable:
    """Compile a module by one of the contenders."""
    target = make_target("llvm")
    if who == "default":
        return tvm.compile(mod, target)
    return tvm.compile(mod, target, relax_pipeline=pipeline_with(who, target, {"report": report}))


def launches(machine: relax.VirtualMachine, args: list[Any]) -> int:
    """Return how many PrimFuncs a run calls."""
    count = 0

    def instrument(func: Any, name: str, before: bool, *_: Any) -> None:
        nonlocal count
        count += before and not name.startswith("vm.builtin")

    machine.set_instrument(instrument)
    machine["main"](*args)
    machine.set_instrument(None)
    return count


def _as(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.to(kind) if x.is_floating_point() else x


def _first(result: Any) -> Any:
    return result if hasattr(result, "numpy") else result[0]
