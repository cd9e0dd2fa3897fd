"""`demo`: that outputs agree, and by how much they may differ."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from relax_fusion import models
from relax_fusion.cli import build, main
from relax_fusion.models import zoo
from relax_fusion.report import FunctionGraph, Node, Report
from relax_fusion.studio.demo import Comparison, Run, _end
from relax_fusion.studio.measure import compare

from ..cli.test_cli import short
from ..support.quick import loaded, quick_host

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def as_library(made):
    """Return a function that loads what `made` compiles for this machine."""

    def compiled(exported, target, **options):
        executable = made(exported, target, **options)
        return loaded(executable) if target.kind.name == "llvm" else executable

    return compiled


@pytest.mark.slow
def test_quick_demo_agrees(monkeypatch, capsys):
    monkeypatch.setattr("relax_fusion.studio.demo.host_target", quick_host)
    for name, made in {"build": short, "build_default": build.build_default}.items():
        monkeypatch.setattr(f"relax_fusion.studio.demo.{name}", as_library(made))
    assert main(["demo", "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [m["model"] for m in document["models"]] == ["demo-llama", "demo-gpt2"]
    for model in document["models"]:
        assert model["agrees"] and model["fused"]
        assert model["prefill_s"].keys() == {"tvm_default", "relax_fusion"}
    assert document["cross_compile"]["cuda_kernels"] > 0
    assert "prefill" not in document["cross_compile"]["functions"]


def test_the_table_comes_first_and_says_what_was_not_run():
    run = Run(2.0, 1.0)
    fused = Run(0.5, 0.25)
    report = Report()
    kernels = ("take", "qkv", "ffn", "qkv", "ffn", "head")
    nodes = tuple(Node(name, name, is_kernel=True) for name in kernels)
    report.material.after.append(FunctionGraph("decode", nodes))
    operators = ("take", *("norm", "matmul", "silu") * 2, "matmul")
    one = Comparison("one", report, run, fused, 0.0, 1.0, run, operators)
    other = Comparison("other", Report(), run, fused, 0.0, 1.0)
    cross = {"fused": {}, "functions": ["decode"], "model": "one", "seconds": 1.0}
    text = _end([one, other], {**cross, "cuda_kernels": 3, "arch": "sm_90a"}, 9.0)
    head, _, first, *rest = text.strip().splitlines()
    assert head.split()[-3:] == ["speed-up", "torch", "speed-up"]
    times = ["one", "prefill,", "16", "tokens", "500", "ms", "2", "s", "4.0x", "2", "s", "4.0x"]
    assert first.split() == times and rest[1].split() == ["other", *times[1:9]]
    assert "multiplied by 16" in rest[3]
    assert "before, 3 operators: norm, matmul, silu" in text
    assert "after, 2 kernels: qkv, ffn" in text and "What to do next" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_rounding_explains(dtype: str) -> None:
    """Logits with errors of a rounding agree; unrelated ones do not, however deep the model."""
    rng = np.random.default_rng(0)
    model = models.export(zoo.zoo_config("llama-3.1-8b"), dtype=dtype)
    own, other = (rng.normal(size=(1, 4096)).astype("float32") for _ in range(2))
    step = float(ml_dtypes.finfo(dtype).eps)
    worst, tolerance = compare([own], [own * (1 + step)], model)
    assert 0 < worst <= tolerance
    worst, tolerance = compare([own], [other], model)
    assert worst > tolerance


@pytest.mark.parametrize("worst, agrees", [(1e-6, True), (1e-2, False), (float("nan"), False)])
def test_demo_calls_a_difference_beyond_rounding_a_disagreement(worst, agrees):
    run = Run(1.0, 1.0)
    assert Comparison("x", Report(), run, run, worst, 1e-4).agrees is agrees
