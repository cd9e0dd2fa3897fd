"""Operators on elements, followed where they are exact under the sizes that are allowed."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tvm import ir, tirx

from ..tvm_ir import Analyzer, ConstIntBound
from .element_values import (
    WHOLE_NUMBERS,
    Choice,
    Element,
    Unknown,
    float_of,
    held_number,
    integer,
    is_boolean,
    is_float,
    number,
    rounded,
    truth,
)
from .pattern import PrimExpr
from .shapes import same_shape

ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (operator.add, operator.add),
    "subtract": (operator.sub, operator.sub),
    "multiply": (operator.mul, operator.mul),
    "minimum": (tirx.Min, min),
    "maximum": (tirx.Max, max),
    "equal": (tirx.EQ, operator.eq),
    "not_equal": (tirx.NE, operator.ne),
    "less": (tirx.LT, operator.lt),
    "less_equal": (tirx.LE, operator.le),
    "greater": (tirx.GT, operator.gt),
    "greater_equal": (tirx.GE, operator.ge),
}
"""What an operator makes of two whole numbers, and of two constants."""

LOGIC: dict[str, Callable[..., Any]] = {
    "logical_and": tirx.And,
    "bitwise_and": tirx.And,
    "logical_or": tirx.Or,
    "bitwise_or": tirx.Or,
}

_MOST_ELEMENTS = 1 << 44
"""No tensor has as many elements: they take 16 TiB in the narrowest dtype."""
_LARGEST_INDEX = 1 << 60
"""Sums of numbers beyond it may leave the int64 in which they are simplified."""
_INFINITE = ConstIntBound.POS_INF
_MOST_PARTS = 64
"""An element is made of no more comparisons and values: choices of choices double them."""


class Arithmetic:
    """Computes with elements under what is known of their indices.

    `extents`: index variables, and how many values each has from zero on.
    `bounds`: largest values of symbolic sizes, by name.
    """

    def __init__(self, extents: Sequence[tuple[tirx.Var, PrimExpr]], bounds: Mapping[str, int]):
        self._bounds = bounds
        self.analyzer = Analyzer()
        self._bounded: set[tirx.Var] = set()
        sizes = Counter(e for _, e in extents if isinstance(e, tirx.Var))
        for size, times in sizes.items():  # a tensor without elements has none to be asked for
            self._bound(size, 1, int(_MOST_ELEMENTS ** (1 / times)))
        for var, extent in extents:
            for size in tirx.analysis.undefined_vars(integer(0) + extent):
                self._bound(size, -_MOST_ELEMENTS, _MOST_ELEMENTS)
            self.analyzer.bind(var, ir.Range(0, extent))
            self._bounded.add(var)

    def _bound(self, var: tirx.Var, least: int, largest: int) -> None:
        """Tell the analyzer what values a symbolic size has, unless it knows."""
        if var not in self._bounded:
            largest = min(largest, self._bounds.get(var.name, largest))
            self.analyzer.update(var, ConstIntBound(min(least, largest), largest))
            self._bounded.add(var)

    def binary(self, name: str, first: Element, second: Element) -> Element:
        """Apply an operator, to each side of a choice."""
        if isinstance(first, Choice):
            return self._each(first, lambda side: self.binary(name, side, second))
        if isinstance(second, Choice):
            return self._each(second, lambda side: self.binary(name, first, side))
        if name in LOGIC:
            if not is_boolean(first) or not is_boolean(second):
                raise Unknown
            return self.simple(LOGIC[name](first, second))
        of_positions, of_constants = ARITHMETIC[name]
        a, b = float_of(first), float_of(second)
        if is_boolean(first) or is_boolean(second):
            if name not in ("equal", "not_equal"):
                raise Unknown
            sides = (self.cast(side, "bool", "int64") for side in (first, second))
            return self.binary(name, *sides)
        if a is not None and b is not None:
            return self.simple(of_constants(_exactly(a), _exactly(b)))
        if isinstance(first, float) or isinstance(second, float):
            raise Unknown
        result = of_positions(first, second)
        for value in (first, second, *(() if is_boolean(result) else (result,))):
            self._check_range(value, -_LARGEST_INDEX, _LARGEST_INDEX)
        return self.simple(result)

    def held(self, value: Element, dtype: str) -> Element:
        """Return a value as `dtype` holds it, if it does so without wrapping or rounding."""
        if _parts(value) > _MOST_PARTS:
            raise Unknown
        if isinstance(value, Choice):
            return self._each(value, lambda side: self.held(side, dtype))
        if is_boolean(value) != (dtype == "bool"):
            raise Unknown
        same = float_of(value)
        if same is not None:
            return value if dtype == "bool" else number(held_number(same, dtype))
        if dtype != "bool":
            self._check_range(value, *WHOLE_NUMBERS.get(dtype, (0, -1)))
        return value

    def _check_range(self, value: PrimExpr, least: int, largest: int) -> None:
        """Raise Unknown unless an expression is between two numbers, whatever its variables."""
        for var in tirx.analysis.undefined_vars(value):
            self._bound(var, -_MOST_ELEMENTS, _MOST_ELEMENTS)
        found = self.analyzer.const_int_bound(value)
        least, largest = max(least, 1 - _INFINITE), min(largest, _INFINITE - 1)
        if not least <= found.min_value <= found.max_value <= largest:
            raise Unknown

    def choice(self, condition: PrimExpr, then: Element, other: Element) -> Element:
        """Return one of two values, simplified by what the condition says about them."""
        condition = self.analyzer.simplify(condition)
        if isinstance(condition, tirx.IntImm):
            return then if int(condition) else other
        with self.analyzer.constraint_scope(condition):
            then = self.simple(then)
        with self.analyzer.constraint_scope(tirx.Not(condition)):
            other = self.simple(other)
        if _same(then, other):
            return then
        if is_boolean(then) and is_boolean(other):
            negated = tirx.Not(condition)
            return self.simple(tirx.Or(tirx.And(condition, then), tirx.And(negated, other)))
        return Choice(condition, then, other)

    def _each(self, value: Choice, function: Callable[[Element], Element]) -> Element:
        """Return a choice between what a function makes of both sides."""
        return self.choice(value.condition, function(value.then), function(value.other))

    def condition(self, value: Element) -> PrimExpr:
        """Return a value as a condition: a number is true if it is not zero."""
        if isinstance(value, Choice):
            result = self._each(value, self.condition)
            assert is_boolean(result)
            return result
        if isinstance(value, float):
            return truth(True)
        return value if is_boolean(value) else self.analyzer.simplify(tirx.NE(value, integer(0)))

    def cast(self, value: Element, source: str, target: str) -> Element:
        """Convert a value; `read` refuses what `target` does not hold exactly.

        Only constants are rounded, from one float dtype to another.
        """
        if target == "bool":
            return self.condition(value)
        if isinstance(value, Choice):
            return self._each(value, lambda side: self.cast(side, source, target))
        if is_boolean(value):
            return self.choice(value, integer(1), integer(0))
        same = float_of(value)
        if same is None or not (is_float(source) and is_float(target)):
            return value
        return self.simple(rounded(same, target))

    def simple(self, value: Element | bool | Fraction) -> Element:
        """Return a value in its simplest form."""
        if isinstance(value, bool):
            return truth(value)
        if isinstance(value, float | Fraction):
            return number(value)
        if isinstance(value, Choice):
            return self.choice(value.condition, value.then, value.other)
        return self.analyzer.simplify(value)


def _exactly(value: float) -> float | Fraction:
    """Return a number with which arithmetic rounds nothing."""
    return value if math.isinf(value) else Fraction(value)


def _parts(value: Element) -> int:
    """Count the comparisons and values that a value is made of."""
    if isinstance(value, Choice):
        return _parts(value.condition) + _parts(value.then) + _parts(value.other)
    if isinstance(value, tirx.And | tirx.Or):
        return _parts(value.a) + _parts(value.b)
    return _parts(value.a) if isinstance(value, tirx.Not) else 1


def _same(a: Element, b: Element) -> bool:
    if isinstance(a, Choice) or isinstance(b, Choice) or is_boolean(a) != is_boolean(b):
        return False
    if float_of(a) is not None or float_of(b) is not None:
        return float_of(a) == float_of(b)
    assert not isinstance(a, float) and not isinstance(b, float)
    return bool(a.same_as(b)) if is_boolean(a) else same_shape((a,), (b,))
