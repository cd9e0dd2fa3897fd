"""`partition` and `build`: the same kernels in one step and in two."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tvm import relax, tirx

import relax_fusion
from relax_fusion import PipelineError, Report
from relax_fusion.models import export, zoo_config

from .support.chains import Chain, calls, module, outputs
from .support.quick import machine, quick_host

CHAIN = Chain(
    "main",
    "x[n,32] W[32,48] p[48] V[48,16]",
    "h = R.nn.gelu(R.add(R.matmul(x, W), p)); s = R.sin(h); y = R.matmul(s, V)",
    *("y", {"n": 5}),
)
BOUNDS = {"variable_bounds": CHAIN.sizes}


def test_in_two_steps_and_in_one() -> None:
    mod, report = module([CHAIN]), Report()
    parts = relax_fusion.partition(mod, quick_host(), report=report, **BOUNDS)
    assert "call_tir" in calls(parts["main"]) and "sin" in calls(parts["main"])
    assert [d.pattern for d in report.fused] != []
    built = [relax_fusion.build(m, quick_host(), **BOUNDS) for m in (parts, mod)]
    found = [outputs(machine(b), "main", CHAIN.arrays())[0] for b in built]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_both_report_the_same_of_what_was_fused(target: str) -> None:
    made = Report(), Report()
    relax_fusion.partition(module([CHAIN]), target, report=made[0], **BOUNDS)
    relax_fusion.build(module([CHAIN]), target, report=made[1], **BOUNDS)
    decided = (json.loads(r.to_json())["decisions"] for r in made)
    texts = [(d, r.leftovers, r.declined, r.device) for d, r in zip(decided, made, strict=True)]
    assert texts[0] == texts[1] and made[0].decisions


def test_again_is_the_same() -> None:
    parts, report = relax_fusion.partition(module([CHAIN]), "llvm"), Report()
    again = relax_fusion.partition(parts, "llvm", report=report)
    assert calls(again["main"]) == calls(parts["main"])
    assert report.fused == []


GIVEN = {
    "None": (lambda: None, "TVMScript"),
    "an exported model": (lambda: export(zoo_config("demo-gpt2")), "its .mod"),
    "a function": (lambda: module([CHAIN])["main"], "from_expr"),
    "a PrimFunc": (lambda: tirx.PrimFunc([], tirx.Evaluate(0)), "call_tir"),
    "a path": (lambda: "path.pt2", "'path.pt2' may be a file; read it by"),
    "a module of torch": (lambda: pytest.importorskip("torch").nn.ReLU(), "torch.export.export"),
    "a model of ONNX": (lambda: pytest.importorskip("onnx").ModelProto(), "from_onnx"),
    "a module of TVM": (lambda: relax.frontend.nn.ReLU(), "export_tvm"),
}


@pytest.mark.parametrize("make, says", GIVEN.values(), ids=GIVEN)
def test_what_is_no_module(make: Callable[[], Any], says: str) -> None:
    tune = partial(relax_fusion.tune, database="never written")
    for call in (relax_fusion.partition, relax_fusion.build, tune):
        with pytest.raises(relax_fusion.ModuleTypeError, match=f"mod is .*{says}"):
            call(make(), target="llvm")


def test_an_exported_program() -> None:
    torch = pytest.importorskip("torch")
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    with pytest.raises(relax_fusion.ModuleTypeError, match="from_exported_program first"):
        relax_fusion.build(program, "llvm")


def test_an_unknown_argument() -> None:
    with pytest.raises(PipelineError, match="no_such"):
        relax_fusion.partition(module([CHAIN]), "llvm", no_such=1)
