"""Random blocks of Relax that make masks of positions and constants, in all dtypes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from relax_fusion.matching.element_values import WHOLE_NUMBERS
from relax_fusion.matching.shapes import same_shape, shape_of

from .chains import numpy_dtype

SIZES = ((1, 1), (1, 7), (5, 1), (6, 6), (5, 7), (11, 3), (131, 140), (2, 300), (3, 2060))
LARGE = ((2, 33000), (2, 66000))
"""Sizes beyond int16 and uint16."""
ARITHMETIC = (op.add, op.subtract, op.multiply, op.minimum, op.maximum)
COMPARISONS = (op.equal, op.not_equal, op.less, op.less_equal, op.greater, op.greater_equal)
LOGIC = (op.logical_and, op.logical_or, op.bitwise_and, op.bitwise_or, op.bitwise_xor)
BITS = (op.bitwise_and, op.bitwise_or, op.bitwise_xor)
INTEGERS = tuple(d for d in WHOLE_NUMBERS if "float" not in d)
DTYPES = ("bool", *WHOLE_NUMBERS, *("int64", "int32", "float32", "float16", "bool") * 2)
NUMBERS = (0, 0, 1, 1, -1, 2, 3, 5, 127, 128, 255, 256, 257, 2048, 2049, -1e4, 65504, -65504, 70000)
NUMBERS += (1 << 24, (1 << 24) + 1, 1 << 31, 1e9, -1e9, 0.5, -0.5, -0.0, 2.5, 1e-6, -3.4e38)
NUMBERS += (float("-inf"), float("inf"), float("nan"))


@dataclass
class Draft:
    """A block in the making: its variables are broadcast to ``[rows, columns]``.

    Parameters
    ----------
    rows, columns : int or tirx.Var
        The sizes.
    given : sequence of relax.Var
        Tensors that it reads.
    numbers : sequence of float
        What constants are made of, as far as a dtype has them.
    """

    rng: random.Random
    rows: int | tirx.Var
    columns: int | tirx.Var
    given: Sequence[relax.Var] = ()
    numbers: Sequence[float] = NUMBERS
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)
    bindings: list[relax.VarBinding] = field(default_factory=list)

    def block(self, steps: int) -> relax.DataflowBlock:
        """Return a block of that many operators, and a few that they need."""
        self.emit(self._positions())
        makers = (self._positions, self._constant, self._binary, self._other, self._cast, self.band)
        for make in self.rng.choices(makers, (2, 1, 8, 5, 4, 1), k=steps):
            self.emit(make())
        return relax.DataflowBlock(self.bindings)

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind a value to a variable."""
        value = self.builder.normalize(expr)
        var = relax.DataflowVar(f"v{len(self.bindings)}", value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    @property
    def pool(self) -> list[relax.Var]:
        """The variables that an operator can take: those that are broadcast to the whole."""
        return [*self.given, *(b.var for b in self.bindings if self._is_part(b.var))]

    def _is_part(self, var: relax.Var) -> bool:
        shape = shape_of(var) or []
        whole = (self.rows, self.columns)[2 - len(shape) :] if len(shape) < 3 else ()
        return len(whole) == len(shape) and all(
            same_shape((d,), (1,)) or same_shape((d,), (size,))
            for d, size in zip(shape, whole, strict=True)
        )

    def _positions(self) -> relax.Expr:
        """Return positions along an axis, whole or not, rising or falling, by dtype."""
        rows, dtype = self.rng.random() < 0.5, self._dtype(bools=False)
        length = self.rows if rows else self.columns
        start, step = self.rng.choice(((0, 1), (0, 1), (3, 1), (-2, 1), (0, 2), (-9, 3)))
        if isinstance(length, int) and self.rng.random() < 0.1:
            start += 0.5
        line = self.emit(op.arange(start, start + step * length, step, dtype))
        if not same_shape(shape_of(line), (length,)):
            return self._positions()  # of fractions there is one more
        return op.expand_dims(line, [1 if rows else 0])

    def band(self) -> relax.Expr:
        """Return a causal mask or a window, or nearly one, from a comparison or a triangle."""
        dtype, shift = self._dtype(bools=False), self.rng.choice((0, 0, 0, 1, -1, 3))
        static = isinstance(self.rows, int) and isinstance(self.columns, int)
        if static and self.rng.random() < 0.3:
            shift = self.columns - self.rows
        if self.rng.random() < 0.2:
            ones = self.emit(op.ones(relax.ShapeExpr((self.rows, self.columns)), dtype))
            side = self.emit(self.rng.choice((op.tril, op.triu))(ones, shift))
            return self.rng.choice((op.astype(side, "bool"), op.equal(side, relax.const(0, dtype))))
        low, high = WHOLE_NUMBERS[dtype]
        column = self.emit(op.expand_dims(self.emit(op.arange(0, self.columns, 1, dtype)), [0]))
        row = self.emit(op.arange(0, self.rows, 1, dtype))
        if low <= shift <= high:
            row = self.emit(op.add(row, relax.const(shift, dtype)))
        row = self.emit(op.expand_dims(row, [1]))
        if self.rng.random() < 0.3:
            row, column = self.emit(op.subtract(row, column)), relax.const(0, dtype)
        return self.rng.choice(COMPARISONS[2:])(row, column)

    def _constant(self) -> relax.Expr:
        """Return a number, as a scalar or as a whole tensor, or a table."""
        dtype = self._dtype()
        static = isinstance(self.rows, int) and isinstance(self.columns, int)
        if static and self.rng.random() < 0.4 and self.rows < 500:
            return self._table(dtype)
        value = self._number(dtype)
        kind = self.rng.random()
        if kind < 0.6:
            return value
        shape = relax.ShapeExpr(self.rng.choice(((1, 1), (self.rows, self.columns))))
        if kind < 0.9:
            return op.full(shape, value, dtype)
        return self.rng.choice((op.ones, op.zeros))(shape, dtype)

    def _number(self, dtype: str) -> relax.Expr:
        while True:
            with np.errstate(all="ignore"):
                value = np.array(self.rng.choice(self.numbers), "float64")
                array = value.astype(numpy_dtype(dtype))
            whole = np.isfinite(value) and float(value).is_integer()
            low, high = WHOLE_NUMBERS.get(dtype, (0, 1))
            if "float" in dtype or (whole and low <= int(value) <= high):
                return relax.const(array, dtype)

    def _table(self, dtype: str) -> relax.Expr:
        values = [self._number(dtype).value.numpy() for _ in range(2)]
        below = np.tril(np.ones((self.rows, self.columns), bool), self.rng.randint(-3, 3))
        band = np.where(below, *values) if self.rng.random() < 0.7 else np.triu(below, -2)
        return relax.const(band.astype(numpy_dtype(dtype)), dtype)

    def _dtype(self, *, bools: bool = True) -> str:
        return self.rng.choice([d for d in DTYPES if bools or d != "bool"])

    def _operand(self, dtype: str | None = None) -> relax.Expr:
        """Return a tensor so far, recent ones rather, converted to `dtype` if there is none."""
        recent = self.pool[-12:] if self.rng.random() < 0.7 else self.pool
        own = [v for v in recent if dtype in (None, str(v.ty.dtype))]
        if own:
            return self.rng.choice(own)
        return self._number(dtype) if self.rng.random() < 0.5 else self._conversion(dtype)

    def _conversion(self, dtype: str) -> relax.Expr:
        return self.emit(op.astype(self._operand(), dtype))

    def _binary(self) -> relax.Expr | None:
        first = self._operand()
        dtype = str(first.ty.dtype)
        second = self._number(dtype) if self.rng.random() < 0.4 else self._operand(dtype)
        if self.rng.random() < 0.3:
            first, second = second, first
        if dtype == "bool":
            return self.rng.choice((*LOGIC, op.equal, op.not_equal))(first, second)
        if dtype in INTEGERS and self.rng.random() < 0.15:
            return self.rng.choice(BITS)(first, second)
        return self.rng.choice((*ARITHMETIC, *COMPARISONS, op.subtract, op.less_equal))(
            first, second
        )

    def _cast(self) -> relax.Expr:
        return op.astype(self._operand(), self._dtype())

    def _other(self) -> relax.Expr | None:
        first = self._operand()
        dtype = str(first.ty.dtype)
        choice = self.rng.randrange(7)
        if choice == 0:
            return op.bitwise_not(first) if dtype in ("bool", *INTEGERS) else op.negative(first)
        if choice == 1:
            return op.logical_not(self._operand("bool"))
        if choice in (2, 3):
            return op.where(self._operand("bool"), first, self._operand(dtype))
        if choice == 4:
            whole = op.broadcast_to(first, relax.ShapeExpr((self.rows, self.columns)))
            side = self.rng.choice((op.tril, op.triu))
            return side(self.emit(whole), self.rng.choice((-3, -1, 0, 0, 1, 1 << 40)))
        if choice == 5 and dtype != "bool":
            return op.abs(first) if self.rng.random() < 0.5 else op.negative(first)
        return self._moved(first)

    def _moved(self, first: relax.Expr) -> relax.Expr | None:
        """Move the elements of a whole tensor there and back, or sum up ones."""
        shape = relax.ShapeExpr((self.rows, self.columns))
        whole = self.emit(op.broadcast_to(first, shape))
        choice = self.rng.randrange(6)
        if choice == 0:
            turned = self.emit(op.permute_dims(whole, [1, 0]))
            return op.permute_dims(turned, [-1, -2])
        if choice == 1 and (not isinstance(self.rows, int) or self.rows):  # 0 copies a size
            return op.reshape(self.emit(op.expand_dims(whole, [0, 2])), shape)
        if choice == 2 and isinstance(self.rows, int):
            doubled = self.emit(op.concat([whole, self.emit(op.abs(whole))], 0))
            first_row = self.rng.randint(0, self.rows)
            begin, end = [first_row, 0], [first_row + self.rows, self.columns]
            return op.strided_slice(doubled, [0, 1], begin, end)
        if choice == 3:
            last = self.rows - 1 if isinstance(self.rows, int) else 0
            place = relax.const(self.rng.choice((0, last)), "int64")
            return op.take(whole, place, 0, mode="fast")
        if choice == 4:
            places = [self.emit(op.arange(0, n, 1, "int64")) for n in (self.rows, self.columns)]
            return op.index_tensor(whole, [self.emit(op.expand_dims(places[0], [1])), places[1]])
        dtype = self._dtype(bools=False)
        source = self._dtype()
        value = self.emit(op.full(shape, self._number(source), source))
        return op.cumsum(value, 1, dtype)


def symbolic() -> tuple[tirx.Var, tirx.Var]:
    """Return two symbolic sizes."""
    return tirx.Var("s", "int64"), tirx.Var("n", "int64")
