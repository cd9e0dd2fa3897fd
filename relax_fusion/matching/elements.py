"""What the elements of a tensor are, as expressions of their indices.

Masks are made of positions: of `R.arange` and comparisons, of constants, of triangles.  Front ends
write that in ever new ways; as an expression of row and column it is always the same comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, relax, tirx

from ..tvm_ir import GenericConst
from .element_arithmetic import ARITHMETIC, LOGIC, Arithmetic
from .element_readers import READERS
from .element_values import Element, Index, Unknown, float_of, integer, table_element
from .pattern import BlockView, PrimExpr
from .shapes import dtype_of, is_one, same_shape, shape_of

_FIRST = integer(0)


class Elements(Arithmetic):
    """Reads elements of the tensors of a block.

    An operator is followed only where its dtype computes it exactly, for every index and every size
    that is allowed: where an integer may wrap around or a float be rounded, the element is unknown.
    A symbolic size may be as large as the block's bounds say; one without a bound, as large as the
    tensor of `extents` can be in any memory, 2^44 elements.

    Each index variable has `extents` values, from zero on.
    """

    def __init__(self, view: BlockView, extents: Sequence[tuple[tirx.Var, PrimExpr]] = ()):
        super().__init__(extents, view.bounds)
        self.view = view
        self._known: dict[tuple[Any, ...], tuple[Index, Element]] = {}

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

        Raises `Unknown` if they are not known.
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
        operands = value.args
        if name == "index_tensor" and isinstance(value.args[1], relax.Tuple):
            operands = value.args[1].fields
        elif name not in ARITHMETIC and name not in LOGIC:
            raise Unknown
        shapes = [self.shape(a) for a in operands]
        result = [integer(1)] * max(map(len, shapes))
        for own in shapes:
            for axis, size in enumerate(own, len(result) - len(own)):
                if same_shape((result[axis],), (1,)):
                    result[axis] = size
                elif not is_one(size) and not same_shape((size,), (result[axis],)):
                    raise Unknown
        return result

    def read(self, expr: relax.Expr, index: Index) -> Element:
        """Return the element at `index`.

        Raises `Unknown` if it is no expression of the index, or one that its dtype does not compute
        exactly.
        """
        if not isinstance(expr, relax.Var):
            return self.held(self._read(expr, index), dtype_of(expr))
        key = (expr, *map(id, index))  # sums of sums lead to the same element many times
        if key not in self._known:
            self._known[key] = index, self.held(self._read(expr, index), dtype_of(expr))
        return self._known[key][1]

    def _read(self, expr: relax.Expr, index: Index) -> Element:
        value = self.view.definition(expr)
        if isinstance(value, GenericConst):
            return self.simple(table_element(value, index))
        if not isinstance(value, relax.Call) or not isinstance(value.op, ir.Op):
            raise Unknown
        name = value.op.name.removeprefix("relax.")
        if name in ARITHMETIC or name in LOGIC:
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
        return self.read(expr, tuple(_FIRST if is_one(d) else i for i, d in own))
