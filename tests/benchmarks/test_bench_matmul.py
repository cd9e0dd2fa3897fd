"""`benchmarks.suites.matmul.suite`: what needs no GPU, and a whole run with a CPU in its place."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import tvm_ffi

from benchmarks import gpu_timing as timing
from benchmarks.report import bandwidth_part, ratio
from benchmarks.report import summary as summary_of
from benchmarks.runner import Runner, resumed
from benchmarks.suites.matmul import ours
from benchmarks.suites.matmul.cases import CASES, SEPARABLE, SIZES, Chain, Size
from benchmarks.suites.matmul.peers import Problem, Weights, matmul64
from benchmarks.suites.matmul.suite import Matmul
from benchmarks.targets import verdict

from ..support.slow import sampled

TINY = Size(64, 96, 80, 8)


built = cache(ours.build)


@pytest.fixture
def tiny(monkeypatch):
    """A small size; the same module is compiled once for all tests."""
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setattr(ours, "build", built)


def entry(case: str = "qkv", rows: int = 16, **changes) -> dict:
    times = {"ours": 20.0, "unfused": 22.0, "eager": 45.0, "compile": 25.0, "cublas": 19.0}
    made = {
        "size": "8b",
        "case": case,
        "rows": rows,
        "bytes": Chain(case, "8b").bytes(rows),
        "flops": Chain(case, "8b").flops(rows),
        "floor_us": 11.8,
        "copy_tb_s": 4.3,
        "launch_us": 3.0,
        "us": {**times, "tvm": 200.0},
        "errors": {"eager": 4e-4, "ours": 3e-4, "unfused": 4e-4, "compile": 3e-4},
        "allowed_error": 2e-3,
        "wrong": [],
        "failed": {},
        "no_graph": {},
        "kernels": {},
    }
    return {**made, **changes}


def suite(*argv: str) -> Matmul:
    return Matmul(Matmul.arguments(argv))


def record(*entries: dict) -> dict:
    return {
        "date": "2026-01-02",
        "gpu": "some GPU",
        "dtype": "float16",
        "rows": "symbolic",
        "cases": list(entries),
    }


@pytest.mark.parametrize(
    ("case", "rows", "expected_us"),
    [
        ("qkv", 1, 11.7),
        ("qkv", 4096, 261.0),
        ("gate_up", 1, 54.6),
        ("gate_up", 1024, 304.5),
        ("ffn", 16, 82.0),
        ("ffn", 4096, 1827.0),
    ],
)
def test_floor_is_that_of_traffic_or_operations(case, rows, expected_us) -> None:
    assert Chain(case, "8b").floor_us(rows, 4.3) == pytest.approx(expected_us, rel=2e-3)


def test_traffic_counts_every_tensor_once(tiny) -> None:
    weights = (2 * 96 + 96) * 64
    assert Chain("ffn", "tiny").bytes(3) == 2 * (weights + 64 + 3 * (64 + 64))
    assert Chain("down", "tiny").bytes(3) == 2 * (64 * 96 + 3 * (96 + 64 + 64))
    assert Chain("out", "tiny").flops(3) == 2 * 3 * 64 * 64


def test_ratios_above_one_are_in_our_favour() -> None:
    e = entry()
    assert ratio(e, "compile") == 1.25 and ratio(e, "cublas") == 0.95
    assert ratio(entry(us={"ours": 1.0}), "compile") is None
    assert verdict(1.3, 1.25) == "missed by 3.8 %" and verdict(1.2, 1.2) == "reached"


def test_part_of_copy_bandwidth_with_and_without_the_launch() -> None:
    e = entry(rows=1)
    moved = 4.3e12 * 17e-6
    e["bytes"] = moved
    assert bandwidth_part(e, launch=False) == pytest.approx(1)
    assert bandwidth_part(e, launch=True) == pytest.approx(17 / 20)


def test_tables_hold_times_ratios_targets_and_problems() -> None:
    slow = entry("gate_up", 256, us={"ours": 110.0, "compile": 100.0}, failed={"tvm": "a | b"})
    wrong = entry("ffn", 16, wrong=["ours"], errors={"eager": 1e-4, "ours": 0.5})
    lost = {"size": "1b", "case": "out", "rows": 4, "error": "OutOfMemoryError: 3 GB"}
    made = record(entry(rows=1), slow, wrong, lost)
    text = suite().markdown(made)
    assert (
        "| 8b | qkv | 1 | 11.8 | 20.0 | 22.0 |  |  |  | 45.0 | 25.0 | 19.0 | 200.0 |  | 1.25 |"
        in text
    )
    assert "| 8b qkv 1 | vs torch.compile | 1.25 | 1.250 | reached |" in text
    assert "| 8b gate_up 256 | vs torch.compile | 1.1 | 0.909 | missed by 17.4 % |" in text
    assert "| 8b gate_up 256 | tvm | a / b |" in text
    assert "20.0 WRONG" in text and "| ours | error 5.00e-01, allowed 2.0e-03 |" in text
    assert "| 1b out 4 | all | OutOfMemoryError: 3 GB |" in text
    summary = suite().summary(made).splitlines()
    assert summary[0] == "3 of 8 targets reached"
    assert [line.split(" vs ")[0].split(" part ")[0].strip() for line in summary[1:]] == [
        *["8b ffn 16"] * 3,  # a wrong result reaches nothing
        "8b qkv 1",
        "8b gate_up 256",
    ]
    few = summary_of(suite().verdicts(made), most=2)
    assert few.splitlines()[-1].strip().startswith("and 3 more")
    assert [suite().is_bad(e) for e in made["cases"]] == [False, False, True, True]


def test_resuming_completes_a_run_of_the_same_kind(tmp_path) -> None:
    path = tmp_path / "run.json"
    failed = entry("qkv", 4, us={"ours": 1.0})
    path.write_text(json.dumps(record(entry(), failed, {**entry(rows=64), "error": "x"})))
    made = suite("--resume", str(path))
    complete = {
        key: made.is_complete(e, (Chain(e["case"], e["size"]), e["rows"]))
        for key, e in resumed(made).items()
    }
    expected = {16: True, 4: False, 64: False}
    assert complete == {("8b", "qkv", rows): done for rows, done in expected.items()}
    with pytest.raises(SystemExit, match="dtype is 'float16' there, 'bfloat16' here"):
        resumed(suite("--resume", str(path), "--dtype", "bfloat16"))
    path.write_text("[]")
    with pytest.raises(SystemExit, match="holds no results"):
        resumed(made)


def test_errors_are_relative_to_the_largest_value() -> None:
    exact = torch.tensor([[1.0, -4.0]], dtype=torch.float64)
    assert timing.error_of(torch.tensor([[[1.0, -3.0]]]), exact) == 0.25
    assert not timing.error_of(torch.tensor([float("nan"), 1.0]), exact) <= 1
    assert timing.allowed_error(0.5, "bfloat16") == 1 + 2**-7


def test_a_wide_weight_is_multiplied_in_parts(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.suites.matmul.peers.COLUMNS_AT_ONCE", 3)
    x, w = torch.randn(2, 5, dtype=torch.float64), torch.randn(7, 5)
    torch.testing.assert_close(matmul64(x, w), x @ w.double().T)


@pytest.mark.parametrize("case", sampled(CASES, 3))
def test_ours_computes_what_pytorch_does(case, tiny, cpu_in_place_of_a_gpu) -> None:
    problem = Problem(Weights(Chain(case, "tiny"), "float32", "cpu"), 5)
    compiled = ours.build(ours.Job(problem.chain, "ours", None, "float32", "llvm"))
    out = timing.as_torch(compiled.call(problem.inputs, problem.weights.by_name)())
    reference = problem.reference()
    assert timing.error_of(problem.eager(), reference) < 1e-5
    assert timing.error_of(out, reference) < 1e-5
    assert out.shape[-1] == problem.chain.out_features
    if case in SEPARABLE:
        separate = ours.build(ours.Job(problem.chain, "separate", None, "float32", "llvm"))
        parts = timing.parts_of(separate.call(problem.inputs, problem.weights.by_name)())
        assert timing.error_of(torch.cat(parts, -1), reference) < 1e-5
        assert len(separate.built.report.fused) == len(compiled.built.report.fused)
    assert problem.bare()().shape[0] == 5


class FakeGraph:
    """A graph that counts its replays; a `broken` one cannot be captured."""

    broken = False

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "relaxed"
        self.replays = 0

    def capture_end(self) -> None:
        if self.broken:
            raise RuntimeError("capture failed")

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def fake_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(timing, "_capture_stream", lambda: None)
    monkeypatch.setattr(FakeGraph, "broken", False)


def test_a_captured_call_is_replayed_on_torchs_stream(fake_graphs) -> None:
    calls = []

    def work() -> torch.Tensor:
        calls.append(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda:0")))
        return torch.ones(2)

    call = timing.Call(work)
    assert calls == [7] * (timing.WARMUP + 1)
    assert call.graph is not None and call.why_no_graph == ""
    # A replay that computes nothing leaves no result of an earlier one
    assert call.checked_result().isnan().all()
    assert call.graph.replays == 1 and len(calls) == timing.WARMUP + 1


@pytest.mark.parametrize("where", ["call", "capture"])
def test_a_call_that_cannot_be_captured_is_made_each_time(fake_graphs, where) -> None:
    made = []

    def work() -> torch.Tensor:
        made.append(1)
        if where == "call" and len(made) == timing.WARMUP + 1:
            raise RuntimeError("not while capturing")
        return torch.full((1,), float(len(made)))

    FakeGraph.broken = True
    call = timing.Call(work)
    expected = "not while capturing" if where == "call" else "capture failed"
    assert call.graph is None and call.why_no_graph == f"RuntimeError: {expected}"
    assert call.checked_result() == timing.WARMUP + 2


def tiny_run(tmp_path, *more: str) -> tuple[int, dict]:
    argv = ["--sizes", "tiny", "--no-compile", "--target", "llvm", "--results", str(tmp_path)]
    argv += ["--rows", "1", "3", "--tvm-rows", "3", *more]
    status = Runner(suite(*argv)).run()
    (path,) = tmp_path.glob("*-bench_matmul*.json")
    return status, json.loads(path.read_text())


@pytest.mark.slow
def test_a_whole_run(tmp_path, tiny, cpu_in_place_of_a_gpu, capsys) -> None:
    status, written = tiny_run(tmp_path, "--static")
    assert status == 0
    assert [suite().key_of(e) for e in written["cases"]] == [
        ("tiny", case, rows) for case in CASES for rows in (1, 3)
    ]
    assert set(written["cases"][1]["us"]) == {"ours", "unfused", "eager", "cublas", "tvm"}
    assert list(tmp_path.glob("*-bench_matmul-static.md"))
    assert "tiny down 3: ours" in capsys.readouterr().out


def test_a_wrong_result_of_ours_fails_the_run(
    tmp_path, tiny, cpu_in_place_of_a_gpu, monkeypatch
) -> None:
    right = ours.Compiled.call

    def wrong(self, inputs, weights):
        call = right(self, inputs, weights)
        return lambda: timing.as_torch(call()) * 1.01

    monkeypatch.setattr(ours.Compiled, "call", wrong)
    status, written = tiny_run(tmp_path, "--cases", "qkv")
    assert status == 1
    assert written["cases"][0]["wrong"] == ["ours", "unfused"]
