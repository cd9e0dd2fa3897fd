"""docs/numerics.md: what a pass must leave as the graph has it, or refuse."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tvm import relax

from relax_fusion import Reason

from ..support.chains import Chain, assert_declined, compiled, module, outputs

NARROWED = 'h = R.astype(a, "float16"); f = R.astype(h, "float32")\n'
CASTS = [
    Chain(
        "behind_a_matmul",
        "x[3,2] w[2,4] b[4]",
        "a = R.matmul(x, w)\n" + NARROWED + "y = R.add(f, b)",
        "y",
    ),
    Chain(
        "in_front_of_a_matmul",
        "x[3,2] z[3,2] w[2,4] b[4]",
        "s = R.sum(x, axis=[-1], keepdims=True); a = R.multiply(s, z)\n"
        + NARROWED
        + "c = R.matmul(f, w); y = R.add(c, b)",
        "y",
    ),
    Chain(
        "between_two_matmuls",
        "x[3,2] w[2,1] v[1,4] b[4]",
        "a = R.matmul(x, w)\n" + NARROWED + "c = R.matmul(f, v); y = R.add(c, b)",
        "y",
    ),
]


@pytest.fixture(scope="module")
def casts() -> Iterator[relax.VirtualMachine]:
    yield compiled(module(CASTS), always_fuse=True)


@pytest.mark.parametrize("chain", CASTS, ids=lambda chain: chain.name)
def test_r7_a_cast_to_a_narrower_type_and_back_stays(
    casts: relax.VirtualMachine, chain: Chain
) -> None:
    shapes = {name: [int(d) for d in dims] for name, dims, _ in chain.tensors()}
    arrays = {name: np.ones(shape, "float32") for name, shape in shapes.items()}
    arrays["x"][:, 0] = 2048
    if chain.name == "in_front_of_a_matmul":
        arrays["w"][1] = 0
    (got,) = outputs(casts, chain.name, list(arrays.values()))
    assert (got == 2049).all()  # 2049 is rounded to 2048, and 1 is added


NO_FEATURES = {
    "in": Chain("matmul", "x[3,0] w[0,4] b[4]", "a = R.matmul(x, w); y = R.add(a, b)", "y"),
    "out": Chain("matmul", "x[3,4] w[4,0] b[0]", "a = R.matmul(x, w); y = R.add(a, b)", "y"),
}


@pytest.mark.parametrize("chain", NO_FEATURES.values(), ids=NO_FEATURES)
def test_e3_no_features_are_not_fused(chain: Chain) -> None:
    assert_declined(
        module([chain]), "FuseMatmulEpilogue", Reason.SHAPE, "is 0; it must be at least 1"
    )


def test_e3_heads_of_no_features_are_not_fused() -> None:
    chain = Chain("heads", "q[1,3,2,0] k[1,4,2,0] v[1,4,2,8]", "o = R.nn.attention(q, k, v)", "o")
    assert_declined(
        module([chain]), "FuseAttentionChain", Reason.SHAPE, "is 0; it must be at least 1"
    )
