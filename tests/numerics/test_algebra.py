"""docs/numerics.md: what algebraic rules may round, each beside the formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from relax_fusion.algebra import RULES, Rule
from relax_fusion.algebra.firing import comparison
from relax_fusion.algebra.matcher import found_at
from relax_fusion.equivalence.interpreter import Interpreter
from relax_fusion.equivalence.sizes import Sizes
from relax_fusion.matching.pattern import BlockView
from relax_fusion.workload.reference import numpy_dtype

from ..algebra.cases import module_of, simplified

STEPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def rules_of(sentence: str) -> Any:
    return pytest.mark.parametrize("rule", [r for r in RULES if r.numbers == sentence], ids=str)


def rule_of(before: str) -> Rule:
    return next(rule for rule in RULES if rule.before == before)


def errors(rule: Rule, dtype: str) -> tuple[float, float, float]:
    """Return the errors of a formula, and of what takes its place, and one rounding step."""
    mod = module_of(rule, dtype)
    view = BlockView(mod["main"].body.blocks[0], mod)
    ways = (f for var in view.index for f in found_at(view, rule.pattern, var) if rule.when(f))
    sides = comparison(rule, next(ways))
    kind, rng = numpy_dtype(dtype), np.random.default_rng(3)

    def rounded(_: object, value: np.ndarray) -> np.ndarray:
        return np.asarray(value).astype(kind).astype("float64")

    def drawn(var: relax.Var) -> np.ndarray:
        shape = tuple(map(int, var.ty.shape.values))
        if "int" in str(var.ty.dtype):
            return rng.integers(0, 5, shape)
        values = rng.standard_normal(shape)
        return rounded(None, np.abs(values) + 0.25 if "power" in rule.before else values)

    given = {v: drawn(v) for v in sides.leaves}
    made = []
    for bindings, result in ((sides.before, sides.results[0]), (sides.after, sides.results[1])):
        for hook in (None, rounded):
            values = dict(given)
            Interpreter().run(bindings, values, Sizes(), hook)
            made.append(np.asarray(Interpreter().value(result, values, Sizes())))
    wanted, old, _, new = made
    size, *off = (
        float(np.sqrt(np.mean(np.square(v)))) for v in (wanted, old - wanted, new - wanted)
    )
    return off[0], off[1], size * STEPS[dtype]


@rules_of("A1")
@pytest.mark.parametrize("dtype", STEPS)
def test_a1_constants_are_rounded_once(rule: Rule, dtype: str) -> None:
    old, new, step = errors(rule, dtype)
    assert new <= 1.1 * old + 0.5 * step


def test_a1_what_overflows_is_left() -> None:
    rule = rule_of("(x @ A) * c")
    for value, fires in ((4.0, True), (60000.0, False)):
        _, told = simplified(module_of(rule, "float16", values={"c": value}), exact=True)
        assert bool(told) is fires


@pytest.mark.parametrize("rule", ["(x @ A) * c", "(x * c) @ A"])
def test_a1_weights_that_would_lose_digits_are_left(rule: str) -> None:
    for value, dtype, fires in ((1e-5, "float16", False), (1e-5, "bfloat16", True)):
        _, told = simplified(module_of(rule_of(rule), dtype, values={"c": value}), exact=True)
        assert bool(told) is fires


def test_a1_a_number_that_float16_does_not_have_is_left() -> None:
    rule = rule_of("(x * c) / d")  # a scale and a soft-cap
    for dtype, cap, fires in (("float32", 50.0, 1), ("float16", 50.0, 0), ("float16", 32.0, 1)):
        mod = module_of(rule, dtype, values={"c": 0.0625, "d": cap})
        assert (str(rule) in [t.rule for t in simplified(mod, exact=True)[1]]) == fires


@rules_of("A2")
@pytest.mark.parametrize("dtype", STEPS)
def test_a2_powers_have_two_roundings(rule: Rule, dtype: str) -> None:
    _, new, step = errors(rule, dtype)
    assert new <= step


@rules_of("A3")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a3_other_orders_err_no_more(rule: Rule, dtype: str) -> None:
    old, new, step = errors(rule, dtype)
    assert new <= 1.5 * old + step


@rules_of("A3")
def test_a3_float16_keeps_its_order(rule: Rule) -> None:
    assert not simplified(module_of(rule, "float16"), exact=True)[1]


@rules_of("A4")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a4_numbers_behind_sums(rule: Rule, dtype: str) -> None:
    old, new, step = errors(rule, dtype)
    assert new <= 1.1 * old + step


def test_a4_a_small_number_stays_in_front_of_a_sum_in_float16() -> None:
    rule = rule_of("sum[r](x * c)")
    for dtype, value, fires in (
        *(("float32", 0.125, True), ("float16", 0.125, False)),
        ("float16", 8.0, True),
    ):
        _, told = simplified(module_of(rule, dtype, values={"c": value}), exact=True)
        assert bool(told) is fires
