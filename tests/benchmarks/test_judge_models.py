"""Predicted times of whole models beside kept ones, and trees that would learn from times."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.judge import learned, models
from benchmarks.judge.learned import Case, beats_formula, fares
from relax_fusion import make_target
from relax_fusion.estimator import candidates
from relax_fusion.estimator.database import Database, Measurement, target_fields
from relax_fusion.hardware import device
from relax_fusion.workload import DynamicDim
from relax_fusion.workload.json import to_json

from ..support.estimator_cases import norm_matmul

ENTRY = {"model": "demo-gpt2", "vocab": 64, "quantization": "", "batch": 1, "layers": 1}


def run(name: str, path: Path) -> tuple[int, dict]:
    status = main(["judge", name, "--results", str(path)])
    (record,) = path.glob("*.json")
    return status, json.loads(record.read_text())


def test_every_kept_time_has_a_model() -> None:
    found = list(models.kept())
    assert len({(i.kind, i.model, i.sizes) for i in found}) == len(found) >= 14
    assert {i.function for i in found} == {"decode", "prefill", "main"}
    assert all(1e-4 < i.measured_s < 1e-1 for i in found)


def test_a_model_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    item = models.Item("decode", "demo-gpt2", "", "decode", {"total_len": 64}, 2e-5, ENTRY)
    monkeypatch.setattr(models, "kept", lambda: iter([item]))
    status, record = run("models", tmp_path)
    (entry,) = record["cases"]
    assert status == 0 and "error" not in entry
    assert entry["predicted_s"] == entry["fused_s"] + entry["others_s"]
    assert 1e-5 < entry["predicted_s"] < 1e-4
    assert "the goal is 8%" in capsys.readouterr().out


def case(number: int, family: str, factor: float) -> Case:
    """Return a time of one of ten workloads, for which the formula is wrong by a factor."""
    seconds = 1e-5 * (1 + number % 7)
    told = (math.log(seconds), *(0.0,) * (len(learned.TERMS) - 2))
    work = str(number % 10)
    return Case(work, f"{work} {number % 3}", told, family, seconds / factor, seconds)


CASES = [case(n, family, 1 + (family == "b")) for n in range(60) for family in "ab"]


def test_fares_are_errors_and_what_choices_lose() -> None:
    exact, formula = (fares(CASES, [getattr(c, n) for c in CASES]) for n in ("seconds", "priced_s"))
    assert exact == {"error": 0.0, "regret": 0.0, "worst": 0.0}
    assert formula["error"] == pytest.approx(math.log(2) / 2)
    better = {"formula": formula, "learned": exact}
    assert beats_formula(better) and not beats_formula({"formula": exact, "learned": exact})
    worse = {**exact, "worst": formula["worst"] + 0.1}
    assert not beats_formula({"formula": formula, "learned": worse})


def test_trees_learn_of_other_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(learned, "SETS", {"cpu matmuls": lambda: CASES})
    monkeypatch.setattr(learned.JudgeLearned, "cases", ("cpu matmuls",))
    status, record = run("learned", tmp_path)
    (entry,) = record["cases"]
    assert status == 0 and entry["learned"]["error"] < 0.1 < entry["formula"]["error"]
    assert max(entry["matters"], key=entry["matters"].__getitem__) == "family"
    again = run("learned", tmp_path)[1]["cases"][0]
    assert again["learned"] == entry["learned"]


def test_times_of_a_database_are_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, target, dev = tmp_path / "times.jsonl", make_target("llvm"), device("cpu")
    work = norm_matmul(rows=DynamicDim("rows"))
    for number, plan in enumerate(islice(candidates(work, dev), 3)):
        for told in (target, make_target("h200")):
            fields, own = target_fields(str(told)), dict(plan.to_attr())
            kernel = fields, json.loads(to_json(work)), 16, own
            Database(path).add(Measurement("a CPU", *kernel, 1e-5 * (1 + number), 0.0, {}))
    found = learned.tuned(path, "llvm")
    assert [round(1e5 * c.seconds) for c in found] == [1, 2, 3]
    assert len({(c.workload, c.group) for c in found}) == 1
    assert main(["judge", "learned", "--database", str(path), "--results", str(tmp_path)]) == 1
    assert "fewer than two workloads" in capsys.readouterr().out


def test_kept_times_of_a_processor_are_read() -> None:
    found = learned.on_cpu()
    assert len(found) == 275 and len({c.workload for c in found}) == 5
    assert all(len(c.terms) == len(learned.TERMS) - 1 for c in found)
    assert all(0.01 < c.priced_s / c.seconds < 100 for c in found)
