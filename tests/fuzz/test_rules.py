"""A sample of `scripts/fuzz_rules.py`, and whether it would notice."""

from __future__ import annotations

import pytest

from relax_fusion import host_target, make_target
from relax_fusion.dlight_rules.safe_rule import SafeRule

from ..support.broken_rules import Crashing, Raising, Wrong
from . import rules
from .legalised import NOT_LEGALISED_ALONE, UNTRIED, calls, covered, registered

SAMPLE = {
    "add": "CPUSpatialRule",
    "argmax": "",
    "nn.softmax": "NormRule",
    "matmul (batch)": "GenericMatmulRule",
    "matmul (empty k)": "CPUSpatialRule",
    "matmul (int8)": "RowSumRule",
    "matmul (symbolic all)": "RowSumRule",
    "nn.conv2d": "ReductionRule",
    "sum (axis 0)": "ReductionRule",
    "nn.layer_norm": "NormRule",
    "scatter_nd": "",
}
"""Calls, and the rule that schedules some of their functions for a CPU."""


@pytest.mark.parametrize("name", SAMPLE)
def test_rules_on_legalised_operators(name: str) -> None:
    targets = (host_target(), make_target("h200"))
    outcome = rules.check(calls()[name], "float32", True, targets[:1])
    assert not outcome.skipped and not outcome.wrong and outcome.functions
    named = {key.split()[0] for key in outcome.scheduled}
    assert SAMPLE[name] in named or (not SAMPLE[name] and not named - {"CPUSpatialRule"})
    assert not rules.check(calls()[name], "bfloat16", False, targets[:1]).wrong
    for func in rules.legalised(calls()[name], "float16", True):
        for rule in rules.RULES:
            rule.attempt(func, targets[1])


@pytest.mark.parametrize("name", ["nn.max_pool3d", "sum"])
def test_rows_of_several_axes_on_a_gpu(name: str) -> None:
    outcome = rules.check(calls()[name], "float32", True, (make_target("h200"),))
    assert not outcome.wrong and not outcome.skipped
    assert outcome.declined["NormRule cuda: unsupported layout"] == 1


def test_every_operator_is_tried_or_named() -> None:
    missing = set(registered()) - covered() - set(UNTRIED)
    assert not {name for name in missing if not name.startswith(NOT_LEGALISED_ALONE)}


@pytest.mark.parametrize(
    ("rule", "says"), [(Wrong(), "error"), (Raising(), "KeyError"), (Crashing(), "ended with 3")]
)
def test_mistakes_are_noticed(monkeypatch, rule: SafeRule, says: str) -> None:
    monkeypatch.setattr(rules, "RULES", (rule,))
    job = ("exp", calls()["exp"], "float32", False)
    ((_, outcome),) = rules.isolated([job], [host_target()], seconds=60)
    assert says in outcome.wrong[0]
