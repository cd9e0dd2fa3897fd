"""Generated kernels in Triton's interpreter, against the graphs that they are generated from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...support.generated import check
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
