"""Every rule: where it fires and where not, its numbers, a proof, and what finds a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_fusion.algebra import RULES, Rule
from relax_fusion.algebra.firing import comparison
from relax_fusion.algebra.formula import Term
from relax_fusion.algebra.matcher import found_at
from relax_fusion.matching.pattern import BlockView

from ..canonical.common import assert_same_numbers
from .cases import AWAY, NEGATIVE, SHAPES, VALUES, axes_of, module_of, names_of, simplified

EVERY = pytest.mark.parametrize("rule", RULES, ids=str)


def dtype_of(rule: Rule) -> str:
    return "float32" if "float32" in rule.dtypes else "int32"


@EVERY
def test_it_fires_and_keeps_the_numbers(rule: Rule) -> None:
    spelt = replace(rule, before="(x * y) * (y * z)") if rule.before == "x * x" else rule
    before = module_of(spelt, dtype_of(rule))
    after, told = simplified(before)
    assert (str(rule), rule.numbers, "checked") in [(t.rule, t.numbers, t.validation) for t in told]
    assert all(t.saved_s > 0 for t in told)
    if rule.numbers == "exact" and "left_shift" not in str(rule):
        assert_same_numbers(before, after, rtol=1e-6)
    again, told = simplified(after)
    assert again.same_as(after) and not told


@EVERY
def test_it_stays_away(rule: Rule) -> None:
    text, shapes = AWAY.get(rule.before, (rule.before, SHAPES.get(rule.before, {})))
    other = replace(rule, before=text)
    mod = module_of(other, dtype_of(rule), leaks=rule.before not in AWAY, shapes=shapes)
    _, told = simplified(mod)
    assert str(rule) not in [t.rule for t in told]


def test_only_exact_ones_and_those_of_the_contract_run_by_default() -> None:
    for rule in RULES:
        _, told = simplified(module_of(rule, dtype_of(rule)), exact=True)
        assert all(t.numbers != "inexact" for t in told)
        assert rule.numbers == "inexact" or str(rule) in [t.rule for t in told]


def compared(rule: Rule, result: Term | None = None) -> Any:
    mod = module_of(rule, dtype_of(rule))
    view = BlockView(mod["main"].body.blocks[0], mod)
    for var in view.index:
        for found in found_at(view, rule.pattern, var):
            if rule.when(found):
                return comparison(rule, found, result)
    raise AssertionError(f"{rule} is not found")


_OTHER = {
    "add": "subtract", "subtract": "add", "multiply": "add", "divide": "multiply", "exp": "abs",
    "sqrt": "abs", "rsqrt": "sqrt", "max": "min", "min": "max", "sum": "max", "mean": "sum",
    "square": "abs", "abs": "negative", "negative": "abs", "left_shift": "add", "nn.relu": "abs",
    "maximum": "minimum", "minimum": "maximum",
}  # fmt: skip


def mutants(term: Term) -> Iterator[Term]:
    """Yield a formula with one mistake: an operator, an operand too few, operands swapped."""
    if term.value is not None:
        yield replace(term, value=term.value + 1)
    if not term.op:
        return
    if term.op in _OTHER:
        yield replace(term, op=_OTHER[term.op])
    yield from (arg for arg in term.args if term.op != "matmul")
    if term.op in ("subtract", "divide", "matmul", "left_shift"):
        yield replace(term, args=term.args[::-1])
    for n, arg in enumerate(term.args):
        for other in mutants(arg):
            yield replace(term, args=(*term.args[:n], other, *term.args[n + 1 :]))


def test_mistakes_in_rules_are_found() -> None:
    survivors, total = [], 0
    for rule in RULES:
        wrong = list(mutants(rule.result)) or [Term("negative", (rule.result,))]
        for mutant in dict.fromkeys(wrong):
            try:
                found = compared(rule, mutant).difference()
            except Exception as err:  # no formula of these shapes
                found = str(err)
            total += 1
            survivors += [] if found else [f"{rule}: {mutant}"]
    assert total > 200 and len(survivors) <= 0.05 * total, survivors


def test_rules_are_right_as_they_are_checked() -> None:
    for rule in RULES:
        assert compared(rule).difference() is None


sympy = pytest.importorskip("sympy")

_SYMBOLIC = {
    "nn.relu": lambda x: sympy.Max(x, 0),
    "power": lambda x, n: x ** sympy.nsimplify(n),
    "maximum": sympy.Max,
    "minimum": sympy.Min,
    "rsqrt": lambda x: 1 / sympy.sqrt(x),
    "square": lambda x: x**2,
    "exp": sympy.exp,
    "log": sympy.log,
    "sqrt": sympy.sqrt,
    "abs": sympy.Abs,
    "left_shift": lambda x, n: x * 2**n,
}
_ARRAYS = {"row": np.ravel, "column": lambda x: x.reshape(-1, 1)}


def symbolic(rule: Rule, term: Term, names: dict[str, Any], attributes: set[str]) -> Any:
    """Return what a formula is of symbols, as an array of expressions."""
    if term.value is not None:
        return sympy.nsimplify(term.value)
    if not term.op:
        return names[term.name]
    args = [symbolic(rule, arg, names, attributes) for arg in term.args]
    if term.op == "astype":
        return args[0]
    if term.op == "take":
        return np.take(args[0], args[1], axis=0)
    if term.name:
        both = " + " in term.name
        axes = None if both else axes_of(rule, term.name)
        keep = term.name == "r" and "q" not in attributes
        reduce = {
            "max": lambda v: sympy.Max(*v), "min": lambda v: sympy.Min(*v),
            "sum": sum, "prod": sympy.prod, "mean": lambda v: sum(v) / len(v),
        }[term.op]  # fmt: skip
        if both:
            return np.array(reduce(list(args[0].ravel())))
        made = np.apply_along_axis(lambda v: reduce(list(v)), axes[0], args[0])
        return np.expand_dims(made, axes[0]) if keep else made
    if term.op in _ARRAYS:
        return _ARRAYS[term.op](*args)
    if term.op in _SYMBOLIC:
        return np.frompyfunc(_SYMBOLIC[term.op], len(args), 1)(*args)
    return getattr(np, term.op)(*args)


SMALL = {"A": (2, 2), "B": (2, 2), "V": (2,), "W": (2,)}
ROWS = ("(x * y) @ z", "max[r](x + y)", "max[r](x - y)", "sum[r](x * y)", "mean[r](x * y)")


@EVERY
def test_it_is_proved(rule: Rule) -> None:
    names: dict[str, Any] = {}
    for name in names_of(rule):
        if name in VALUES:
            sign = {"negative" if str(rule) in NEGATIVE else "positive": True}
            names[name] = sympy.Symbol(name, **sign)
            continue
        shape = SMALL.get(name, (2,) if name == "z" and "y + z" in rule.before else (2, 2))
        shape = (2, 1) if name == "y" and rule.before in ROWS else shape
        flat = [sympy.Symbol(f"{name}{i}", positive=True) for i in range(int(np.prod(shape)))]
        names[name] = np.array(flat, dtype=object).reshape(shape)
    if "take" in rule.before:
        names["x"] = np.array([1, 0, 1])
    attributes = {part.name for part in rule.pattern.parts() if part.op and part.name}
    sides = [symbolic(rule, term, names, attributes) for term in (rule.pattern, rule.result)]
    before, after = (np.asarray(side, dtype=object) for side in sides)
    assert before.shape == after.shape
    for old, new in zip(before.ravel(), after.ravel(), strict=True):
        if old != new and old.has(sympy.Max, sympy.Min):
            values = {s: sympy.Rational(i * i + 3, 17 - i) for i, s in enumerate(old.free_symbols)}
            values = {s: -v if s.is_negative else v for s, v in values.items()}
            assert sympy.simplify(old.subs(values) - new.subs(values)) == 0
        else:
            assert sympy.simplify(sympy.expand(old - new)) == 0
