"""A share of `scripts/fuzz.py`, and whether it would notice a mistake."""

from __future__ import annotations

from typing import Any

import pytest

from relax_fusion import Reason
from relax_fusion.equivalence import Checker
from relax_fusion.errors import EquivalenceError
from relax_fusion.passes import PATTERNS, attention

from . import campaign, functions, kernels, matches
from .bindings import Function
from .findings import Failure, Findings

GRAPHS, KERNELS = range(140, 230), (0, 1, 2, 4, 9, 11, 12, 14)
"""Seeds; of kernels, some of every kind of workload that compile within a second."""
SEVERAL = (Reason.SHAPE, Reason.ATTRIBUTE, Reason.LAYOUT, Reason.AXIS)


def test_random_functions() -> None:
    found = matches.explore(GRAPHS)
    assert found.failures == [] and not found.seen["unchecked"]
    assert found.seen["matches"] == found.seen["checked"]
    assert set(found.seen["matches"]) == set(PATTERNS), "a pass that never fired was not tested"
    assert {r.value for r in SEVERAL} <= set(found.seen["declines"])
    assert len(found.seen["spellings"]) >= 30 and 2 * found.compared >= found.count


# A kernel's own 1 / 1.702 beside a GELU; 1 + gamma of a constant, which no dtype of a graph rounds;
# a weight of int8 that is rounded to bfloat16, and read as float32; a matmul in front of a chain
@pytest.mark.parametrize("seed", [50005839, 50007637, 50017212, 50028323, 70000115, 70001439])
def test_seeds_of_campaigns(seed: int) -> None:
    found = matches.explore([seed])
    assert found.failures == [] and found.compared == 1


def test_random_kernels() -> None:
    found = kernels.explore(KERNELS)
    assert found.failures == []
    assert sum(found.seen["kernels"].values()) == len(KERNELS)


def test_the_same_seed_draws_the_same() -> None:
    assert functions.draw(3).script() == functions.draw(3).script()
    assert functions.draw(3).script() != functions.draw(4).script()


def _doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention have twice its scale."""
    factor = attention._factor
    monkeypatch.setattr(attention, "_factor", lambda value, what: 2 * factor(value, what))


def _failing(seeds: Any) -> Failure:
    return matches.explore(seeds).failures[0]


@pytest.mark.slow
def test_a_wrong_match_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    _doubled(monkeypatch)
    failure = _failing(range(40))
    assert "FuseAttentionChain" in failure.what and "would compute something else" in failure.what
    whole = functions.draw(failure.seed)
    small = matches.minimised(whole, failure.seed)
    assert isinstance(small, Function) and len(small.bindings) <= len(whole.bindings)
    with pytest.raises(EquivalenceError):
        matches.check(small, failure.seed)


def test_a_wrong_function_is_found_without_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    _doubled(monkeypatch)
    monkeypatch.setattr(Checker, "check", lambda *_: None)
    assert "Wrong: result" in _failing(range(40)).what


def test_what_dies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(seeds: Any) -> Findings:
        if 1 in seeds:
            raise SystemExit(3)
        return Findings(len(seeds))

    monkeypatch.setattr(matches, "explore", dying)
    found = Findings()
    for part in campaign.parts("graphs", range(3), 1):
        found.add(part)
    assert found.count == 3
    assert [f.seed for f in found.failures] == [1]
