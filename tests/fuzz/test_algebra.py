"""A share of the functions that algebraic rules are tried on."""

from __future__ import annotations

from collections import Counter

import pytest

from ..support.slow import sampled
from .algebra import explore


@pytest.mark.parametrize("first", sampled(range(0, 400, 100)))
def test_random_functions(first: int) -> None:
    found, rules = explore(range(first, first + 100))
    assert found["rewritten"] >= 50 and len(rules) >= 40
    assert sum(count for what, count in found.items() if what.startswith("not")) < 20


# What once went wrong
SEEDS: tuple[int, ...] = ()


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds(seed: int) -> None:
    assert explore(range(seed, seed + 1))[0] == Counter(rewritten=1)
