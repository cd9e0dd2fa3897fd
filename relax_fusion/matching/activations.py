"""Activations: operators, and the products and sums that they are written out as."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tvm import relax

from .constants import binary, near, scalar
from .pattern import Definitions
from .polynomials import Terms, polynomial
from .shapes import dtype_of

_ACTIVATION_OPS = {
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.relu": "relu",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
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
