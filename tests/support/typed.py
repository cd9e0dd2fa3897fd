"""Relax evaluated by numpy, each operator in the dtype of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from tvm import ir, relax, tirx

from relax_fusion.matching.element_values import Choice, Element

from .chain_reference import size
from .chains import numpy_dtype

_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.bitwise_not,
    "negative": np.negative,
    "abs": np.abs,
    "where": np.where,
}


class Typed:
    """What the variables of a block are, computed when they are asked for.

    Parameters
    ----------
    bindings : iterable of relax.Binding
        Those of the block.
    given : mapping
        Arrays for what it reads, and in place of what it computes; ints for symbolic sizes.
    """

    def __init__(self, bindings: Iterable[relax.Binding], given: Mapping[Any, Any]):
        self.bound = {b.var: b.value for b in bindings}
        self.values = dict(given)

    def __call__(self, expr: relax.Expr) -> Any:
        """Return the value of a variable or of any other expression."""
        if expr in self.values:
            return self.values[expr]
        if isinstance(expr, relax.Var) and expr in self.bound:
            with np.errstate(all="ignore"):
                self.values[expr] = self(self.bound[expr])
            return self.values[expr]
        if isinstance(expr, ir.GenericConst):
            return expr.value.numpy()
        if isinstance(expr, relax.Tuple):
            return [self(f) for f in expr.fields]
        if isinstance(expr, relax.ShapeExpr):
            return [size(d, self.values) for d in expr.values]
        if isinstance(expr, tirx.FloatImm):
            return float(expr)
        return self._called(expr) if isinstance(expr, relax.Call) else size(expr, self.values)

    def _called(self, call: relax.Call) -> Any:
        name, dtype = call.op.name.removeprefix("relax."), numpy_dtype(str(call.ty.dtype))
        args = [self(a) for a in call.args]
        return _BINARY[name](*args) if name in _BINARY else _SHAPED[name](call.attrs, dtype, *args)


def _cast(_: Any, dtype: np.dtype, x: np.ndarray) -> np.ndarray:
    return x != 0 if dtype.kind == "b" else x.astype(dtype)


def _cumsum(attrs: Any, dtype: np.dtype, x: np.ndarray) -> np.ndarray:
    return np.cumsum(x.astype(dtype), int(attrs.axis), dtype)


def _sliced(_: Any, dtype: np.dtype, x: np.ndarray, axes: Any, begin: Any, end: Any) -> np.ndarray:
    index = [slice(None)] * x.ndim
    for axis, first, last in zip(axes, begin, end, strict=True):
        index[axis] = slice(first, last)
    return x[tuple(index)]


_SHAPED: dict[str, Callable[..., Any]] = {
    "astype": _cast,
    "arange": lambda _, dtype, first, end, step: np.arange(first, end, step).astype(dtype),
    "full": lambda _, dtype, shape, value: np.full(shape, value.astype(dtype)),
    "full_like": lambda _, dtype, x, value: np.full(x.shape, value.astype(dtype)),
    "ones_like": lambda _, dtype, x: np.ones(x.shape, dtype),
    "zeros_like": lambda _, dtype, x: np.zeros(x.shape, dtype),
    "ones": lambda _, dtype, shape: np.ones(shape, dtype),
    "zeros": lambda _, dtype, shape: np.zeros(shape, dtype),
    "tril": lambda _, dtype, x, k: np.tril(x, int(k)),
    "triu": lambda _, dtype, x, k: np.triu(x, int(k)),
    "cumsum": _cumsum,
    "broadcast_to": lambda _, dtype, x, shape: np.broadcast_to(x, shape),
    "reshape": lambda _, dtype, x, shape: x.reshape(shape),
    "expand_dims": lambda at, dtype, x: np.expand_dims(x, tuple(map(int, at.axis))),
    "squeeze": lambda at, dtype, x: np.squeeze(x, tuple(map(int, at.axis))),
    "permute_dims": lambda at, dtype, x: x.transpose(at.axes and [int(a) for a in at.axes]),
    "concat": lambda at, dtype, parts: np.concatenate(parts, int(at.axis)),
    "index_tensor": lambda _, dtype, x, places: x[tuple(places)],
    "strided_slice": _sliced,
    "take": lambda at, dtype, x, place: np.take(x, place, int(at.axis)),
}

_NODES: dict[type, Callable[..., Any]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}


def element_value(element: Element, places: Mapping[tirx.Var, Any]) -> Any:
    """Return what an element is at `places`: arrays, which are broadcast to each other."""
    if isinstance(element, float):
        return element
    if isinstance(element, Choice):
        sides = (element_value(side, places) for side in (element.then, element.other))
        return np.where(element_value(element.condition, places), *sides)
    if isinstance(element, tirx.IntImm):
        return bool(element) if str(element.ty) == "bool" else int(element)
    if isinstance(element, tirx.Not):
        return np.logical_not(element_value(element.a, places))
    if isinstance(element, tirx.Var):
        return places[element]
    sides = (element_value(side, places) for side in (element.a, element.b))
    return _NODES[type(element)](*sides)
