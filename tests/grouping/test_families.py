"""Kernels of imported models beside those that TVM's FuseOps leaves: fewer, or as many."""

from __future__ import annotations

import pytest

from ..models.test_imported import EXPECTED, chosen, parsed
from ..support.grouped import CPU, lowered
from ..support.imported import families, load
from ..support.slow import sampled


def launches(family: str, tag: str, target: object, by_tvm: bool) -> int:
    """Return how many kernels a model launches."""
    ((_, mod),) = load(family, [tag])
    _, report = lowered(mod, target, by_tvm)
    return sum(len(found.kernels) for found in report.launches)


@pytest.mark.parametrize("target", [CPU, pytest.param("h200", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", sampled(families(), 16))
def test_kernels_beside_fuse_ops(family: str, target: object) -> None:
    tags = [tag for tag in parsed(EXPECTED) if tag.split("-")[0] == family]
    for tag in chosen(family, tags)[:1]:
        assert launches(family, tag, target, False) <= launches(family, tag, target, True), tag
