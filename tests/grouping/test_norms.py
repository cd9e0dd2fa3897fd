"""Norms that no matmul reads: one kernel each, with the casts and the sum around them."""

from __future__ import annotations

import pytest

from relax_fusion.matching.pattern import calls_in

from ..support.chains import Chain, assert_numbers, compiled, module
from ..support.grouped import lowered

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


@pytest.fixture(scope="module")
def machine() -> tuple:
    mod = module(CHAINS)
    return compiled(mod, CHAINS), mod


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_a_norm_is_one_kernel(machine: tuple, chain: Chain) -> None:
    made, _ = lowered(module([chain]))
    others = 2 * (chain.name == "wide_norm_read_too")  # the cast and the ReLU
    assert len(list(calls_in(made[chain.name], "relax.call_tir"))) == 1 + others
    assert_numbers(*machine, chain)
