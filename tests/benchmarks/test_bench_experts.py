"""`benchmarks.suites.experts` and `benchmarks.judge.experts`: what needs no GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.judge import experts as judge
from benchmarks.runner import main
from benchmarks.suites import experts, sglang_experts

TINY = {"plain": experts.Model(16, 3, 64, 48), "oss": experts.Model(8, 2, 64, 48, is_oss=True)}


@pytest.fixture
def tiny(monkeypatch) -> None:
    """Small layers in the place of models'."""
    monkeypatch.setattr(experts, "MODELS", TINY)
    monkeypatch.setattr(judge, "MODELS", TINY)
    for suite in (experts.Experts, judge.JudgeExperts):
        monkeypatch.setattr(suite, "cases", tuple(TINY))


@pytest.mark.parametrize("case", TINY)
def test_both_ways_of_torch_are_the_layer(tiny, case) -> None:
    item = experts.Item(case, 23, "llvm")
    x, weights = experts.operands(item, "cpu")
    wanted, some = experts.exact(item, x, weights), experts.places(item, "cpu")
    for way in (experts.by_pair, experts.by_groups):
        got = way(item.model, x, weights)[some].double()
        assert (got - wanted).abs().max() < 0.01 * wanted.abs().max()


def test_no_rounding_moves_a_token_to_another_expert(tiny) -> None:
    item = experts.Item("plain", 200, "llvm")
    x, weights = experts.operands(item, "cpu")
    logits = (x.double() @ weights["router"].double().T).sort(-1).values
    assert (logits[:, 1:] - logits[:, :-1])[:, -TINY["plain"].chosen :].min() > 0.1
    _, ids = experts.routed(item.model, x, weights["router"])
    assert torch.bincount(ids.flatten(), minlength=16).min() > 0


def test_ours_and_torch_compute_the_same(tiny, cpu_in_place_of_a_gpu, tmp_path) -> None:
    asked = ["--target", "llvm", "--contenders", "bmm", "grouped", "ours", "--tokens", "5"]
    assert main(experts.Experts, [*asked, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-bench_experts.json")
    entries = json.loads(path.read_text())["cases"]
    for entry in entries:
        assert set(entry["us"]) == {"bmm", "grouped", "ours"}
        assert not entry["wrong"] and not entry["failed"]
        assert sum("experts" in kernel for kernel in entry["kernels"]) == 2
    assert len(entries) == len(TINY) and "vs best" in path.with_suffix(".md").read_text()


def test_tiles_of_one_expert_have_its_pairs() -> None:
    ids = torch.tensor([[4, 0], [4, 1], [4, 3]])
    rows, of_tiles, count = sglang_experts.tiles_of(ids, 2, 5)
    assert rows.tolist() == [1, 6, 3, 6, 5, 6, 0, 2, 4, 6] and count.tolist() == [10]
    assert of_tiles.tolist() == [0, 1, 3, 4, 4]


def test_plans_are_judged(tiny, cpu_in_place_of_a_gpu, tmp_path) -> None:
    asked = "--target llvm --tokens 5 --cases plain --parts down --results"
    assert main(judge.JudgeExperts, [*asked.split(), str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-judge_experts.json")
    (entry,) = json.loads(path.read_text())["cases"]
    assert len(entry["plans"]) > 1 and not entry["wrong"] and not entry["failed"]


def test_the_fastest_peer_counts() -> None:
    suite = experts.Experts(experts.Experts.arguments([]))
    us = {"bmm": 50.0, "SGLang": 30.0, "ours": 20.0}
    entry = {"case": "mixtral-8x7b", "tokens": 8, "us": us}
    found = suite.verdicts({"cases": [entry, {**entry, "us": {"ours": 1.0}}]})
    name = "mixtral-8x7b 8"
    assert found == [
        (name, "vs the best", 1.0, 1.5),
        ("all", "mean vs the best", 1.2, pytest.approx(1.5)),
    ]
