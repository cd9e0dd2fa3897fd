"""Reshaped results: views where that is safe, copies elsewhere."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_fusion

from ..support.chains import Chain, assert_numbers, compiled, module, outputs

START = "f = R.reshape(x, (6, 4)); m = R.matmul(f, W); "
INPUTS = "x[2,3,4] W[4,8]"
SPLIT = START + "p = R.split(m, 2, axis=1); a = p[0]; b = p[1]; "

VIEWS = [
    Chain("result", INPUTS, START + "y = R.reshape(m, (2, 3, 8))", "y"),
    Chain(
        "items", INPUTS, SPLIT + "y = R.reshape(a, (2, 3, 4)); z = R.reshape(b, (4, 6))", "(y, z)"
    ),
]
COPIES = [
    Chain("argument", "x[2,3,4]", "y = R.reshape(x, (6, 4))", "y"),
    Chain("returned", INPUTS, START + "y = R.reshape(m, (2, 3, 8))", "(y, m)"),
    Chain(
        "item_taken_twice",
        INPUTS,
        SPLIT + "c = p[0]; y = R.reshape(a, (4, 6)); z = R.reshape(b, (24,))",
        "(y, z, c)",
    ),
    Chain("used", INPUTS, START + "y = R.reshape(m, (2, 3, 8)); z = R.exp(m)", "(y, z)"),
]


def copies(chain: Chain) -> int:
    """Return how often a compiled function calls a kernel that does nothing but reshape."""
    target = relax_fusion.make_target("llvm")
    pipeline = relax.get_pipeline("relax_fusion", target=target)
    text = pipeline(module([chain]))[chain.name].script()
    return len(re.findall(r"^\s*(?:fused)?(?:_?reshape\d*)+\(", text, re.MULTILINE))


@pytest.mark.parametrize("chain", VIEWS, ids=lambda c: c.name)
def test_a_reshaped_result_is_a_view(chain: Chain) -> None:
    assert copies(chain) == 0


@pytest.mark.parametrize("chain", COPIES, ids=lambda c: c.name)
def test_what_others_may_hold_is_copied(chain: Chain) -> None:
    twice = chain.name == "item_taken_twice"  # c is a reshape, too, of what the matmul splits
    assert copies(chain) == 1 + twice


@pytest.mark.parametrize("chain", [*VIEWS, *COPIES], ids=lambda c: c.name)
def test_results_stay_as_they_are(chain: Chain) -> None:
    mod = module([chain])
    vm = compiled(mod)
    assert_numbers(vm, mod, chain)
    arrays = chain.arrays()
    inputs = [tvm.runtime.tensor(a) for a in arrays]
    first = vm[chain.name](*inputs)
    first = [first] if isinstance(first, tvm.runtime.Tensor) else list(first)
    before = [t.numpy() for t in first]
    outputs(vm, chain.name, [-a for a in arrays[:1]] + arrays[1:])
    for tensor in inputs:  # which no result may share
        tensor.copyfrom(np.zeros(tensor.shape, str(tensor.dtype)))
    for tensor, values in zip(first, before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), values)
        assert np.any(values)
