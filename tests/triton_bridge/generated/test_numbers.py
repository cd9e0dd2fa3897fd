"""Generated kernels in Triton's interpreter, against the graphs that they are generated from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relax_fusion import DynamicDim, MatmulChain
from relax_fusion.estimator.families.generated.plan import GeneratedPlan

from ...support.generated import check, check_rows
from ...support.interpreted import Interpreter


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    worker = Interpreter(check)
    yield worker
    worker.close()


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_graphs_under_random_schedules(first: int, interpreter: Interpreter) -> None:
    """Edges that no tile divides, online softmax, three products, split sums, tensor maps."""
    said = interpreter(list(range(first, first + 40)), (16, 32))
    assert said["wrong"] == []
    assert said["run"] > 20 and said["split"] > 5
    assert all(
        "kept" in why or "elements" in why or "no structure" in why
        for why in said["refused"].values()
    ), said["refused"]


ROWS = MatmulChain(
    *(DynamicDim("n"), 40, 64, 48, ("kn", "nk"), ("gelu",), ("bias", "residual")),
    *("float16", "float16"),
)


@pytest.mark.parametrize("split", ["", "j0=2"])
def test_a_kernel_takes_any_number_of_rows(split: str) -> None:
    """Tensors of one row, of edges, of more rows than a tile has; a second launch merges sums."""
    plan = GeneratedPlan(
        *(16, 48, 40),
        num_stages=2,
        num_warps=4,
        backend="triton",
        family="generated",
        expression="ij0kj1",
        tiles="i=16 j0=32 k=16 j1=48",
        split=split,
    )
    worker = Interpreter(check_rows)
    try:
        assert worker(ROWS, plan, [1, 3, 16, 17, 100]) == []
    finally:
        worker.close()
