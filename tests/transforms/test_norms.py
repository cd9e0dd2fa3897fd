"""LegalizeNorms: norms that no matmul reads, as one kernel each."""

from __future__ import annotations

import pytest
import tvm

from relax_fusion.transforms.norms import LegalizeNorms

from ..support.chains import Chain, assert_numbers, calls, compiled, module

ONE_MORE = 'o = R.add(g, R.const(1.0, "float32")); '
NORM = "n = R.nn.rms_norm({}, {}, axes=[-1], epsilon=1e-5); "
TO_HALF = 'y = R.astype(n, "float16")'
WIDE = 'x32 = R.astype(x, "float32"); g32 = R.astype(g, "float32"); '
WIDE_MORE = WIDE + 'o = R.add(g32, R.const(1.0, "float32")); '
LAYER = NORM.replace("rms_norm({}, {}", "layer_norm(x, g32, c32")

CHAINS = [
    Chain("post_norm", "x[2,b,48] r[2,b,48] g[48]", ONE_MORE + NORM.format("x", "o")
          + "y = R.add(r, n)", "y", {"b": 3}),
    Chain("half", "x[5,48] g[48]", WIDE_MORE + NORM.format("x32", "o") + TO_HALF, "y",
          dtype="float16"),
    Chain("rounded", "x[5,48] g[48]:float16",
          WIDE_MORE.replace('x32 = R.astype(x, "float32"); ', "") + NORM.format("x", "o") + TO_HALF,
          "y"),
    Chain("brain", "x[5,33] g[33]",
          WIDE_MORE + NORM.format("x32", "o") + 'y = R.astype(n, "bfloat16")', "y",
          dtype="bfloat16"),
    Chain("layer", "x[5,48] g[48]:float16 c[48]:float16",
          'g32 = R.astype(g, "float32"); c32 = R.astype(c, "float32"); ' + LAYER
          + "y = R.nn.relu(n)", "y"),
    Chain("wide_norm_read_too", "x[5,48] g[48]",
          WIDE_MORE + NORM.format("x32", "o") + TO_HALF + "; z = R.nn.relu(n)", "(y, z)",
          dtype="float16"),
]  # fmt: skip
LEFT = {
    "post_norm": ["add", "call_tir", "add"],
    "half": ["astype", "astype", "add", "rms_norm", "call_tir"],
    "rounded": ["astype", "add", "call_tir", "astype"],
    "brain": ["astype", "astype", "add", "rms_norm", "call_tir"],
    "layer": ["astype", "astype", "call_tir", "relu"],
    "wide_norm_read_too": ["astype", "astype", "add", "rms_norm", "call_tir", "relu"],
}
"""The norms' kernels and what the pass leaves, unread or not."""


@pytest.fixture(scope="module")
def machine() -> tuple:
    mod = module(CHAINS)
    return compiled(mod, CHAINS), mod


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_a_norm_is_one_kernel(machine: tuple, chain: Chain) -> None:
    found = calls(LegalizeNorms()(module([chain]))[chain.name])
    assert [name.removeprefix("nn.") for name in found] == LEFT[chain.name]
    assert_numbers(*machine, chain)


STAY = {
    "operator": NORM.format("x", "g"),
    "another number": ONE_MORE.replace("1.0", "2.0") + NORM.format("x", "o"),
    "another axis": ONE_MORE + NORM.format("x", "o").replace("-1", "0"),
    "gamma of one element": 'q = R.square(x); m = R.mean(q, axis=[-1], keepdims=True); '
    'e = R.add(m, R.const(1e-5, "float32")); s = R.rsqrt(e); h = R.multiply(x, s); '
    'k = R.ones((1,), "float32"); n = R.multiply(h, k); ',
}  # fmt: skip


@pytest.mark.parametrize("case", STAY)
def test_others_stay(case: str) -> None:
    mod = module([Chain("main", "x[8,8] g[8]", STAY[case] + "y = R.nn.relu(n)", "y")])
    tvm.ir.assert_structural_equal(LegalizeNorms()(mod), mod)
