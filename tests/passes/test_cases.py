"""What each fusing pass makes of the chains in ``tests/data/chains``, and their numbers.

``RELAX_FUSION_REWRITE=1 python -m pytest tests/passes/test_cases.py`` writes anew what the files
say of them.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
from tvm import ir, relax

from relax_fusion import make_target

from ..support.cases import FILES, Case, cases, outcome, rewrite
from ..support.chains import assert_numbers, compiled, module

ON_HOPPER = {"target": make_target("h200"), "backend": "triton"}
OPTIONS = dict.fromkeys(
    ("FuseAdapters", "FuseChains.refusals", "FuseMatmulEpilogue.integers"), ON_HOPPER
)
CASES = [case for file in FILES for case in cases(file).values()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_pass_makes_of_it(case: Case) -> None:
    found = outcome(case, **OPTIONS.get(case.file, {}))
    if "RELAX_FUSION_REWRITE" in os.environ:
        rewrite(case, found)
    else:
        assert found == case.outcome


@cache
def machine(file: str, when: str) -> tuple[relax.VirtualMachine, ir.IRModule]:
    """Return the chains of one file that are compared at one time, compiled together, once."""
    chains = [case.chain for case in cases(file).values() if case.numbers == when]
    mod = module(chains)
    return compiled(mod, chains, validate=False), mod


COMPARED = [
    pytest.param(case, id=str(case), marks=[pytest.mark.slow] if case.numbers == "slow" else [])
    for case in CASES
    if case.numbers != "no numbers"
]


@pytest.mark.parametrize("case", COMPARED)
def test_numbers(case: Case) -> None:
    assert_numbers(*machine(case.file, case.numbers), case.chain)
