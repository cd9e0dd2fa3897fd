"""Random programs, fused against unfused; `scripts/fuzz.py` runs longer campaigns of the same."""

from __future__ import annotations

from typing import Any

import pytest

from relax_fusion.compute import contraction
from relax_fusion.passes import PATTERNS

from . import campaign, check

GRAPHS = 24


def test_fused_programs_compute_the_same() -> None:
    found = campaign.run(GRAPHS, seed=0)
    assert found.graphs == GRAPHS
    if found.failures:
        pytest.fail(str(check.minimise(found.failures[0], budget=20)))
    assert set(found.passes()) == set(PATTERNS), "a pass that never fired was not tested"
    assert len(found.spellings) >= 10
    assert found.dynamic * 4 >= found.graphs
    assert found.fused_graphs * 2 >= found.graphs


def test_the_same_seed_draws_the_same_programs() -> None:
    assert list(map(str, campaign.draw(5, 3))) == list(map(str, campaign.draw(5, 3)))


def test_a_kernel_without_its_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = contraction._step

    def forgetful(stages: Any, name: str, value: Any, operand: str) -> Any:
        after = step(stages, name, value, operand)
        return value if name == "bias" else after

    monkeypatch.setattr(contraction, "_step", forgetful)
    setup = check.Setup(tvm_unfused=True, bounded=True)
    failures = check.isolate(campaign.draw(2, seed=0), setup).failures
    assert any("relative error" in f.what for f in failures)
