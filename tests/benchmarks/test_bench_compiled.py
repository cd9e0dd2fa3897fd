"""`benchmarks.suites.compiled`: what needs no GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.suites import compiled

CASES = ("bert-base,2", "vit-base,1", "llama-3.2-1b")


@pytest.mark.parametrize("case", CASES)
def test_models_are_called_and_compared(case, monkeypatch):
    monkeypatch.setattr(compiled, "SIZES", dict.fromkeys(compiled.SIZES, (1, 32, 2, 64)))
    monkeypatch.setattr(compiled, "LLAMA", dict.fromkeys(compiled.LLAMA, (1, 32, 2, 1, 64)))
    monkeypatch.setattr(compiled, "CALLS", 1)
    monkeypatch.setattr(compiled, "STEPS", 2)
    with torch.no_grad():
        seconds, count, found = compiled.prepared(case, "eager", "cpu")
        assert seconds() > 0
    assert count == (2 if "llama" in case else 1)
    assert found["first_s"] > 0 and 0 < found["error"] < 0.02


def test_a_process_that_fails_is_told_apart_from_the_others():
    child = compiled.Child("no such model", "ours", "cpu")
    ready = child.hear()
    assert "KeyError" in ready["failed"]
    fine = {"first_s": 9.0, "error": 1e-3, "us": 12.0}
    found = compiled.entry({"ours": ready, "eager": fine})
    assert found["us"] == {"eager": 12.0} and list(found["failed"]) == ["ours"]
    found = compiled.entry({"ours": fine | {"error": 4e-3}, "eager": fine})
    assert found["wrong"] == ["ours"]


def test_the_best_of_inductors_modes_is_the_peer():
    suite = compiled.Compiled(compiled.Compiled.arguments([]))
    times = {"ours": 10.0, "inductor": 30.0, "reduce-overhead": 15.0, "max-autotune": 16.0}
    first = {"ours": 10.0, "inductor": 8.0, "reduce-overhead": 12.0, "max-autotune": 60.0}
    for case, goal in (("bert-base,1", 1.25), ("gpt2", 1.2)):
        found = suite.goals({"case": case, "us": times, "first_s": first}, {})
        assert found == [
            (case, "vs reduce-overhead", goal, 1.5),
            (case, "first call vs reduce-overhead", 1.0, 1.2),
        ]
