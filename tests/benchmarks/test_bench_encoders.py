"""`benchmarks.suites.encoders`: what needs no GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_timing
from benchmarks.runner import main
from benchmarks.suites import encoders

FLOATS = ("vit", "whisper")
TINY = dict.fromkeys(encoders.FAMILIES, (1, 32, 2, 64))


@pytest.fixture
def tiny(monkeypatch):
    """Small models, exported before a CPU stands in for a GPU."""
    monkeypatch.setattr(encoders, "SIZES", TINY)
    monkeypatch.setattr(encoders.Encoders, "cases", tuple(TINY))
    encoders.imported(encoders.Item("bert", 2, 9, "llvm"))


@pytest.mark.parametrize("case", TINY)
def test_a_model_computes_what_transformers_do(tiny, case) -> None:
    model, given = encoders.Item(case, 2, encoders.family(case).tokens or 9, "llvm").made()
    found = gpu_timing.parts_of(model.float()(given.float() if case in FLOATS else given))
    whole = model.model(given.float() if case in FLOATS else given)
    wanted = [part for part in whole.to_tuple() if isinstance(part, torch.Tensor)]
    assert len(found) == len(wanted) == (2 if case == "bert" else 1)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_results_side_by_side() -> None:
    one, two = torch.ones(2, 3), torch.zeros(2, 1)
    assert gpu_timing.side_by_side(one) is one
    assert gpu_timing.side_by_side([one, two]).shape == (2, 4)
    assert gpu_timing.side_by_side((one, two[0])).shape == (7,)


@pytest.mark.slow
def test_ours_and_pytorch_compute_the_same(tiny, cpu_in_place_of_a_gpu, tmp_path) -> None:
    sizes = ["--cases", "bert", "--sequences", "2", "--tokens", "9"]
    asked = ["--target", "llvm", "--contenders", "torch", "ours", "--results", str(tmp_path)]
    assert main(encoders.Encoders, [*sizes, *asked]) == 0
    (path,) = tmp_path.glob("*-bench_encoders.json")
    (entry,) = json.loads(path.read_text())["cases"]
    assert set(entry["us"]) == {"torch", "ours"} and not entry["wrong"]
    assert "FuseAttentionChain" in entry["kernels"]


def test_goals_are_of_each_and_of_the_mean() -> None:
    suite = encoders.Encoders(encoders.Encoders.arguments([]))
    entry = {"case": "gpt2", "sequences": 1, "tokens": 512, "us": {"compile": 180.0, "ours": 120.0}}
    other = {**entry, "sequences": 8, "us": {"torch": 288.0, "compile": 310.0, "ours": 300.0}}
    found = suite.verdicts({"cases": [entry, other, {**entry, "us": {"ours": 1.0}}]})
    assert found[:2] == [
        ("gpt2 1 512", "vs PyTorch", 1.0, 1.5),
        ("gpt2 8 512", "vs PyTorch", 1.0, 0.96),
    ]
    assert found[2] == ("all", "mean vs PyTorch", 1.25, pytest.approx(1.2))
    assert suite.verdicts({"cases": []}) == []


def test_texts_are_as_long_as_asked_for_and_others_as_they_are() -> None:
    words = ["--cases", "gpt2", "vit-large", "whisper-large", "--tokens", "64", "--sequences", "1"]
    items = encoders.Encoders(encoders.Encoders.arguments(words)).items()
    assert [item.name for item in items] == [
        *("gpt2, 1 x 64", "vit-large, 1 x 197", "whisper-large, 1 x 1500")
    ]
