"""`partition` and `build`: the same kernels in one step and in two."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_fusion
from relax_fusion import PipelineError, Report

from .support.chains import Chain, calls, module, outputs

CHAIN = Chain(
    "main",
    "x[n,32] W[32,48] p[48] V[48,16]",
    "h = R.nn.gelu(R.add(R.matmul(x, W), p)); s = R.sin(h); y = R.matmul(s, V)",
    *("y", {"n": 5}),
)


def test_in_two_steps_and_in_one() -> None:
    mod, report = module([CHAIN]), Report()
    parts = relax_fusion.partition(mod, "llvm", report=report)
    assert "call_tir" in calls(parts["main"]) and "sin" in calls(parts["main"])
    assert [d.pattern for d in report.fused] != []
    built = [relax_fusion.build(m, "llvm") for m in (parts, mod)]
    found = [outputs(relax.VirtualMachine(b, tvm.cpu()), "main", CHAIN.arrays())[0] for b in built]
    np.testing.assert_array_equal(*found)


def test_again_is_the_same() -> None:
    parts, report = relax_fusion.partition(module([CHAIN]), "llvm"), Report()
    again = relax_fusion.partition(parts, "llvm", report=report)
    assert calls(again["main"]) == calls(parts["main"])
    assert report.fused == []


def test_an_unknown_argument() -> None:
    with pytest.raises(PipelineError, match="no_such"):
        relax_fusion.partition(module([CHAIN]), "llvm", no_such=1)
