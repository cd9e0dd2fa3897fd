"""Sizes of expressions: values of symbolic variables, and static sizes made smaller."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tvm import ir, tirx

from ..tvm_ir import Analyzer, structural_map

Size: TypeAlias = int | Callable[["Sizes"], int]


@dataclass(frozen=True)
class Shrink:
    """A map of static sizes to smaller ones: a ratio for the large ones, and single exceptions.

    A size of at least `least` that `ratio` divides is divided by it, unless it is among `kept`.
    """

    least: int = 0
    ratio: int = 1
    kept: frozenset[int] = frozenset()
    single: tuple[tuple[int, int], ...] = ()

    def of(self, size: int) -> int:
        """Return what becomes of a size."""
        for large, small in self.single:
            if size == large:
                return small
        divides = size >= self.least and size % self.ratio == 0 and size not in self.kept
        return size // self.ratio if divides else size


WHOLE = Shrink()
"""Every size stays as it is."""


@dataclass(frozen=True)
class Sizes:
    """What sizes are at run time: `symbols` by variable, static ones as `shrink` leaves them."""

    symbols: Mapping[tirx.Var, int] = field(default_factory=dict)
    shrink: Shrink = WHOLE

    def of(self, dim: Any) -> int:
        """Return the value of a size: a number, or an expression of variables."""
        found = compiled(dim)
        return self.shrink.of(found) if isinstance(found, int) else found(self)

    def shape(self, dims: Any) -> tuple[int, ...]:
        """Return the values of several."""
        return tuple(map(self.of, dims))


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Min": min,
    "Max": max,
}


def compiled(dim: Any) -> Size:
    """Return a size as a number, or as a function of the `Sizes`: expressions are slow to read."""
    if isinstance(dim, int):
        return dim
    if isinstance(dim, tirx.IntImm):
        return int(dim)
    if isinstance(dim, ir.Var):
        return lambda sizes: sizes.symbols[dim]
    name = type(dim).__name__
    if name in _BINARY:
        function, a, b = _BINARY[name], compiled(dim.a), compiled(dim.b)
        return lambda sizes: function(_value(a, sizes), _value(b, sizes))
    if isinstance(dim, tirx.Cast):
        inner = compiled(dim.value)
        return lambda sizes: _value(inner, sizes)
    return lambda sizes: _simplified(dim, sizes)


def _value(size: Size, sizes: Sizes) -> int:
    return sizes.shrink.of(size) if isinstance(size, int) else size(sizes)


def _simplified(dim: Any, sizes: Sizes) -> int:
    known = (ir.Var, lambda var: tirx.IntImm("int64", sizes.symbols[var]))
    return int(Analyzer().simplify(structural_map(dim, known)))


def variables(dims: Any) -> set[tirx.Var]:
    """Return the variables of several sizes."""
    found: set[tirx.Var] = set()
    for dim in dims:
        if isinstance(dim, ir.Var):
            found.add(dim)
        elif isinstance(dim, ir.Expr) and not isinstance(dim, tirx.IntImm):
            found.update(tirx.analysis.undefined_vars(dim))
    return found


def constants(dims: Any) -> set[int]:
    """Return the static sizes among several."""
    return {int(d) for d in dims if isinstance(d, int | tirx.IntImm)}
