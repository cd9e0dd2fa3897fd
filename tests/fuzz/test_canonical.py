"""A share of the functions that the canonical passes are tried on."""

from __future__ import annotations

from collections import Counter

import pytest

from ..support.slow import sampled
from .canonical import check
from .movements import draw


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("first", sampled(range(0, 60, 15)))
def test_random_functions(first: int) -> None:
    found = Counter(check(draw(seed), seed) for seed in range(first, first + 15))
    assert found["compared"] >= 3


@pytest.mark.parametrize("seed", [56, 1350])
def test_splits_of_nothing_and_into_more_than_there_is(seed: int) -> None:
    assert check(draw(seed), seed) != "not typed"
