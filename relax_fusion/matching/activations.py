"""Activations: operators, and the products and sums that they are written out as."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax

from .constants import binary, near, scalar, scaled
from .pattern import Definitions
from .shapes import dtype_of

_ACTIVATION_OPS = {
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.relu": "relu",
}


@dataclass(frozen=True)
class Activated:
    """``name(source)``, computed by the bindings `covers`."""

    name: str
    source: relax.Expr
    covers: tuple[relax.Var, ...]


def activation(view: Definitions, var: relax.Expr) -> Activated | None:
    """Recognise the activation that defines `var`.

    Spellings: the operator; ``x * sigmoid(x)``, also of ``1.702 x``; ``maximum(x, 0)``, and squares
    of it; ``0.5 x (1 + erf(x / sqrt 2))`` and
    ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` in any order of their products, the latter
    also with x factored out of its sum.
    """
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    call = view.call(var, *_ACTIVATION_OPS)
    if call is not None:
        return Activated(_ACTIVATION_OPS[call.op.name], call.args[0], (var,))
    for source, zero in binary(view, var, "relax.maximum"):
        if scalar(view, zero) == 0.0:
            return Activated("relu", source, (var,))
    for source, gate in binary(view, var, "relax.multiply"):
        sigmoid = view.call(gate, "relax.sigmoid")
        if sigmoid is not None and sigmoid.args[0].same_as(source):
            return Activated("silu", source, (gate, var))
        if sigmoid is None:
            continue
        found = scaled(view, sigmoid.args[0])
        if found is None or not found[0].same_as(source):
            continue
        if near(found[1], 1.702, dtype_of(source)):
            return Activated("quick_gelu", source, (sigmoid.args[0], gate, var))
    squared = _squared_relu(view, var)
    return squared if squared is not None else _decomposed_gelu(view, var)


def _squared_relu(view: Definitions, var: relax.Var) -> Activated | None:
    """Recognise the square of a ReLU: by `square`, as a power or as a product."""
    power = view.call(var, "relax.power")
    if power is not None and scalar(view, power.args[1]) != 2.0:
        return None
    square = power if power is not None else view.call(var, "relax.square", "relax.multiply")
    if square is None or (
        power is None and any(not a.same_as(square.args[0]) for a in square.args)
    ):
        return None
    inner = square.args[0]
    if view.call(inner, "relax.nn.relu", "relax.maximum") is None:
        return None
    found = activation(view, inner)
    if found is None or found.name != "relu":
        return None
    return Activated("relu2", found.source, (*found.covers, var))


def _decomposed_gelu(view: Definitions, var: relax.Var) -> Activated | None:
    """Recognise ``0.5 * x * (1 + f(x))`` for the erf and the tanh form of GELU."""
    factors, covers = _factors(view, var)
    halves = [f for f in factors if scalar(view, f) == 0.5]
    rest = [f for f in factors if scalar(view, f) is None]
    if len(halves) != 1 or len(rest) != 2:
        return None
    for source, one_plus in (rest, rest[::-1]):
        for inner, one in binary(view, one_plus, "relax.add"):
            if scalar(view, one) != 1.0:
                continue
            spellings = (("erf", "gelu", _erf_source), ("tanh", "gelu_tanh", _tanh_source))
            for op, name, read in spellings:
                call = view.call(inner, f"relax.{op}")
                found = read(view, call.args[0], source) if call is not None else None
                if found is not None:
                    return Activated(name, source, (*found, inner, one_plus, *covers))
    return None


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


def _erf_source(
    view: Definitions, arg: relax.Expr, source: relax.Expr
) -> tuple[relax.Var, ...] | None:
    found = scaled(view, arg)
    wanted = math.sqrt(0.5)
    if found is None or not found[0].same_as(source) or not near(found[1], wanted, dtype_of(arg)):
        return None
    return (arg,)


def _tanh_source(
    view: Definitions, arg: relax.Expr, source: relax.Expr
) -> tuple[relax.Var, ...] | None:
    """Read ``c (x + k x^3)``, or factored, ``c x (1 + k x^2)``."""
    root, outer = math.sqrt(2 / math.pi), scaled(view, arg)
    if outer is not None and near(outer[1], root, dtype_of(arg)):
        for plain, cubic in binary(view, outer[0], "relax.add"):
            covers = _cubic_term(view, cubic, source, 3)
            if plain.same_as(source) and covers is not None:
                return (*covers, outer[0], arg)
    factors, product = _factors(view, arg)
    for gate in factors:
        rest = [_monomial(view, f, source) for f in factors if f is not gate]
        if any(m is None for m in rest) or sum(m.degree for m in rest if m) != 1:
            continue
        if not near(math.prod(m.factor for m in rest if m), root, dtype_of(arg)):
            continue
        for one, square in binary(view, gate, "relax.add"):
            covers = _cubic_term(view, square, source, 2)
            if scalar(view, one) == 1.0 and covers is not None:
                inner = [v for m in rest if m for v in m.covers]
                return (*inner, *covers, gate, *product)
    return None


def _cubic_term(
    view: Definitions, expr: relax.Expr, source: relax.Expr, degree: int
) -> tuple[relax.Var, ...] | None:
    """Return what computes the term of the tanh form, which is factored or not."""
    found = _monomial(view, expr, source)
    if found is None or found.degree != degree:
        return None
    return found.covers if near(found.factor, 0.044715, dtype_of(expr)) else None


@dataclass(frozen=True)
class _Monomial:
    """``factor * x ** degree``, computed by the bindings `covers`."""

    factor: float
    degree: int
    covers: tuple[relax.Var, ...] = ()


def _monomial(
    view: Definitions, expr: relax.Expr, source: relax.Expr, depth: int = 3
) -> _Monomial | None:
    """Read a product of numbers and powers of `source`."""
    if expr.same_as(source):
        return _Monomial(1.0, 1)
    number = scalar(view, expr)
    if number is not None:
        return _Monomial(number, 0)
    power = view.call(expr, "relax.power", "relax.square")
    if power is not None and power.args[0].same_as(source):
        degree = scalar(view, power.args[1]) if len(power.args) == 2 else 2.0
        return _Monomial(1.0, int(degree), (expr,)) if degree in (2.0, 3.0) else None
    product = view.call(expr, "relax.multiply")
    if product is None or not depth:
        return None
    first, second = (_monomial(view, arg, source, depth - 1) for arg in product.args)
    if first is None or second is None:
        return None
    covers = (*first.covers, *second.covers, expr)
    return _Monomial(first.factor * second.factor, first.degree + second.degree, covers)
