"""FuseProjections in the pipeline: numbers of matmuls of the same rows."""

from __future__ import annotations

import pytest

from relax_fusion import Report

from ..support.chains import Chain, assert_numbers, compiled, module
from ..support.rope_chains import turn

PASS = "FuseProjections"
INPUTS = "x[n,32] W[32,48] V[32,16] U[48,16] b[16]"
BOTH = "k = R.matmul(x, W); v = R.matmul(x, V)"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers(dtype: str) -> None:
    chain = Chain("main", INPUTS, f"{BOTH}; l = R.add(v, b)", "(k, l)", {"n": 5}, dtype)
    mod, report = module([chain]), Report()
    machine = compiled(mod, [chain], report=report, always_fuse=True)
    assert [d.pattern for d in report.fused] == [PASS]
    assert_numbers(machine, mod, chain)


def test_a_weight_may_have_an_unknown_number_of_columns() -> None:
    chain = Chain("main", "x[n,32] W[32,m] V[32,16]", BOTH, "(k, v)", {"n": 5, "m": 9})
    mod, report = module([chain]), Report()
    machine = compiled(mod, [chain], report=report, always_fuse=True)
    assert [d.pattern for d in report.fused] == [PASS]
    assert_numbers(machine, mod, chain)


def test_a_kernel_that_rotates_heads_of_one_keeps_none_apart() -> None:
    turned = "n = R.nn.rms_norm(k, g, axes=[-1], epsilon=1e-5); " + turn("n", "C", "S", axis=1)
    chain = Chain(
        "main",
        "x[n,32] W[32,16] V[32,16] g[16] C[n,16] S[n,16]",
        f"k = R.matmul(x, W)\n{turned}v = R.matmul(x, V)",
        "(y, v)",
        {"n": 5},
    )
    mod, report = module([chain]), Report()
    machine = compiled(mod, [chain], report=report, always_fuse=True)
    assert [d.pattern for d in report.fused] == [PASS]
    assert_numbers(machine, mod, chain)
