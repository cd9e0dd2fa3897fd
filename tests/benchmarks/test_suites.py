"""Whole runs of suites on small sizes, a CPU in place of a GPU, and of their command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm

import relax_fusion
from benchmarks.__main__ import main, suite_of
from benchmarks.judge import cpu as judge_cpu
from benchmarks.suites import compile as compiling
from benchmarks.suites import cpu, cpu_int8, groups, imported, launch, plans
from benchmarks.suites.cpu_q4 import graphs
from benchmarks.suites.cpu_q4 import model as q4_model
from benchmarks.suites.cpu_q4 import suite as cpu_q4
from benchmarks.suites.matmul import cases
from relax_fusion.launch.cache import KernelCache
from relax_fusion.workload import DynamicDim, NormMatmul, Projection

from ..support.quick import machine, quickly
from ..support.tiny_llama import TINY

COMPILE = tvm.compile
MODEL = replace(TINY, vocab_size=96)


def test_the_library_knows_no_benchmark() -> None:
    imports = re.compile(r"^\s*(?:from|import) (?:benchmarks|scripts)\b", re.MULTILINE)
    for path in Path(relax_fusion.__file__).parent.rglob("*.py"):
        assert not imports.search(path.read_text(encoding="utf-8")), path


@pytest.fixture
def run(tmp_path, monkeypatch, cpu_in_place_of_a_gpu):
    """Runs a benchmark on small sizes, and returns the exit status and the record."""
    monkeypatch.setitem(cases.SIZES, "tiny", cases.Size(64, 96, 80, 8))
    monkeypatch.setattr(
        cases, "GPT2", cases.Size(32, 48, 48, 8, biases=True, activation="gelu_tanh")
    )
    for module in (cpu, judge_cpu):
        monkeypatch.setattr(module, "pin_threads", lambda: None)
        monkeypatch.setattr(module, "use_all_cores", lambda: 1)
    monkeypatch.setattr(cpu, "peak_gflops", lambda cores: 50.0)
    monkeypatch.setattr(cpu, "read_gbytes_per_s", lambda cores: 20.0)
    monkeypatch.setattr(cpu, "PAUSE_S", 0.0)

    def call(words: str) -> tuple[int, dict]:
        status = main([*words.split(), "--results", str(tmp_path)])
        (path,) = tmp_path.glob("*.json")
        assert path.with_suffix(".md").read_text(encoding="utf-8").count("|---") > 0
        return status, json.loads(path.read_text(encoding="utf-8"))

    return call


def test_cpu(run, monkeypatch) -> None:
    monkeypatch.setitem(cpu.MODELS, "tiny", ("tiny", ("gate_up",)))
    _, record = run("run cpu --models tiny --rows 3 --dtypes float32 --rounds 2")
    (entry,) = record["cases"]
    assert set(entry["seconds"]) == {"ours", "tvm", "mlc", "torch"} and entry["wrong"] == []
    assert record["peak_gflops"] == 50.0


def test_biases_and_layer_norm_on_a_cpu(run, monkeypatch) -> None:
    monkeypatch.setitem(cpu.MODELS, "gpt2", ("gpt2", ("up",)))
    words = "run cpu --models gpt2 --rows 3 --dtypes float32 --rounds 1 --contenders ours torch"
    _, record = run(words)
    assert [(e["chain"], e["wrong"]) for e in record["cases"]] == [("up", [])]


def test_cpu_says_what_is_wrong(run, monkeypatch) -> None:
    monkeypatch.setitem(cpu.MODELS, "tiny", ("tiny", ("qkv",)))
    monkeypatch.setattr(cpu, "allowed_error", lambda *_: 0.0)
    words = "run cpu --models tiny --rows 17 --dtypes float32 --rounds 1 --contenders ours torch"
    status, record = run(words)
    assert status == 1 and record["cases"][0]["wrong"] == ["ours"]


TINY_Q4 = q4_model.Widths(64, 96, 96, 128)


@pytest.mark.parametrize("packed", [True, False])
def test_the_module_of_four_bits_computes_the_model(packed: bool) -> None:
    model = q4_model.Model(TINY_Q4, 1)
    given = [a for w in model.weights for a in ((w.words, w.scales) if packed else (w.decoded(),))]
    x = np.random.default_rng(1).standard_normal((3, 64)).astype("float32")
    main = machine(quickly(graphs.module(model, packed)))["main"]
    found = main(*map(tvm.runtime.tensor, (x, *given))).numpy()
    np.testing.assert_allclose(found, model.exact(x), rtol=1e-4, atol=1e-4)


def test_four_bits_on_a_cpu_and_their_goals(run, monkeypatch) -> None:
    monkeypatch.setattr(cpu_q4, "WIDTHS", TINY_Q4)
    monkeypatch.setattr(cpu_q4, "PAUSE_S", 0.0)

    def exact(
        model: q4_model.Model, *_: object, **__: object
    ) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: model.exact(x).astype("float32")

    monkeypatch.setattr(graphs, "by_us", exact)
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    words = "run cpu_q4 --rows 1 --layers 1 --rounds 1 --threads 1 --contenders ours float32"
    status, record = run(words)
    (entry,) = record["cases"]
    assert status == 0 and entry["wrong"] == [] and not entry["failed"]
    assert set(entry["seconds"]) == {"ours", "float32"}
    suite = suite_of("run", "cpu_q4")
    given = {"rows": 1, "seconds": {"ours": 2.0, "float32": 4.0, "ort": 1.0}}
    assert [told[1:] for told in suite(None).goals(given, record)] == [
        ("vs ours, float32", 1.5, 2.0),
        ("vs onnxruntime", 0.9, 0.5),
    ]


def test_bytes_on_a_cpu(run, monkeypatch) -> None:
    monkeypatch.setattr(cpu_int8, "LAYERS", {"tiny": {"up": (32, 48)}})
    monkeypatch.setattr(cpu_int8, "PAUSE_S", 0.0)
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    who = "ours torch sums int_mm"
    _, record = run(f"run cpu_int8 --models tiny --rows 3 --rounds 1 --contenders {who}")
    (entry,) = record["cases"]
    assert set(entry["seconds"]) == {*who.split()} and entry["wrong"] == []
    layer = cpu_int8._Layer(3, 32, 48)
    results = {who: np.asarray(getattr(layer, f"by_{who}")(1)()) + 1 for who in ("ours", "sums")}
    assert all(layer.is_wrong(name, results) for name in results)


@pytest.mark.parametrize("backend", ["tir", "triton"])
def test_layer(run, backend: str) -> None:
    words = "run layer --sizes tiny --rows 3 --chains qkv_rope out --target llvm --backend"
    status, record = run(f"{words} {backend}")
    assert status == 0 and [e["case"] for e in record["cases"]] == ["qkv_rope", "out"]
    for entry in record["cases"]:
        assert len(entry["us"]) == 2 and entry["wrong"] == [] and min(entry["predicted_s"]) > 0


def test_launch(run, monkeypatch) -> None:
    monkeypatch.setattr(tvm, "cuda", tvm.cpu)
    monkeypatch.setattr(launch.Launch, "calls", lambda self, dims: [lambda: None] * 2)
    status, record = run("run launch")
    assert status == 0 and len(record["cases"]) == 4
    assert all(min(e["us"].values()) > 0 for e in record["cases"])


def test_groups(run, monkeypatch) -> None:
    monkeypatch.setattr(groups, "SIDE", 64)
    _, record = run("run groups --cases exp-8 pool")
    assert [(len(e["us"]), e["wrong"]) for e in record["cases"]] == [(4, [])] * 2


class Patches(torch.nn.Module):
    """A convolution that exports with one attention only."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x).flatten(2).transpose(1, 2)


