"""Judging the plans of chains: what needs no GPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.judge import chains, choices, feasibility
from benchmarks.recording import facts
from benchmarks.runner import main
from relax_fusion.hardware import device
from relax_fusion.workload.json import to_json

G1, H200 = "G1", device("h200")


def entry(slower: float) -> dict:
    """Return timings that are the predictions, those of the choice `slower`."""
    work = chains.workload_of(G1, "h200")
    plans = chains.selected(work, H200, 14, "a")
    us = [1e6 * chains.seconds_by(work, H200)(plan) for plan in plans]
    us[0] *= slower
    return {
        "case": G1,
        "workload": json.loads(to_json(work)),
        "plans": [p.to_attr() for p in plans],
        "plan_us": us,
        "wrong": [],
    }


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_regret_and_correlation(tmp_path, slower: float) -> None:
    record = {**facts(), "date": "2026-01-02", "gpu": "H200", "target": "h200"}
    record["cases"] = [entry(slower)]
    stored = tmp_path / "2026-01-02-judge_chains.json"
    stored.write_text(json.dumps(record))
    assert main(chains.JudgeChains, ["--from", str(stored), "--results", str(tmp_path)]) == 0
    (found,) = json.loads(stored.read_text())["cases"]
    assert len(found["plans"]) == 14 and found["is_choice_timed"]
    if slower == 1:
        assert found["regret"] == pytest.approx(0) and found["correlation"] == pytest.approx(1)
    else:
        assert found["regret"] > 0.3 and found["correlation"] < 1
        assert found["regret_measured"] < found["regret"]


@pytest.mark.slow
def test_feasibility_of_a_few_kernels(tmp_path) -> None:
    arguments = ["--kernels", "3", "--results", str(tmp_path)]
    assert main(feasibility.JudgeFeasibility, arguments) == 0
    (path,) = tmp_path.glob("*-judge_feasibility.json")
    cases = json.loads(path.read_text())["cases"]
    assert len(cases) == 3 and all(e["right"] and e["compiled"] for e in cases)


def test_a_range_loses_little_at_any_size(tmp_path) -> None:
    arguments = ["--cases", "out", "--models", "bert-base", "--sizes", "60"]
    assert main(choices.JudgeChoices, [*arguments, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-judge_choices*.json")
    (found,) = json.loads(path.read_text())["cases"]
    assert 0 <= found["loss"] < 0.01 and found["worst"] < 0.05 and found["above"] < 0.02
    assert choices.sizes_drawn(60, 0) == choices.sizes_drawn(60, 0) != choices.sizes_drawn(60, 1)
