"""MergeDuplicates: what is computed once, and what only looks the same."""

from __future__ import annotations

import pytest

from relax_fusion.canonical import MergeDuplicates

from .common import assert_same_numbers, module, operators

X = "x: R.Tensor(('b', 's', 4), 'float32')"

MERGED = {
    "casts": (
        "a = R.astype(x, 'float16')\nc = R.astype(x, 'float16')\ny = R.multiply(a, c)",
        ["astype", "multiply"],
    ),
    "what is made of duplicates": (
        "a = R.exp(x)\nc = R.exp(x)\nd = R.reshape(a, R.shape([b * s, 4]))\n"
        "e = R.reshape(c, R.shape([b * s, 4]))\ny = R.subtract(d, e)",
        ["exp", "reshape", "subtract"],
    ),
    "by equal constants": (
        "a = R.multiply(x, R.const([1.0, 2.0, 3.0, 4.0], 'float32'))\n"
        "c = R.multiply(x, R.const([1.0, 2.0, 3.0, 4.0], 'float32'))\ny = R.add(a, c)",
        ["multiply", "add"],
    ),
    "parts": (
        "p = R.split(x, 2, axis=2)\na = p[0]\nq = R.split(x, 2, axis=2)\nc = q[0]\ny = R.add(a, c)",
        ["split", "add"],
    ),
}


@pytest.mark.parametrize("case", MERGED)
def test_merged(case: str) -> None:
    body, expected = MERGED[case]
    before = module(X, body.replace("'", '"'))
    after = MergeDuplicates()(before)
    assert operators(after) == expected
    assert_same_numbers(before, after)
    assert MergeDuplicates()(after).same_as(after)


WRITE = (
    "z = R.call_inplace_packed('zero', {0}, inplace_indices=[0], "
    "ty_args=[R.Tensor((b, s, 4), 'float32')])\n"
)
KEPT = {
    "other attributes": "a = R.sum(x, axis=[0])\nc = R.sum(x, axis=[1])\ny = R.add(a, c)",
    "zeros of two signs": "a = R.divide(x, R.const(0.0, 'float32'))\n"
    "c = R.divide(x, R.const(-0.0, 'float32'))\ny = R.add(a, c)",
    "one is overwritten": "a = R.exp(x)\nc = R.exp(x)\n" + WRITE.format("a") + "y = R.add(z, c)",
    "its operand is overwritten": "a = R.exp(x)\n" + WRITE.format("x") + "c = R.exp(x)\n"
    "e = R.add(z, c)\ny = R.add(a, e)",
    "calls of the world outside": "a = R.call_pure_packed('f', x, ty_args=(R.Tensor(ndim=3),))\n"
    "c = R.call_pure_packed('f', x, ty_args=(R.Tensor(ndim=3),))\ny = R.add(a, c)",
    "what is drawn": "a = R.nn.dropout(x, rate=0.5)\nc = R.nn.dropout(x, rate=0.5)\n"
    "d = a[0]\ne = c[0]\ny = R.add(d, e)",
    "a result": "a = R.exp(x)\nc = R.negative(a)\ny = R.exp(x)",
}


@pytest.mark.parametrize("case", KEPT)
def test_stays(case: str) -> None:
    before = module(X, KEPT[case].replace("'", '"'))
    assert MergeDuplicates()(before).same_as(before)
