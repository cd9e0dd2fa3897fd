"""Polynomials of one tensor, as products, sums and powers in any form."""

from __future__ import annotations

from typing import TypeAlias

from tvm import relax

from .constants import scalar
from .pattern import Definitions
from .shapes import same_shape, shape_of

MOST_TERMS = 4
"""Of a product, and so the highest power but one: the polynomials of activations are cubic."""

MOST_DEPTH = 7
"""Of operators in one another: each may be read twice by the next."""

Terms: TypeAlias = dict[int, float]
"""Factors by the power that they multiply."""

Found: TypeAlias = tuple[Terms, tuple[relax.Var, ...]]


def polynomial(
    view: Definitions, expr: relax.Expr, x: relax.Expr, depth: int = MOST_DEPTH
) -> Found | None:
    """Read an expression of at most `depth` operators in one another as a polynomial of `x`.

    ``c * x * (1 + 0.044715 * x * x)`` is ``{1: c, 3: 0.044715 * c}``.

    Returns
    -------
    tuple or None
        The terms that are not zero and the bindings that compute them; None if it is none.
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
