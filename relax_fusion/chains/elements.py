"""What the elements of a tensor are, as expressions of their indices.

Masks are made of positions: of `R.arange` and comparisons, of constants, of triangles.  Front ends
write that in ever new ways; as an expression of row and column it is always the same comparison.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from tvm import ir, relax, tirx
from tvm.sym import Analyzer, ConstIntBound

from ..pattern import BlockView, PrimExpr
from ..shapes import dtype_of, same_shape, shape_of
from .element_readers import READERS
from .element_tables import table_element
from .element_values import (
    WHOLE_NUMBERS,
    Choice,
    Element,
    Index,
    Unknown,
    float_of,
    held,
    integer,
    is_boolean,
    is_float,
    number,
    rounded,
    truth,
)

_ARITHMETIC: dict[str, tuple[Callable, Callable]] = {
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

_LOGIC: dict[str, Callable] = {
    "logical_and": tirx.And,
    "bitwise_and": tirx.And,
    "logical_or": tirx.Or,
    "bitwise_or": tirx.Or,
}

_MOST_ELEMENTS = 1 << 44
"""More than any tensor has: 16 TiB in the narrowest dtype."""
_LARGEST_INDEX = 1 << 60
"""Of numbers beyond it, sums and differences may leave the int64 in which they are simplified."""
_INFINITE = ConstIntBound.POS_INF


class Elements:
    """Reads elements of the tensors of a block.

    An operator is followed only where its dtype computes it exactly, for every index and every size
    that is allowed: where an integer may wrap around or a float be rounded, the element is unknown.
    A symbolic size may be as large as the block's bounds say; one without a bound, as large as the
    tensor of `extents` can be in any memory, 2^44 elements.

    Parameters
    ----------
    view : BlockView
        The block.
    extents : sequence of (tirx.Var, PrimExpr)
        Index variables, and how many values each has from zero on.
    """

    def __init__(self, view: BlockView, extents: Sequence[tuple[tirx.Var, PrimExpr]] = ()):
        self.view = view
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
            largest = min(largest, self.view.bounds.get(var.name, largest))
            self.analyzer.update(var, ConstIntBound(min(least, largest), largest))
            self._bounded.add(var)

    def at(self, expr: relax.Expr, index: Index) -> Element | None:
        """Return the element at `index` of a tensor that broadcasts to as many axes, or None."""
        try:
            return self.broadcast(expr, index)
        except Unknown:
            return None

    def uniform(self, expr: relax.Expr) -> float | None:
        """Return the number that all elements of `expr` are, if it is one number."""
        try:
            shape = self.shape(expr)
        except Unknown:
            return None
        index = tuple(tirx.Var("at", "int64") for _ in shape)
        value = Elements(self.view, list(zip(index, shape, strict=True))).at(expr, index)
        same = None if value is None else float_of(value)
        return None if same is None else float(same)

    def shape(self, expr: relax.Expr) -> list[PrimExpr]:
        """Return the dimensions of a tensor that has elements, by those of its operands if need be.

        TVM's own inference gives up where sizes are only equal if they are not zero.

        Raises
        ------
        Unknown
            If they are not known.
        """
        shape = shape_of(expr)
        if shape is not None:
            return [self.analyzer.simplify(d) for d in shape]
        value = self.view.definition(expr)
        if not isinstance(value, relax.Call) or not isinstance(value.op, ir.Op):
            raise Unknown
        name = value.op.name.removeprefix("relax.")
        if name == "cumsum":
            return self.shape(value.args[0])
        operands = value.args[1].fields if name == "index_tensor" else value.args
        if name not in (*_ARITHMETIC, *_LOGIC, "index_tensor"):
            raise Unknown
        shapes = [self.shape(a) for a in operands]
        result = [integer(1)] * max(map(len, shapes))
        for own in shapes:
            for axis, size in enumerate(own, len(result) - len(own)):
                if same_shape((result[axis],), (1,)):
                    result[axis] = size
                elif not same_shape((size,), (1,)) and not same_shape((size,), (result[axis],)):
                    raise Unknown
        return result

    def read(self, expr: relax.Expr, index: Index) -> Element:
        """Return the element at `index`.

        Raises
        ------
        Unknown
            If it is no expression of the index, or one that its dtype does not compute exactly.
        """
        return self._held(self._read(expr, index), dtype_of(expr))

    def _read(self, expr: relax.Expr, index: Index) -> Element:
        value = self.view.definition(expr)
        if isinstance(value, ir.GenericConst):
            return self.simple(table_element(value, index))
        if not isinstance(value, relax.Call) or not isinstance(value.op, ir.Op):
            raise Unknown
        name = value.op.name.removeprefix("relax.")
        if name in _ARITHMETIC or name in _LOGIC:
            if len({dtype_of(a) for a in value.args}) > 1:
                raise Unknown  # one of the operands is converted first
            return self.binary(name, *(self.broadcast(a, index) for a in value.args))
        if name in ("logical_not", "bitwise_not") and dtype_of(expr) == "bool":
            return self.simple(tirx.Not(self.condition(self.read(value.args[0], index))))
        if name not in READERS:
            raise Unknown
        return READERS[name](self, value, index)

    def broadcast(self, expr: relax.Expr, index: Index) -> Element:
        """Read an operand of an operator that broadcasts it to as many axes as `index` has."""
        shape = self.shape(expr)
        if len(shape) > len(index):
            raise Unknown
        own = zip(index[len(index) - len(shape) :], shape, strict=True)
        return self.read(expr, tuple(integer(0) if same_shape((d,), (1,)) else i for i, d in own))

    def binary(self, name: str, first: Element, second: Element) -> Element:
        """Apply an operator, to each side of a choice."""
        if isinstance(first, Choice):
            sides = (self.binary(name, side, second) for side in (first.then, first.other))
            return self.choice(first.condition, *sides)
        if isinstance(second, Choice):
            sides = (self.binary(name, first, side) for side in (second.then, second.other))
            return self.choice(second.condition, *sides)
        if name in _LOGIC:
            if not is_boolean(first) or not is_boolean(second):
                raise Unknown
            return self.simple(_LOGIC[name](first, second))
        of_positions, of_constants = _ARITHMETIC[name]
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

    def _held(self, value: Element, dtype: str) -> Element:
        """Return a value as `dtype` holds it, if it does so without wrapping or rounding."""
        if isinstance(value, Choice):
            sides = (self._held(side, dtype) for side in (value.then, value.other))
            return self.choice(value.condition, *sides)
        if is_boolean(value) != (dtype == "bool"):
            raise Unknown
        same = float_of(value)
        if same is not None:
            return value if dtype == "bool" else number(held(same, dtype))
        if dtype != "bool":
            self._check_range(value, *WHOLE_NUMBERS.get(dtype, (0, -1)))
        return value

    def _check_range(self, value: PrimExpr, least: int, largest: int) -> None:
        """Raise Unknown unless an expression is between two numbers, whatever its variables."""
        for var in tirx.analysis.undefined_vars(value):
            self._bound(var, -_MOST_ELEMENTS, _MOST_ELEMENTS)
        found = self.analyzer.const_int_bound(value)
        if found.min_value < max(least, 1 - _INFINITE) or found.max_value > min(
            largest, _INFINITE - 1
        ):
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

    def condition(self, value: Element) -> PrimExpr:
        """Return a value as a condition: a number is true if it is not zero."""
        if isinstance(value, Choice):
            sides = (self.condition(side) for side in (value.then, value.other))
            result = self.choice(value.condition, *sides)
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
            sides = (self.cast(side, source, target) for side in (value.then, value.other))
            return self.choice(value.condition, *sides)
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


def _same(a: Element, b: Element) -> bool:
    if isinstance(a, Choice) or isinstance(b, Choice) or is_boolean(a) != is_boolean(b):
        return False
    if float_of(a) is not None or float_of(b) is not None:
        return float_of(a) == float_of(b)
    assert not isinstance(a, float) and not isinstance(b, float)
    return bool(a.same_as(b)) if is_boolean(a) else same_shape((a,), (b,))
