"""What the elements of a tensor are, as expressions of their indices.

Masks are made of positions: of `R.arange` and comparisons, of constants, of triangles.  Front ends
write that in ever new ways; as an expression of row and column it is always the same comparison.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from tvm import ir, relax, tirx
from tvm.sym import Analyzer, ConstIntBound

from ..pattern import BlockView, PrimExpr
from ..shapes import dtype_of, same_shape, shape_of
from .element_readers import READERS
from .element_values import (
    Choice,
    Element,
    Index,
    Unknown,
    float_of,
    integer,
    is_boolean,
    number,
    table_element,
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

WRAPPING = ("int8", "int16", "uint8", "uint16", "uint32", "uint64")
"""Types in which positions, or differences of them, may wrap around."""


class Elements:
    """Reads elements of the tensors of a block.

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
        for _, extent in extents:
            if isinstance(extent, ir.Var):  # a tensor without elements has none to be asked for
                self.analyzer.update(extent, ConstIntBound(1, ConstIntBound.POS_INF))
        for var, extent in extents:
            self.analyzer.bind(var, ir.Range(0, extent))

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
        return None if value is None else float_of(value)

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
            If it is no expression of the index.
        """
        found = self._read(expr, index)
        if dtype_of(expr) in WRAPPING and not _is_constant(found):
            raise Unknown
        return found

    def _read(self, expr: relax.Expr, index: Index) -> Element:
        value = self.view.definition(expr)
        if isinstance(value, ir.GenericConst):
            return self.simple(table_element(value, index))
        if not isinstance(value, relax.Call) or not isinstance(value.op, ir.Op):
            raise Unknown
        name = value.op.name.removeprefix("relax.")
        if name in _ARITHMETIC or name in _LOGIC:
            return self.binary(name, *(self.broadcast(a, index) for a in value.args))
        if name in ("logical_not", "bitwise_not"):
            return self._negated(self.read(value.args[0], index))
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
        if a is not None and b is not None:
            return self.simple(of_constants(a, b))
        if isinstance(first, float) or isinstance(second, float):
            raise Unknown
        if is_boolean(first) or is_boolean(second):
            return self.binary(name, self.cast(first, "int64"), self.cast(second, "int64"))
        return self.simple(of_positions(first, second))

    def _negated(self, value: Element) -> Element:
        return self.simple(tirx.Not(self.condition(value)))

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

    def cast(self, value: Element, dtype: str) -> Element:
        """Convert a value; whole numbers stay what they are."""
        if dtype == "bool":
            return self.condition(value)
        if isinstance(value, Choice):
            return self.choice(
                value.condition, self.cast(value.then, dtype), self.cast(value.other, dtype)
            )
        if isinstance(value, float):
            if not dtype.startswith(("float", "bfloat")):
                raise Unknown
            return value
        if isinstance(value, tirx.IntImm):
            return integer(int(value))
        return self.choice(value, integer(1), integer(0)) if is_boolean(value) else value

    def simple(self, value: Element | bool) -> Element:
        """Return a value in its simplest form."""
        if isinstance(value, bool):
            return truth(value)
        if isinstance(value, float):
            return number(value)
        if isinstance(value, Choice):
            return self.choice(value.condition, value.then, value.other)
        return self.analyzer.simplify(value)


def _is_constant(value: Element) -> bool:
    if isinstance(value, Choice):
        return _is_constant(value.then) and _is_constant(value.other)
    return float_of(value) is not None


def _same(a: Element, b: Element) -> bool:
    if isinstance(a, Choice) or isinstance(b, Choice) or is_boolean(a) != is_boolean(b):
        return False
    if float_of(a) is not None or float_of(b) is not None:
        return float_of(a) == float_of(b)
    assert not isinstance(a, float) and not isinstance(b, float)
    return bool(a.same_as(b)) if is_boolean(a) else same_shape((a,), (b,))
