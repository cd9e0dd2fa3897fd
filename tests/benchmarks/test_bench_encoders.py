"""`benchmarks.suites.encoders`: what needs no GPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.runner import main
from benchmarks.suites import encoders

TINY = {"tiny": (1, 32, 2, 64)}


@pytest.fixture
def tiny(monkeypatch):
    """A small model, exported before a CPU stands in for a GPU."""
    monkeypatch.setattr(encoders, "SIZES", TINY)
    monkeypatch.setattr(encoders.Encoders, "cases", tuple(TINY))
    encoders.imported(encoders.Item("tiny", 2, 9, "llvm"))


@pytest.mark.slow
def test_ours_and_pytorch_compute_the_same(tiny, cpu_in_place_of_a_gpu, tmp_path) -> None:
    sizes = ["--sequences", "2", "--tokens", "9"]
    asked = ["--target", "llvm", "--contenders", "torch", "ours", "--results", str(tmp_path)]
    assert main(encoders.Encoders, [*sizes, *asked]) == 0
    (path,) = tmp_path.glob("*-bench_encoders.json")
    (entry,) = json.loads(path.read_text())["cases"]
    assert set(entry["us"]) == {"torch", "ours"} and not entry["wrong"]
    assert "FuseAttentionChain" in entry["kernels"]


def test_goals_are_of_the_sizes_that_have_some() -> None:
    suite = encoders.Encoders(encoders.Encoders.arguments([]))
    times = {"compile": 180.0, "ours": 120.0}
    entry = {"case": "bert-small", "sequences": 1, "tokens": 512, "us": times}
    assert suite.goals(entry, {}) == [("bert-small 1 512", "vs torch.compile", 1.2, 1.5)]
    assert suite.goals({**entry, "sequences": 8}, {}) == []
    assert suite.goals({**entry, "us": {"ours": 120.0}}, {}) == []
