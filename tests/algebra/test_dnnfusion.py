"""Rewritings that DNNFusion lists: Table 4 and Figure 2 of Niu et al., PLDI 2021."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import pytest
from tvm import ir, relax

from relax_fusion.algebra import Rule
from relax_fusion.algebra.formula import Term, formula

from ..canonical.common import operators
from .cases import Shapes, module_of, simplified

M, N = 5, 64
"""Sizes of the table's tensors; reductions are over the last axis."""

ELEMENTS = M * N


@dataclass(frozen=True)
class Row:
    """A row of Table 4.

    Parameters
    ----------
    after : str
        Its formula after rewriting.
    flops : (int, int)
        Its numbers of operations, before and after.
    found : str
        What we make of it, where that is another formula.
    """

    after: str
    flops: tuple[int, int]
    found: str = ""


TABLE_4 = {
    # Associative
    "(1 / x) * (1 / (x * y))": Row(
        "square(1 / x) * (1 / y)", (4 * ELEMENTS, 4 * ELEMENTS), "1 / (square(x) * y)"
    ),
    "(x * sqrt(y)) * (sqrt(y) * z)": Row("x * y * z", (5 * ELEMENTS, 2 * ELEMENTS)),
    "abs(x) * y * abs(z)": Row("abs(x * z) * y", (4 * ELEMENTS, 3 * ELEMENTS)),
    "(x * sum[r](y)) * (sum[r](y) * z)": Row(
        "x * square(sum[r](y)) * z", (5 * ELEMENTS, 3 * ELEMENTS + M)
    ),
    # Distributive; the paper prints the first one's result as (A + B) C, which is another number
    "x * z + x * y": Row("x * (z + y)", (3 * ELEMENTS, 2 * ELEMENTS)),
    "x + x * y": Row("x * (y + 1)", (2 * ELEMENTS, 2 * ELEMENTS)),
    "square(x + y) - (x + y) * z": Row("(x + y) * ((x + y) - z)", (5 * ELEMENTS, 3 * ELEMENTS)),
    # Commutative
    "sum[r](left_shift(x, c))": Row("left_shift(sum[r](x), c)", (2 * ELEMENTS, ELEMENTS + M)),
    "prod[r](exp(x))": Row("exp(sum[r](x))", (2 * ELEMENTS, ELEMENTS + M)),
}
"""But for A B = B A: see `test_products_and_sums_are_found_in_either_order`."""


def case(before: str, after: str = "") -> Rule:
    return Rule(before, after or before, "inexact")


def built(text: str, shapes: Shapes | None = None) -> ir.IRModule:
    return module_of(case(text), "int32" if "shift" in text else "float32", shapes=shapes)


def computing(mod: ir.IRModule) -> list[str]:
    """Return the operators of a module, but for those that its tests add."""
    return sorted(name for name in operators(mod) if name not in ("reshape", "sign"))


def flops(mod: ir.IRModule) -> int:
    """Return the operations of a module as the paper counts them: one an element."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    total = 0
    for call in (b.value for b in bindings if isinstance(b.value, relax.Call)):
        if call.op.name not in ("relax.reshape", "relax.sign"):
            tensors = [e.ty for e in (call, *call.args) if isinstance(e.ty, relax.TensorType)]
            total += max(prod(map(int, t.shape.values)) for t in tensors)
    return total


def written(term: Term) -> tuple[int, int]:
    """Return the operations of a formula as it is written, and the elements of its result."""
    if not term.op:
        return 0, 1 if term.value is not None or term.name == "c" else ELEMENTS
    counts, sizes = zip(*map(written, term.args), strict=True)
    return sum(counts) + max(sizes), M if term.op in ("sum", "prod") else max(sizes)


@pytest.mark.parametrize("before", TABLE_4)
def test_table_4(before: str) -> None:
    row = TABLE_4[before]
    assert written(formula(before))[0] == row.flops[0]
    assert flops(built(row.after)) == row.flops[1]
    after, told = simplified(built(before))
    assert told and computing(after) == computing(built(row.found or row.after))
    assert flops(after) <= row.flops[1]


SWAPPED: Mapping[str, str] = {
    "(1 / (y * x)) * (1 / x)": "1 / (square(x) * y)",
    "(sqrt(y) * x) * (z * sqrt(y))": "x * y * z",
    "abs(x) * (abs(z) * y)": "abs(x * z) * y",
    "(sum[r](y) * x) * (z * sum[r](y))": "x * square(sum[r](y)) * z",
    "z * x + x * y": "x * (z + y)",
    "y * x + x": "x * (y + 1)",
    "square(x + y) - z * (x + y)": "(x + y) * ((x + y) - z)",
}


@pytest.mark.parametrize("before", SWAPPED)
def test_products_and_sums_are_found_in_either_order(before: str) -> None:
    after, told = simplified(built(before))
    assert told and computing(after) == computing(built(SWAPPED[before]))


@pytest.mark.parametrize("before", TABLE_4)
def test_what_is_read_elsewhere_stays(before: str) -> None:
    rule = case(before)
    mod = module_of(rule, "int32" if "shift" in before else "float32", leaks=True)
    assert computing(simplified(mod)[0]) == computing(mod)


FIGURE_2: Mapping[str, tuple[str, list[str]]] = {
    # A product by B, its reciprocal, and that of it times the weight C
    "associative": (
        "(1 / (x @ A)) * (1 / ((x @ A) * C))",
        ["divide", "matmul", "multiply", "multiply"],
    ),
    # A product by B times the weights C and D; where they scale columns, nothing but the product
    "distributive": ("(x @ A) * C + (x @ A) * D", ["matmul", "multiply"]),
    "distributive, columns": ("(x @ A) * V + (x @ A) * W", ["matmul"]),
    "commutative": ("sum[r](left_shift(x, c))", ["left_shift", "sum"]),
}


@pytest.mark.parametrize("name", FIGURE_2)
def test_figure_2(name: str) -> None:
    before, wanted = FIGURE_2[name]
    after, told = simplified(
        built(before, {"C": (M, 96), "D": (M, 96)}), exact=name.startswith("distr")
    )
    assert told and computing(after) == wanted
