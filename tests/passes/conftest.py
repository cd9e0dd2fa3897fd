"""The chains of a file of tests, compiled together."""

from __future__ import annotations

import pytest
from tvm import ir, relax

from ..support.chains import compiled, module


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> tuple[relax.VirtualMachine, ir.IRModule]:
    """What `assert_numbers` runs, and what it compares with: the chains in ``CHAINS``."""
    chains = request.module.CHAINS
    mod = module(chains)
    return compiled(mod, chains), mod
