"""Between which numbers the elements of a tensor lie, by the operators that make them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import ml_dtypes
import numpy as np
from tvm import ir, relax, tirx

from ..tvm_ir import GenericConst
from .element_values import LARGEST_TABLE, WHOLE_NUMBERS, is_float
from .operators import MOVEMENTS, OPERATORS
from .pattern import Definitions
from .shapes import dtype_of

Interval: TypeAlias = tuple[float, float]
"""The least and the largest number, minus infinity and infinity where there is none."""

FAR = -1e30
"""Beside a number below, no digit of a score is left in float32: their sum is that number."""
ANY: Interval = (-math.inf, math.inf)
_WITHIN: dict[str, Interval] = {
    **{name: known.within for name, known in OPERATORS.items() if known.within is not None},
    **dict.fromkeys(("zeros", "zeros_like"), (0.0, 0.0)),
    **dict.fromkeys(("ones", "ones_like"), (1.0, 1.0)),
}
_POSITIONS: Interval = (-(2.0**44), 2.0**44)
"""No tensor has more elements."""
_DEEPEST = 64
"""Intervals are followed through so many operators behind one another."""


class Bounds:
    """Interval arithmetic over the graph: what is not proved is between infinities.

    NaN is left out: where an element is NaN, so is what is computed from it.  Of a float16 matmul,
    the results are taken to be finite.
    """

    def __init__(self, view: Definitions):
        self.view = view
        self._known: dict[relax.Expr, Interval] = {}

    def of(self, expr: relax.Expr, depth: int = 0) -> Interval:
        """Return between which numbers all elements of a tensor are."""
        if expr not in self._known:
            found = self._of(self.view.definition(expr), depth) if depth < _DEEPEST else ANY
            self._known[expr] = _held(found, dtype_of(expr))
        return self._known[expr]

    def _of(self, value: relax.Expr, depth: int) -> Interval:
        if isinstance(value, GenericConst):
            return _of_constant(value)
        if not isinstance(value, relax.Call) or not isinstance(value.op, ir.Op):
            return ANY
        name, args = value.op.name.removeprefix("relax."), value.args
        if name in _WITHIN:
            return _WITHIN[name]
        if name == "matmul" and dtype_of(value) == "float16":
            largest = float(ml_dtypes.finfo("float16").max)
            return -largest, largest
        if name in _COMPUTED:
            operands = [a for a in args if isinstance(a.ty, relax.TensorType)]
            return _COMPUTED[name](*(self.of(a, depth + 1) for a in operands))
        if value.op.name in MOVEMENTS or name == "astype":
            return self.of(args[0], depth + 1)
        if name == "arange":
            if all(isinstance(a, tirx.IntImm | tirx.FloatImm) for a in args[:2]):
                ends = sorted(float(a.value) for a in args[:2])
                return ends[0], ends[1]
            return _POSITIONS
        if name in ("full", "full_like"):
            return self.of(args[1], depth + 1)
        if name in ("tril", "triu"):
            return _hull(self.of(args[0], depth + 1), (0.0, 0.0))
        if name == "where":
            return _hull(*(self.of(a, depth + 1) for a in args[1:]))
        if name == "concat" and isinstance(args[0], relax.Tuple):
            return _hull(*(self.of(a, depth + 1) for a in args[0].fields))
        if name == "clip" and all(isinstance(a, tirx.IntImm | tirx.FloatImm) for a in args[1:]):
            low, high = (float(a.value) for a in args[1:])
            least, largest = self.of(args[0], depth + 1)
            return max(min(least, high), low), max(min(largest, high), low)
        return ANY


def _power(a: Interval, b: Interval) -> Interval:
    """Return between which numbers powers of positive numbers are."""
    if not 0 < a[0] <= a[1] < math.inf or math.inf in map(abs, b):
        return ANY
    with np.errstate(over="ignore"):
        found = [float(np.float64(x) ** y) for x in a for y in b]
    return min(found), max(found)


def _product(a: Interval, b: Interval) -> Interval:
    found = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    if math.inf in map(abs, (*a, *b)) and (a[0] <= 0 <= a[1] or b[0] <= 0 <= b[1]):
        found.append(0.0)
    return min(found), max(found)


def _quotient(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 <= b[1]:
        return ANY
    return _product(a, (1 / b[1], 1 / b[0]))


def _absolute(a: Interval) -> Interval:
    ends = sorted(map(abs, a))
    return (0.0 if a[0] <= 0 <= a[1] else ends[0]), ends[1]


def _hull(*of: Interval) -> Interval:
    return min(low for low, _ in of), max(high for _, high in of)


def plus(a: Interval, b: Interval) -> Interval:
    """Return between which numbers sums are; infinities of both signs are NaN together."""
    low = -math.inf if -math.inf in (a[0], b[0]) else a[0] + b[0]
    return low, math.inf if math.inf in (a[1], b[1]) else a[1] + b[1]


def times(a: Interval, factor: float) -> Interval:
    """Return between which numbers products with `factor` are."""
    return _product(a, (factor, factor))


_COMPUTED: dict[str, Callable[..., Interval]] = {
    "add": plus,
    "subtract": lambda a, b: plus(a, times(b, -1.0)),
    "multiply": _product,
    "power": _power,
    "divide": _quotient,
    "negative": lambda a: times(a, -1.0),
    "abs": _absolute,
    "nn.relu": lambda a: (max(a[0], 0.0), max(a[1], 0.0)),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
}


def _held(found: Interval, dtype: str) -> Interval:
    """Return what a dtype makes of numbers: infinities, or other whole numbers."""
    if dtype == "bool":
        return 0.0, 1.0
    if is_float(dtype):
        largest = float(ml_dtypes.finfo(dtype).max)
        return (
            found[0] if found[0] >= -largest else -math.inf,
            found[1] if found[1] <= largest else math.inf,
        )
    least, most = WHOLE_NUMBERS.get(dtype, ANY)
    if least <= found[0] and found[1] <= most and math.isfinite(found[1] - found[0]):
        return float(math.floor(found[0])), float(math.ceil(found[1]))
    return float(least), float(most)


@lru_cache(maxsize=32)
def _of_constant(const: GenericConst) -> Interval:
    values = const.value.numpy()
    if not 0 < values.size <= LARGEST_TABLE or np.any(values != values):
        return ANY
    return float(values.min()), float(values.max())
