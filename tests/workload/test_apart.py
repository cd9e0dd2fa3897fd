"""What a chain consists of if its pass leaves it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.workload import (
    Adapter,
    Atom,
    Attention,
    DynamicDim,
    GatedFFN,
    Norm,
    NormMatmul,
    Projection,
    Rope,
    Workload,
)

from ..support.matmul_chains import TwoMatmuls

ROWS = DynamicDim("rows")
SIZES = {"rows": 10, "batch": 3, "q_len": 5, "kv_len": 7}
HALF = "float16", "float16"
RMS = Norm("rms", 1e-5)
Q, K = Projection(32, "nk", ("bias",), Rope(8, 32, "float32")), Projection(16, "nk")
NORMED = NormMatmul(ROWS, 64, (Q, K), RMS, *HALF)
GATED = GatedFFN(ROWS, 64, 48, "nk", True, True, "silu", RMS, *HALF)
CHAIN = TwoMatmuls(ROWS, 64, 16, 32, ("nk", "nk"), ("bias", "gelu"), (2.0, "residual"), *HALF)
ATTENTION = Attention(3, 5, 7, 4, 2, 8, 8, 1.0, "none", None, *HALF)
X, OUT = 10 * 64 * 2, 10 * 48 * 2


def alone(*projections: Projection, norm: Norm | None = None) -> NormMatmul:
    return NormMatmul(ROWS, 64, projections, norm, *HALF)


def plain(k: int, n: int, *steps: str) -> NormMatmul:
    return NormMatmul(10, k, (Projection(n, "nk", steps),), None, *HALF)


GATE, UP = Projection(48, "nk", ("silu",)), Projection(48, "nk")
EXPECTED: dict[str, tuple[Workload, list[Atom]]] = {
    "norm": (NORMED, [Atom(2 * X, normalised=640), Atom(0, alone(Q), 10), Atom(0, alone(K), 10)]),
    "sum in front": (
        alone(K, norm=replace(RMS, residual=True)),
        [Atom(3 * X), Atom(2 * X, normalised=640), Atom(0, alone(K), 10)],
    ),
    "alone": (alone(K), [Atom(0, alone(K), 10)]),
    "rotated": (alone(Q), [Atom(0, alone(replace(Q, rope=None)), 10), Atom(2 * 10 * 32 * 2)]),
    "adapted": (
        alone(replace(K, adapter=Adapter(8, "kn", 2.0)), K),
        [
            Atom(0, alone(K), 10),
            Atom(0, alone(Projection(8, "kn", (2.0,))), 10),
            Atom(0, replace(alone(Projection(16, "nk", ("residual",))), k=8), 10),
            Atom(0, alone(K), 10),
        ],
    ),
    "gated": (
        GATED,
        [Atom(0, alone(Projection(96, "nk"), norm=RMS), 10), Atom(3 * OUT, slots=480 * 14)],
    ),
    "two weights": (
        replace(GATED, merged=False, norm=None),
        [Atom(0, alone(GATE), 10), Atom(0, alone(UP), 10), Atom(3 * OUT, slots=480)],
    ),
    "chain": (
        CHAIN.chain,
        [Atom(0, plain(64, 16), 10, slots=4640), Atom(0, plain(16, 32, "residual"), 10)],
    ),
    "batch": (
        replace(CHAIN, batch=3, inner=(), outer=()).chain,
        [Atom(0, plain(64, 16), 10, 3, "rule"), Atom(0, plain(16, 32), 10, 3, "rule")],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_kernels_of_a_chain_that_is_left_apart(name: str) -> None:
    work, atoms = EXPECTED[name]
    assert work.apart(**SIZES) == atoms


def test_attention_is_two_products_and_a_softmax() -> None:
    keys, values, scores, softmax, result = ATTENTION.apart(**SIZES)
    assert keys == values == Atom(3 * 3 * 2 * 7 * 8 * 2)  # read once, written for both heads
    assert softmax == Atom(2 * 3 * 4 * 5 * 7 * 2, rows=3 * 4 * 5, scores=3 * 4 * 5 * 7)
    for atom, k, n in ((scores, 8, 7), (result, 7, 8)):
        assert (atom.rows, atom.matrices, atom.maker) == (5, 12, "rule")
        assert (atom.matmul.k, atom.matmul.n) == (k, n)


def test_products_whose_sizes_are_known_late_are_left_to_tvm() -> None:
    atoms = replace(ATTENTION, kv_len=DynamicDim("keys")).apart(**SIZES)
    assert {atom.maker for atom in atoms if atom.matmul} == {"tvm"}


def test_a_cache_is_copied_as_far_as_attention_reads_it() -> None:
    work = replace(ATTENTION, q_heads=2)
    copied = Atom(2 * 3 * 2 * 7 * 8 * 2)
    assert replace(work, kv_prefix=True).apart(**SIZES) == [copied, copied, *work.apart(**SIZES)]


def test_fields_that_were_added_later_leave_keys_as_they_were() -> None:
    norm = NormMatmul(5, 16, (Projection(24, "nk", ("bias",)),), RMS, "float32", "float32")
    assert (ATTENTION.key, norm.key) == ("025d44e5", "b8d6381e")
    assert replace(ATTENTION, shared=2).key != ATTENTION.key
