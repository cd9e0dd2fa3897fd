"""Activations: operators, and the polynomials that they are written out as."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from ..workload import ACTIVATIONS
from .constants import binary, near, scalar, squared
from .operators import OPERATORS
from .pattern import Definitions
from .shapes import dtype_of, same_shape, shape_of

MOST_TERMS = 4
"""A polynomial has no more terms, and powers below that: those of activations are cubic."""

MOST_DEPTH = 7
"""A polynomial has no more operators in one another: each may be read twice by the next."""

Terms: TypeAlias = dict[int, float]
"""Factors by the power that they multiply."""

Found: TypeAlias = tuple[Terms, tuple[relax.Var, ...]]

_ACTIVATION_OPS = {
    f"relax.{name}": found.formula
    for name, found in OPERATORS.items()
    if found.formula in ACTIVATIONS
}


@dataclass(frozen=True)
class Activated:
    """``name(source)``, computed by the bindings `covers`."""

    name: str
    source: relax.Expr
    covers: tuple[relax.Var, ...]


def activation(view: Definitions, var: relax.Expr) -> Activated | None:
    """Recognise the activation that defines `var`.

    Spellings: the operator; ``maximum(x, 0)``, and squares of it; ``x * sigmoid(x)``, also of
    ``1.702 x``; ``0.5 x (1 + erf(x / sqrt 2))`` and
    ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` with their products in any order and
    their polynomials in any form.
    """
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    call = view.call(var, *_ACTIVATION_OPS)
    if call is not None:
        return Activated(_ACTIVATION_OPS[call.op.name], call.args[0], (var,))
    for source, zero in binary(view, var, "relax.maximum"):
        if scalar(view, zero) == 0.0:
            return Activated("relu", source, (var,))
    squared = _squared_relu(view, var)
    return squared if squared is not None else _written_out(view, var)


def _squared_relu(view: Definitions, var: relax.Var) -> Activated | None:
    inner = squared(view, var)
    if inner is None or view.call(inner, "relax.nn.relu", "relax.maximum") is None:
        return None
    found = activation(view, inner)
    if found is None or found.name != "relu":
        return None
    return Activated("relu2", found.source, (*found.covers, var))


def _written_out(view: Definitions, var: relax.Var) -> Activated | None:
    """Recognise ``x * f(x)`` for the gates that SiLU and the forms of GELU multiply by.

    f is a sigmoid, or half of ``1 + erf`` or ``1 + tanh``, of a polynomial of x.
    """
    factors, covers = _factors(view, var)
    number = math.prod(n for n in (scalar(view, f) for f in factors) if n is not None)
    rest = [f for f in factors if scalar(view, f) is None]
    if len(rest) != 2:
        return None
    for source, gate in (rest, rest[::-1]):
        for function, half, inside in _gates(view, gate):
            found = polynomial(view, inside[-1], source)
            name = _name(function, found[0], dtype_of(source)) if found is not None else None
            if found is not None and name is not None and number == half:
                return Activated(name, source, (*found[1], *inside[:-1], *covers))
    return None


def _gates(
    view: Definitions, gate: relax.Expr
) -> Iterator[tuple[str, float, tuple[relax.Expr, ...]]]:
    """Yield each reading of a gate: its function, its factor, its bindings and its argument."""
    call = view.call(gate, "relax.sigmoid")
    if call is not None:
        yield "sigmoid", 1.0, (gate, call.args[0])
    for inner, one in binary(view, gate, "relax.add"):
        call = view.call(inner, "relax.erf", "relax.tanh")
        if call is not None and scalar(view, one) == 1.0:
            name = str(call.op.name).removeprefix("relax.")
            yield name, 0.5, (inner, gate, call.args[0])


def _name(function: str, terms: Terms, dtype: str) -> str | None:
    """Return the activation whose gate is that function of that polynomial."""
    for name, wanted in _POLYNOMIALS[function].items():
        ratios = ((terms.get(degree, 0.0), factor) for degree, factor in wanted.items())
        if set(terms) == set(wanted) and all(near(a, b, dtype) for a, b in ratios):
            return name
    return None


_TANH = math.sqrt(2 / math.pi)
_POLYNOMIALS: dict[str, dict[str, Terms]] = {
    "erf": {"gelu": {1: math.sqrt(0.5)}},
    "tanh": {"gelu_tanh": {1: _TANH, 3: 0.044715 * _TANH}},
    "sigmoid": {
        "silu": {1: 1.0},
        "quick_gelu": {1: 1.702},
        "gelu_tanh": {1: 2 * _TANH, 3: 2 * 0.044715 * _TANH},
    },
}


def _factors(view: Definitions, var: relax.Expr) -> tuple[list[relax.Expr], tuple[relax.Var, ...]]:
    """Flatten a product of up to three factors."""
    call = view.call(var, "relax.multiply")
    if call is None:
        return [], ()
    factors: list[relax.Expr] = []
    covers: tuple[relax.Var, ...] = (var,)
    for arg in call.args:
        inner = view.call(arg, "relax.multiply")
        if inner is not None and len(factors) < 2:
            factors.extend(inner.args)
            covers = (arg, *covers)
        else:
            factors.append(arg)
    return factors, covers


def polynomial(
    view: Definitions, expr: relax.Expr, x: relax.Expr, depth: int = MOST_DEPTH
) -> Found | None:
    """Read an expression of at most `depth` operators in one another as a polynomial of `x`.

    ``c * x * (1 + 0.044715 * x * x)`` is ``{1: c, 3: 0.044715 * c}``.  Returns the terms that are
    not zero and the bindings that compute them; None if it is none.
    """
    if expr.same_as(x):
        return {1: 1.0}, ()
    number = scalar(view, expr)
    if number is not None:
        return {0: number}, ()
    if not depth or not isinstance(expr, relax.Var) or not same_shape(shape_of(expr), shape_of(x)):
        return None
    found = _power(view, expr, x, depth - 1) or _combined(view, expr, x, depth - 1)
    if found is None or not 1 <= len(found[0]) <= MOST_TERMS or max(found[0]) >= MOST_TERMS:
        return None
    return found[0], tuple(dict.fromkeys((*found[1], expr)))


def _power(view: Definitions, expr: relax.Var, x: relax.Expr, depth: int) -> Found | None:
    """Read a square, or a whole power."""
    call = view.call(expr, "relax.power", "relax.square")
    if call is None:
        return None
    exponent = scalar(view, call.args[1]) if len(call.args) > 1 else 2.0
    base = polynomial(view, call.args[0], x, depth)
    if base is None or exponent not in (1.0, 2.0, 3.0):
        return None
    terms: Terms = {0: 1.0}
    for _ in range(int(exponent)):
        terms = _times(terms, base[0])
    return terms, base[1]


def _combined(view: Definitions, expr: relax.Var, x: relax.Expr, depth: int) -> Found | None:
    """Read a sum, a difference, a product, or a quotient by a number."""
    call = view.call(expr, *(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide")))
    if call is None:
        return None
    left, right = (polynomial(view, arg, x, depth) for arg in call.args)
    if left is None or right is None:
        return None
    (a, inside), (b, others) = left, right
    name = call.op.name.removeprefix("relax.")
    if name == "divide":
        if set(b) != {0} or not b[0]:
            return None
        b, name = {0: 1.0 / b[0]}, "multiply"
    if name == "subtract":
        b, name = {power: -factor for power, factor in b.items()}, "add"
    terms = _times(a, b) if name == "multiply" else _plus(a, b)
    return terms, (*inside, *others)


def _times(a: Terms, b: Terms) -> Terms:
    found: dict[int, float] = {}
    for power, factor in a.items():
        for other, by in b.items():
            found[power + other] = found.get(power + other, 0.0) + factor * by
    return {power: factor for power, factor in found.items() if factor}


def _plus(a: Terms, b: Terms) -> Terms:
    terms = {power: a.get(power, 0.0) + b.get(power, 0.0) for power in (*a, *b)}
    return {power: factor for power, factor in terms.items() if factor}
