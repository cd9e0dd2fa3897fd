"""Operators of block graphs: a new one is one entry of one table."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_fusion.compute.reference import FUNCTIONS as TIR
from relax_fusion.compute.reference import reference_prim_func
from relax_fusion.tiling import Schedule, iteration_space, parse, place
from relax_fusion.triton_bridge.generated import kernel_text
from relax_fusion.triton_bridge.generated.values import FUNCTIONS as TRITON
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Graph
from relax_fusion.workload.operators import OPERATORS, Operator
from relax_fusion.workload.reference import FUNCTIONS as NUMPY
from relax_fusion.workload.reference import evaluate
from relax_fusion.workload.roofline import flops, instructions, slots_of
from relax_fusion.workload.values import Axis, apply

from ..support.quick import loaded, quickly

VALUES = np.array([-30.0, -2.5, -1.0, 0.0, 0.5, 3.0, 30.0])
EXACT = {
    "square": VALUES**2,
    "minus": -VALUES,
    "softplus": np.logaddexp(0, VALUES),
    "hard_sigmoid": np.clip((VALUES + 3) / 6, 0, 1),
    "hard_swish": VALUES * np.clip((VALUES + 3) / 6, 0, 1),
}


def mapped(name: str) -> Graph:
    g = GraphBuilder()
    i = Axis("i", len(VALUES))
    x = g.input("x", (len(VALUES),), "float32")
    g.output(g.map("y", (i,), apply(name, x[i]), "float32"))
    return g.graph()


def test_each_operator_has_a_function_everywhere_or_a_formula() -> None:
    for name, known in OPERATORS.items():
        there = [name in table for table in (NUMPY, TIR, TRITON)]
        assert there == [known.formula is None] * 3, name
    assert {n for n, known in OPERATORS.items() if known.formula} == set(EXACT)


@pytest.mark.parametrize("name", EXACT)
def test_formulas(name: str) -> None:
    graph, x = mapped(name), VALUES.astype("float32")
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], EXACT[name], rtol=1e-6, atol=1e-12)
    run = loaded(quickly(reference_prim_func(graph).with_attr("global_symbol", "main")))["main"]
    out = tvm.runtime.empty(x.shape, "float32")
    run(tvm.runtime.tensor(x), out)
    np.testing.assert_allclose(out.numpy(), EXACT[name], rtol=1e-5, atol=1e-12)


def test_one_entry_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Operator(1, 0, "cube({})", lambda o, x: o.multiply(o.square(x), x))
    monkeypatch.setitem(OPERATORS, "cube", entry)
    graph = mapped("cube")
    assert str(graph) == "y[i]  float32 = cube(x[i])"
    assert evaluate(graph, {"x": VALUES})["y"].tolist() == (VALUES**3).tolist()
    assert flops(graph, {}) == 2 * len(VALUES)
    assert "T_" not in str(reference_prim_func(graph))
    space = iteration_space(graph)
    schedule = Schedule(space, place(space, parse("i", ("i",)), "i"), (len(VALUES),))
    assert "y = ((x * x) * x)" in kernel_text(graph, schedule).text


def test_instructions_are_counted_along_the_axes_that_they_have() -> None:
    m, n = Axis("m", 8), Axis("n", 4)
    g = GraphBuilder()
    x, t = g.input("x", (8, 4), "float32"), g.input("t", (8,), "float32")
    value = apply("hard_swish", x[m, n]) * apply("rsqrt", t[m] + 1.0)
    assert slots_of("hard_swish") == 1 + slots_of("hard_sigmoid") == 1 + 1 + 1 + 1 + 8
    row, element = frozenset("m"), frozenset("mn")
    assert instructions(value) == {row: 1 + 24, element: 1 + slots_of("hard_swish")}
