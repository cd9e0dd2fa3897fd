"""The benchmark that says what is lost without each family of kernels."""

from __future__ import annotations

import pytest

from benchmarks.judge.families import HOPELESS, best_plans, lost, table
from benchmarks.suites.matmul.cases import Chain
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
    prices = [ms for _, ms in found.values()]
    assert len(found) > 2 and max(prices) <= HOPELESS * min(prices)
    assert ("FewRows few_rows" in found) == (rows == 1)
    assert "CudaMatmul cuda" in found
