"""What a graph narrows and widens again is rounded by a kernel, too: such chains end before."""

from __future__ import annotations

import pytest

from relax_fusion import Reason

from ..support.attention_chains import attention
from ..support.chains import Chain, assert_declined, module, run_pass

WIDE = 'm = R.matmul(x, W, out_dtype="float32"); a = R.astype(m, "float16")\n'
HEADS = "q[1,2,6,8] k[1,2,6,8] v[1,2,6,8]"
ROPE = (
    'h = R.reshape(a, R.shape([6, 4, 16])); f = R.astype(h, "float32")\n'
    "p = R.split(f, 2, axis=-1); p0 = p[0]; p1 = p[1]; q = R.negative(p1)\n"
    "t = R.concat((q, p0), axis=-1); C1 = R.expand_dims(C, [1]); S1 = R.expand_dims(S, [1])\n"
    'u = R.multiply(f, C1); w = R.multiply(t, S1); z = R.add(u, w); y = R.astype(z, "float16")'
)


@pytest.mark.parametrize(
    ("name", "pattern", "inputs", "steps"),
    [
        (
            "epilogue",
            "FuseMatmulEpilogue",
            "x[6,32] W[32,48]",
            'b = R.astype(a, "float32"); y = R.nn.silu(b)',
        ),
        (
            "two_matmuls",
            "FuseMatmulEpilogue",
            "x[6,32] W[32,48] B[48,8]",
            'b = R.astype(a, "float32"); c = R.nn.silu(b); d = R.astype(c, "float16")\n'
            "e = R.matmul(d, B); y = R.exp(e)",
        ),
        ("rope", "FuseMatmulEpilogue", "x[6,64] W[64,64] C[6,16]:float32 S[6,16]:float32", ROPE),
    ],
)
def test_a_kernel_ends_where_its_result_is_rounded_on_purpose(
    name: str, pattern: str, inputs: str, steps: str
) -> None:
    chain = Chain("main", inputs, WIDE + steps, "y", dtype="float16")
    _, decisions = run_pass(module([chain]), pattern)
    assert decisions[0].where == "a"
    assert decisions[0].validation == "checked"


def test_a_gate_that_is_rounded_on_purpose_ends_there() -> None:
    body = (
        'p = R.matmul(x, Wg, out_dtype="float32"); u = R.matmul(x, Wu, out_dtype="float32")\n'
        's = R.nn.silu(p); c = R.astype(s, "float16"); d = R.astype(c, "float32")\n'
        "y = R.multiply(d, u)"
    )
    chain = Chain("main", "x[6,32] Wg[32,48] Wu[32,48]", body, "y", dtype="float16")
    _, decisions = run_pass(module([chain]), "FuseGatedFFN")
    found = {d.where: str(d.decline) for d in decisions}
    words = "unsupported dtype: c is rounded to float16, and read as more by d"
    assert found == {"c": "None", "y": words}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ('a = R.astype(s0, "float16"); s = R.astype(a, "float32")', "a is rounded to float16"),
        (
            'a = R.astype(s0, "bfloat16"); b = R.reshape(a, R.shape([2, 6, 6]))\n'
            'c = R.astype(b, "float32"); s = R.reshape(c, R.shape([1, 2, 6, 6]))',
            "a is rounded to bfloat16, and read as more by c",
        ),
    ],
)
def test_scores_that_are_rounded_on_purpose_are_declined(steps: str, words: str) -> None:
    chain = Chain("main", HEADS, attention(steps), "o")
    assert_declined(module([chain]), "FuseAttentionChain", Reason.DTYPE, words)


def test_what_was_narrow_already_is_not_rounded() -> None:
    steps = 'a = R.astype(s0, "float32"); b = R.astype(a, "float16"); s = R.astype(b, "float16")'
    _, decisions = run_pass(
        module([Chain("main", HEADS, attention(steps), "o", dtype="float16")]),
        "FuseAttentionChain",
    )
    assert [d.fused for d in decisions] == [True]


def test_what_was_narrow_may_be_widened_and_narrowed_again() -> None:
    body = (
        'm = R.matmul(x, W); a = R.astype(m, "float32"); b = R.astype(a, "float16")\n'
        'c = R.astype(b, "float32"); d = R.nn.silu(c); y = R.astype(d, "float16")'
    )
    chain = Chain("main", "x[6,32] W[32,48]", body, "y", dtype="float16")
    _, decisions = run_pass(module([chain]), "FuseMatmulEpilogue")
    assert [(d.where, d.fused) for d in decisions] == [("y", True)]
