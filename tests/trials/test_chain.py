"""A chain that existing families run is one file with a pass, registered from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm

from relax_fusion import (
    PATTERNS,
    FusingPass,
    PipelineError,
    Reason,
    Report,
    TilePlan,
    TilePlanError,
    make_target,
    register_pass,
)
from relax_fusion.options import make_options
from relax_fusion.workload import NormMatmul, Projection

from ..support.chains import Chain, assert_declined, assert_untouched, compiled, module, outputs
from ..support.targets import compile_chain, generator
from .pointwise_convolution import FusePointwiseConvolution

NAME = "FusePointwiseConvolution"
MULTIPLIED = "MultiplyConvolutions"
"""Our own pass of convolutions, which comes first."""
STEPS = "; a = R.add(c, d); s = R.nn.silu(a); y = R.add(s, r)"


def convolution(weight: str, attrs: str, steps: str = "", dtype: str = "float32") -> Chain:
    """Return a convolution of a number of images, and what follows it."""
    kernel = "HWIO" if weight == "1,1,16,24" else "OHWI"
    layouts = f"data_layout='NHWC', kernel_layout='{kernel}'"
    body = f"c = R.nn.conv2d(x, W, {attrs or layouts}){steps}"
    inputs = f"x[b,5,3,16] W[{weight}] d[24] r[b,5,3,24]"
    return Chain(kernel, inputs, body, "y" if steps else "c", {"b": 2}, dtype)


CHAINS = [convolution(weight, "", STEPS) for weight in ("24,1,1,16", "1,1,16,24")]


class Undecorated(FusingPass):
    """A pass without a decorator."""

    def match(self, view: Any, var: Any) -> None:
        """Match nothing."""


Other = tvm.transform.module_pass(type("Other", (Undecorated,), {}), opt_level=0, name="Other")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = dict(PATTERNS)
    register_pass(FusePointwiseConvolution, before="FuseMatmulEpilogue")
    yield
    PATTERNS.clear()
    PATTERNS.update(before)


def test_numbers() -> None:
    report = Report()
    machine = compiled(module(CHAINS), CHAINS, report=report, disable=MULTIPLIED)
    assert {d.where for d in report.fused} == {"y"} and report.declined == []
    for decision, layout in zip(report.fused, ("kn", "nk"), strict=True):
        work = decision.workload
        projection = Projection(24, layout, ("bias", "silu", "residual"))
        assert decision.pattern == NAME and work.rows.upper == 30
        assert work == NormMatmul(work.rows, 16, (projection,), None, "float32", "float32")
    for chain in CHAINS:
        arrays = chain.arrays()
        x, weight, bias, residual = (a.astype("float64") for a in arrays)
        matrix = weight[:, 0, 0].T if chain.name == "OHWI" else weight[0, 0]
        total = x @ matrix + bias
        (got,) = outputs(machine, chain.name, arrays)
        np.testing.assert_allclose(got, total / (1 + np.exp(-total)) + residual, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_of_a_gpu(dtype: str) -> None:
    built = compile_chain(
        convolution("24,1,1,16", "", STEPS, dtype),
        make_target("h200"),
        backend="tir",
        disable=MULTIPLIED,
    )
    (decision,) = built.report.fused
    assert decision.pattern == NAME
    kernels = built.kernels()
    assert kernels and all(kernel.threads > 1 for kernel in kernels)
    if generator(built.target) is None:
        assert "__global__" in built.source()


@pytest.mark.parametrize(
    ("weight", "attrs", "reason", "words"),
    [
        ("24,1,1,16", "strides=[2, 1]", Reason.ATTRIBUTE, "strides [2, 1], padding [0"),
        ("24,1,1,16", "padding=[0, 0, 1, 0]", Reason.ATTRIBUTE, "padding [0, 0, 1, 0]"),
        ("24,1,1,4", "groups=4", Reason.ATTRIBUTE, "groups 4; must be 1, 0, 1"),
        ("16,1,1,24", "IHWO", Reason.LAYOUT, "layouts are NHWC, IHWO, NHWC; must be NHWC, "),
        ("n,1,1,16", "", Reason.SHAPE, "a size of the weight is dynamic (n)"),
    ],
)
def test_chains_that_are_declined(weight: str, attrs: str, reason: Reason, words: str) -> None:
    kernel = attrs if attrs.isupper() else "OHWI"
    given = "" if attrs == kernel else attrs
    attrs = f"data_layout='NHWC', kernel_layout='{kernel}', {given}"
    assert_declined(module([convolution(weight, attrs)]), NAME, reason, words)


def test_convolutions_of_several_pixels_are_none() -> None:
    assert_untouched(module([convolution("24,2,1,16", "")]), NAME)


def test_passes_from_outside_are_named_as_ours() -> None:
    assert list(PATTERNS)[-2:] == [NAME, "FuseMatmulEpilogue"]
    assert make_options("llvm", {"disable": [NAME]}).disable == (NAME,)
    with pytest.raises(PipelineError, match=f"must be one of .*, {NAME}, FuseMatmulEpilogue"):
        make_options("llvm", {"disable": ["FusePointwise"]})
    with pytest.raises(TilePlanError, match="block_k is 64, the reduction has 16 elements"):
        compiled(
            module(CHAINS), plans={NAME: TilePlan(8, 8, 64, family="cpu_tiles")}, disable=MULTIPLIED
        )


@pytest.mark.parametrize(
    ("made", "before", "words"),
    [
        (FusePointwiseConvolution, "FuseGatedFFN", f"pass {NAME}: there is one of this name"),
        (FusePointwiseConvolution(), "FuseGatedFFN", "must be a class that module_pass decorated"),
        (Undecorated, "FuseGatedFFN", "pass is .*; must be a class that module_pass decorated"),
        (Other, "FuseGate", "pass Other: before is 'FuseGate'; must be of FuseAdapters, "),
        (Other, ["FuseGatedFFN"], "before is .*; must be of"),
    ],
)
def test_what_is_no_pass_is_refused(made: Any, before: Any, words: str) -> None:
    known = list(PATTERNS)
    with pytest.raises(PipelineError, match=words):
        register_pass(made, before)
    assert list(PATTERNS) == known
