"""`benchmarks.suites.widths`: samples, tables, pictures, a run with a CPU in place of a GPU."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_timing as timing
from benchmarks.__main__ import main
from benchmarks.suites.matmul import ours
from benchmarks.suites.matmul.cases import Chain
from benchmarks.suites.matmul.models import MODELS, Size, decoder
from benchmarks.suites.matmul.peers import Problem, Weights
from benchmarks.suites.widths import heat_maps, report
from benchmarks.suites.widths.sampling import CASES, ROWS, Grid

FFN = ("gate_up", "up")
ALL = Grid(list(MODELS), CASES, ROWS)
LAYERS = Size(48, 80, 144, 16, biases=True, activation="gelu")
TINY = {
    "gated": decoder(64, 96, 4, 2, 8, qkv_bias=True),
    "offset": decoder(48, 80, 2, 1, 32, activation="gelu_tanh", unit_offset=True),
    "layers": LAYERS,
    "kn": replace(LAYERS, activation="gelu_tanh", layout="kn"),
}


@pytest.fixture
def tiny(monkeypatch):
    for name, size in TINY.items():
        monkeypatch.setitem(MODELS, name, size)


def entry(size: str = "vit-l", case: str = "out", rows: int = 16, **changes) -> dict:
    made = {"size": size, "case": case, "rows": rows, "seed": 0, "floor_us": 5.0}
    made |= {"us": {"ours": 10.0, "cublas": 8.0, "eager": 20.0}, "wrong": [], "failed": {}}
    kernels = {"ours": ["FuseMatmulEpilogue stream 16x64x128 warps 4 stages 5 split 1"]}
    errors = {"eager": 1e-4, "ours": 1e-4}
    made |= {"kernels": kernels, "errors": errors, "allowed_error": 1e-3, "no_graph": {}}
    return {**made, **changes}


def record(*entries: dict) -> dict:
    facts = {"date": "2026-01-02", "gpu": "some GPU", "dtype": "float16"}
    return {**facts, "cases": list(entries)}


RECORD = record(
    entry(),
    entry(rows=777, us={"ours": 10.0, "cublas": 32.0, "eager": 40.0}),
    entry(case="down", us={"ours": 10.0, "cublas": 2.0}),
    entry("phi3-mini", "gate_up", 777, us={"ours": 10.0, "cublas": 9.0, "eager": 20.0}),
    {"size": "phi3-mini", "case": "qkv", "rows": 1, "seed": 3, "error": "RuntimeError: a | b"},
)


def test_widths_are_those_of_the_configurations() -> None:
    assert len(MODELS) == 17
    found = {name: (s.hidden, s.wide, s.qkv, s.queries, s.head) for name, s in MODELS.items()}
    assert found["qwen2.5-0.5b"] == (896, 4864, 1152, 896, 64)
    assert found["llama3.1-70b"] == (8192, 28672, 10240, 8192, 128)
    assert found["gemma2-2b"] == (2304, 9216, 4096, 2048, 256)
    assert found["mistral-nemo"] == (5120, 14336, 6144, 4096, 128)
    assert found["phi3-mini"] == (3072, 8192, 9216, 3072, 96)
    assert found["whisper-large"] == (1280, 5120, 3840, 1280, 64)


def test_chains_have_what_their_models_have() -> None:
    def shapes(model: str, case: str) -> dict:
        return Chain(case, model).weights

    assert shapes("qwen2.5-0.5b", "qkv") == {"gamma": (896,), "w": (1152, 896), "b": (1152,)}
    assert shapes("qwen2.5-0.5b", "plain") == {"w": (1152, 896)}
    assert shapes("bert-base", "plain") == {"w": (2304, 768)}
    assert shapes("gemma2-2b", "out") == {"w": (2304, 2048)}
    assert set(shapes("bert-base", "up")) == {"gamma", "beta", "w", "b"}
    assert set(shapes("bert-base", "down")) == {"w", "b"}
    (gate,) = Chain("gate_up", "gemma2-2b").works(5, "float16")
    assert gate.activation == "gelu_tanh" and gate.norm.unit_offset and not gate.bias
    (up,) = Chain("up", "gpt2-124m").works(5, "float16")
    assert up.outputs[0].epilogue == ("bias", "gelu_tanh") and up.outputs[0].layout == "kn"
    assert up.norm.beta


def spread(values) -> int:
    counts = Counter(values).values()
    return max(counts) - min(counts)


@pytest.mark.parametrize("count", [None, 65, 100, 400])
def test_samples_are_spread_evenly(count) -> None:
    found = ALL.sample(7, count)
    assert len(found) == len(set(found)) == (count or 17 * 13)
    assert {rows for _, rows in found} == set(ROWS)
    assert spread(rows for _, rows in found) <= 1
    assert spread("ffn" if c.case in FFN else c.case for c, _ in found) <= 1
    cells = Counter((c.size, rows) for c, rows in found)
    assert max(cells.values()) == math.ceil(len(found) / ALL.cells)
    if count is None:
        assert len(cells) == ALL.cells
        assert {c.size for c, _ in found} == set(MODELS)


def test_a_seed_says_what_is_drawn() -> None:
    assert ALL.sample(3, 50) == ALL.sample(3, 50) != ALL.sample(4, 50)
    assert set(ALL.sample(3, 50)) < set(ALL.sample(3, 120))


@pytest.mark.slow
@pytest.mark.parametrize("size", TINY)
def test_ours_computes_what_pytorch_does(size, tiny, cpu_in_place_of_a_gpu) -> None:
    for chain, _ in Grid([size], CASES, [5]).items:
        problem = Problem(Weights(chain, "float32", "cpu"), 5)
        compiled = ours.build(ours.Job(chain, "ours", None, "float32", "llvm"))
        out = timing.as_torch(compiled.call(problem.inputs, problem.weights.by_name)())
        reference = problem.reference()
        assert timing.error_of(problem.eager(), reference) < 1e-5, chain.case
        assert timing.error_of(out, reference) < 1e-5, chain.case
        assert problem.bare()().shape[0] == 5


def test_unit_offsets_are_no_plain_norms(tiny) -> None:
    problem = Problem(Weights(Chain("qkv", "offset"), "float32", "cpu"), 3)
    gamma = problem.weights.by_name["gamma"]
    plain = torch.nn.functional.rms_norm(problem.inputs["x"], (48,), 1 + gamma, 1e-5)
    expected = plain @ problem.weights.by_name["w"].T
    torch.testing.assert_close(problem.eager(), expected)


def test_means_and_worst() -> None:
    text = report.markdown(RECORD)
    # 8/10 and 2/10 at 16 rows; 32/10 and 9/10 at 777
    assert "| rows | chains | vs cuBLAS, bare | worst | vs eager | worst |" in text
    assert "| 16 | 2 | 0.40 | 0.20 (vit-l down 16) | 2.00 | 2.00 (vit-l out 16) |" in text
    assert "| 777 | 2 | 1.70 | 0.90 (phi3-mini gate_up 777) |" in text
    assert "| out | 2 | 1.60 | 0.80 (vit-l out 16) | 2.83 |" in text
    assert "| vit-l | 3 | 0.80 | 0.20 (vit-l down 16) |" in text
    assert "drawn by seed 0, 3." in text and "stream 16x64x128 warps 4" in text
    assert "| phi3-mini qkv 1 | all | RuntimeError: a / b |" in text
    assert report.summary(RECORD).splitlines() == [
        "- cuBLAS, bare: mean 0.82, worst 0.20 (vit-l down 16), 3 of 4 slower",
        "- eager: mean 2.52, worst 2.00 (vit-l out 16), 0 of 3 slower",
    ]
    assert report.summary(record()) == "nothing was compared"


def test_a_wrong_result_has_no_speed() -> None:
    wrong = entry(wrong=["ours"], errors={"eager": 1e-4, "ours": 0.5})
    assert report.ratios([wrong], "eager") == {"vit-l out 16": 0.0}
    text = report.markdown(record(entry(rows=1), wrong))
    assert "10.0 WRONG" in text and "| ours | error 5.00e-01, allowed 1.0e-03 |" in text
    assert "| out | 2 | 0.00 | 0.00 (vit-l out 16) |" in text


def test_a_cell_of_a_heat_map_is_a_mean_over_cases() -> None:
    entries = [e for e in RECORD["cases"] if "error" not in e]
    ((first, none), (second, third)) = heat_maps.heat_map(
        entries, "cublas", ["vit-l", "phi3-mini"], [16, 777]
    )
    assert (first, second, third) == pytest.approx((0.4, 3.2, 0.9)) and math.isnan(none)
    colours = [heat_maps.colour(r) for r in (0.0, 0.5, 1.0, 2**0.5, 9.0)]
    assert colours == pytest.approx([-1, -1, 0, 0.5, 1])


def run(tmp_path, *words: str) -> tuple[int, dict]:
    argv = ["run", "widths", "--target", "llvm", "--results", str(tmp_path), *words]
    status = main(argv)
    (path,) = tmp_path.glob("*-bench_widths.json")
    return status, json.loads(path.read_text())


@pytest.mark.slow
def test_a_whole_run_compiles_each_chain_once(
    tmp_path, tiny, cpu_in_place_of_a_gpu, monkeypatch
) -> None:
    built, build = [], ours.build
    monkeypatch.setattr(ours, "build", lambda job: built.append(job.chain) or build(job))
    words = ("--models", "gated", "kn", "--rows", "1", "3", "--cases", "qkv", "up", "gate_up")
    status, written = run(tmp_path, *words, "--count", "99")
    assert status == 0 and len(written["cases"]) == 8 and len(built) == len(set(built)) == 4
    for e in written["cases"]:
        assert set(e["us"]) == {"ours", "cublas", "eager"} and e["wrong"] == []
        assert e["kernels"]["ours"][0].startswith("Fuse")
    assert (tmp_path / f"{written['date']}-bench_widths.md").exists()