def test_imported(run, monkeypatch) -> None:
    def make(attention: str):
        if attention == "sdpa":
            raise ValueError("no such attention")
        return Patches(), (torch.ones(2, 3, 8, 8),), ()

    monkeypatch.setattr(imported, "compiled", lambda model, inputs, _: lambda: model(*inputs))
    monkeypatch.setattr(imported, "families", lambda: {"patches": make})
    monkeypatch.setattr(imported, "LEAST", 0.0)
    monkeypatch.setattr(imported, "LEAST_MEAN", 0.0)
    monkeypatch.setattr(imported, "LEAST_INDUCTOR", 0.0)
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    status, record = run("run imported --rounds 1 --contenders ours eager inductor")
    (entry,) = record["cases"]
    assert status == 0 and entry["wrong"] == [] and not entry["failed"]
    assert set(entry["seconds"]) == {"ours", "eager", "inductor"} and entry["errors"]["ours"] < 1e-6
    with pytest.raises(SystemExit, match="'vit' is no family; there are patches"):
        run("run imported --families vit")


def test_plans(tmp_path, monkeypatch) -> None:
    def make(_attention: str):
        return Patches(), (torch.ones(2, 3, 8, 8),), ()

    monkeypatch.setattr(plans, "families", lambda: {"patches": make})
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    words = ["run", "plans", "--rounds", "1", "--results", str(tmp_path)]
    main(words)
    (path,) = tmp_path.glob("*.json")
    (entry,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert entry["wrong"] == [] and entry["errors"]["ours"] < 1e-6
    assert 0 < entry["kernels"]["ours"] <= entry["kernels"]["fuseops"] < entry["kernels"]["default"]
    with pytest.raises(SystemExit, match="'vit' is no family; there are patches"):
        main([*words, "--families", "vit"])


def test_compile(run, monkeypatch) -> None:
    monkeypatch.setattr(compiling.models, "zoo_config", lambda _: MODEL)
    monkeypatch.setattr(compiling, "LIMIT_GB", 1e9)
    found: list[Path] = []

    def compile_nothing(*_: object, **__: object) -> None:
        found.append(KernelCache().directory)

    monkeypatch.setattr(tvm, "compile", compile_nothing)
    monkeypatch.setattr(compiling.Checker, "check", compiling.Checker.check)  # put back afterwards
    status, record = run("run compile --validate --max-seq-len 32")
    (entry,) = record["cases"]
    assert status == 0 and entry["total_s"] > 0 and entry["matches"] == 0
    monkeypatch.setattr(compiling, "LIMIT_S", 0.0)
    assert run("run compile --validate --max-seq-len 32")[0] == 1
    # Each begins with a cache of its own, which is empty
    assert len({*found, KernelCache().directory}) == 3 and not any(d.exists() for d in found)
    spent: list[float] = []
    assert compiling.timed(lambda x: x + 1, spent)(2) == 3 and len(spent) == 1


def test_judging_plans_of_a_cpu(run, monkeypatch) -> None:
    work = NormMatmul(DynamicDim("rows"), 64, (Projection(48, "nk"),), None, "float32", "float32")
    monkeypatch.setitem(judge_cpu.WORKLOADS, "down", work)
    monkeypatch.setattr(judge_cpu, "SIZES", (1, 4))
    monkeypatch.setattr(tvm, "compile", COMPILE)
    status, record = run("judge cpu --workload down --sample 2 --rounds 1 --name x")
    assert status == 0 and [e["rows"] for e in record["cases"]] == [1, 4]
    assert len(record["cases"][0]["plans"]) >= 3
