"""The benchmark that says what is lost without each family of kernels."""

from __future__ import annotations

import json

import pytest

from benchmarks.judge.families import CUBLAS, HOPELESS, JudgeFamilies, best_plans, lost, table
from benchmarks.runner import main as run
from benchmarks.suites.matmul.cases import Chain
from benchmarks.suites.matmul.models import MODELS, Size
from relax_fusion.hardware import device
from relax_fusion.workload import DynamicDim

CELLS = [{"A one": 1.0, "A two": 2.0, "B": 3.0}, {"A one": 4.0, "B": 2.0}, {"A one": 1.0}]


def test_a_loss_is_that_of_the_best_of_the_others() -> None:
    assert lost(CELLS, lambda family: family == "A one") == [2.0, 1.0]
    assert lost(CELLS, lambda family: family == "B") == [1.0, 2.0, 1.0]


def test_the_table_tells_wins_losses_and_cells_that_nobody_else_serves() -> None:
    head, _, one, two, other, both = table(CELLS, ["x", "y", "z"]).splitlines()
    assert head.startswith("| family | wins |")
    assert one == "| A one | 2 | 41.4 % | 2.00 | x | 1 |"
    assert two == "| A two | 0 | 0.0 % | 1.00 | x |  |"
    assert other == "| B | 1 | 26.0 % | 2.00 | y |  |"
    assert both == "| all of A | 2 | 73.2 % | 3.00 | x | 1 |"


@pytest.mark.parametrize("rows", [1, 4096])
def test_every_family_names_its_best_plan(rows: int) -> None:
    (work,) = Chain("qkv", "llama3.1-8b").works(DynamicDim("rows"), "float16")
    (found,) = best_plans(work, [rows], device("h200")).values()
    prices = [us for _, us in found.values()]
    assert len(found) > 2 and max(prices) <= HOPELESS * min(prices)
    assert ("FewRows few_rows" in found) == (rows == 1)
    assert "CudaMatmul cuda" in found


def test_a_whole_run(tmp_path, monkeypatch, cpu_in_place_of_a_gpu) -> None:
    monkeypatch.setitem(MODELS, "bert-base", Size(64, 96, 80, 8))
    asked = ("--target", "llvm", "--models", "bert-base", "--cases", "qkv", "out", "--rows", "3")
    results = ("--results", str(tmp_path))
    assert run(JudgeFamilies, [*asked, *results]) == 0
    (file,) = tmp_path.glob("*-judge_families.json")
    cells = json.loads(file.read_text())["cases"]
    assert [(c["case"], c["rows"]) for c in cells] == [("qkv", 3), ("out", 3)]
    for cell in cells:
        assert not cell["failed"] and {*cell["us"]} == {CUBLAS, *cell["predicted_us"]}
    again = ("--from", str(file), *results)
    assert run(JudgeFamilies, [*again]) == 0
