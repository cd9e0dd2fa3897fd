"""Fixtures of the tests of the estimator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relax_fusion.estimator import registry
from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul


@pytest.fixture
def without_cuda_matmul(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the matmul kernel in CUDA C++: for what was timed before there was one."""
    others = [f for f in registry.FAMILIES if not isinstance(f, CudaMatmul)]
    with monkeypatch.context() as patch:
        patch.setattr(registry, "FAMILIES", others)
        _forget()
        yield
    _forget()


def _forget() -> None:
    for forget in registry.ON_CHANGE:
        forget()
