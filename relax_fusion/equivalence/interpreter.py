"""Relax bindings computed by numpy.

Floats are float64 throughout, so that a cast between them is the identity; whoever wants roundings
changes values on the way (`Hook`).  What depends on no data is computed in its own dtype: a mask by
position that is written in float16 is another one than in float32.  Integers wrap around.

Every result is checked against the type that TVM inferred for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax, tirx

from ..matching.operators import named
from ..tvm_ir import GenericConst
from ..workload.reference import numpy_dtype
from .operators import OPERATORS, SIZES_IN, Array, Called, Misfit, Uninterpreted
from .prim_funcs import computed
from .sizes import Size, Sizes, compiled

_NUMERIC = {n.removeprefix("relax.") for n in named("arithmetic", "function", "rounding")}

Value = Any
"""An array, a tuple of values, or a number."""

Hook = Callable[[relax.Var, Value], Value]
"""What becomes of the value of a binding."""

PrimFuncs = Mapping[str, Callable[..., Any]]
"""What PrimFuncs compute, by name: arrays in, an array or several out."""


class Interpreter:
    """Computes bindings, again and again at other sizes; what it reads of them is kept.

    `functions`: what the PrimFuncs of those names compute.
    `mod`: where other PrimFuncs are.
    `constant`: takes the value of a constant and its dtype; returns what it stands for.
    """

    def __init__(
        self,
        functions: PrimFuncs | None = None,
        mod: ir.IRModule | None = None,
        constant: Callable[[Array, str], Array] = lambda array, dtype: array,
    ):
        self.functions, self.mod = functions or {}, mod
        self.constant = constant
        self._attributes: dict[relax.Expr, dict[str, Any]] = {}
        self._shapes: dict[relax.Expr, list[Size]] = {}
        self._constants: dict[relax.Expr, Array] = {}

    def run(
        self,
        bindings: Sequence[tuple[relax.Var, relax.Expr]],
        values: dict[relax.Var, Value],
        sizes: Sizes,
        hook: Hook | None = None,
        exact: frozenset[relax.Var] = frozenset(),
    ) -> None:
        """Compute bindings in order and add them to `values`.

        `bindings`: what is computed.
        `values`: what they read.
        `sizes`: the sizes of this run.
        `hook`: changes the value of a binding.
        `exact`: those that depend on no data: their dtypes round.
        Raises `Uninterpreted` if an operator is not known, or a result has another type than was
        inferred.
        """
        with np.errstate(all="ignore"):
            for var, expr in bindings:
                value = self.value(expr, values, sizes)
                value = self.typed(value, var.ty, sizes, rounds=var in exact)
                values[var] = value if hook is None else hook(var, value)

    def value(self, expr: relax.Expr, values: Mapping[relax.Var, Value], sizes: Sizes) -> Value:
        """Compute one expression."""
        if isinstance(expr, ir.Var) and expr in values:
            return values[expr]
        if isinstance(expr, GenericConst):
            return self._constant(expr)
        if isinstance(expr, relax.Tuple):
            return tuple(self.value(f, values, sizes) for f in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value, values, sizes)[int(expr.index)]
        if isinstance(expr, tirx.FloatImm):
            return float(expr)
        if isinstance(expr, relax.ShapeExpr):
            return sizes.shape(expr.values)
        if isinstance(expr, relax.Call):
            return self._call(expr, values, sizes)
        if isinstance(expr, relax.If | relax.SeqExpr | relax.Function):
            raise Uninterpreted(f"a {type(expr).__name__}")
        return sizes.of(expr)

    def typed(self, value: Value, ty: ir.Type, sizes: Sizes, rounds: bool = False) -> Value:
        """Bring a value into its type, refusing another shape."""
        if isinstance(ty, relax.TupleType):
            if len(ty.fields) != len(value):
                raise Misfit(f"{len(value)} parts of a tuple of {len(ty.fields)}")
            parts = zip(value, ty.fields, strict=True)
            return tuple(self.typed(v, t, sizes, rounds) for v, t in parts)
        if not isinstance(ty, relax.TensorType):
            return value
        array, shape = np.asarray(value), self.shape(ty, sizes)
        if shape is not None and array.shape != shape:
            raise Misfit(f"a result of shape {list(array.shape)}, not {list(shape)}")
        return stored(array, str(ty.dtype), rounds)

    def shape(self, ty: relax.TensorType, sizes: Sizes) -> tuple[int, ...] | None:
        """Return the shape of a type, None if it is not known."""
        if not isinstance(ty.shape, relax.ShapeExpr):
            return None
        dims = self._dims(ty.shape)
        return tuple(sizes.shrink.of(d) if isinstance(d, int) else d(sizes) for d in dims)

    def _dims(self, shape: relax.ShapeExpr) -> list[Size]:
        if shape not in self._shapes:
            self._shapes[shape] = [compiled(d) for d in shape.values]
        return self._shapes[shape]

    def _constant(self, expr: relax.Expr) -> Array:
        if expr not in self._constants:
            dtype = str(expr.ty.dtype)
            array = stored(expr.value.numpy(), dtype, rounds=False)
            self._constants[expr] = self.constant(array, dtype)
        return self._constants[expr]

    def _call(self, call: relax.Call, values: Mapping[relax.Var, Value], sizes: Sizes) -> Value:
        if not isinstance(call.op, ir.Op):
            raise Uninterpreted(f"a call of {call.op}")
        name = call.op.name.removeprefix("relax.")
        if name == "call_tir":
            args = self.value(call.args[1], values, sizes)
            return self._prim_func(call, args, sizes)
        if name not in OPERATORS:
            raise Uninterpreted(f"the operator {name}")
        args = [self.value(a, values, sizes) for a in call.args]
        if name in _NUMERIC and any(np.asarray(a).dtype.kind == "b" for a in args):
            raise Uninterpreted(f"{name} of booleans")  # which TVM does not compile either
        return OPERATORS[name](self._called(call, name, sizes), *args)

    def _prim_func(self, call: relax.Call, args: Sequence[Any], sizes: Sizes) -> Value:
        name = call.args[0].name_hint
        if name in self.functions:
            return self.functions[name](*args)
        func = self.mod[call.args[0]] if self.mod is not None else None
        if not isinstance(func, tirx.PrimFunc) or len(call.args) > 2:
            raise Uninterpreted(f"the PrimFunc {name}")
        return computed(func, args, sizes.shrink)

    def _called(self, call: relax.Call, name: str, sizes: Sizes) -> Called:
        if call not in self._attributes:
            self._attributes[call] = _read(call.attrs)
        attrs = self._attributes[call]
        for size in SIZES_IN.get(name, ()):
            given = attrs[size]
            found = sizes.shape(given) if isinstance(given, tuple) else sizes.of(given)
            attrs = {**attrs, size: found}
        shape: tuple[int, ...] = ()
        dtype = ""
        if isinstance(call.ty, relax.TensorType):
            shape, dtype = self.shape(call.ty, sizes) or (), str(call.ty.dtype)
        whole: tuple[int | None, ...] = ()
        if name.startswith("nn.attention"):
            dims = self._dims(call.args[0].ty.shape)
            whole = tuple(d if isinstance(d, int) else None for d in dims)
        return Called(attrs, shape, dtype, whole)


def stored(array: Array, dtype: str, rounds: bool) -> Array:
    """Return an array as a tensor of a dtype holds it: floats in float64, rounded where wanted."""
    if "float" in dtype:
        array = np.asarray(array).astype("float64")
        return array.astype(numpy_dtype(dtype)).astype("float64") if rounds else array
    if array.dtype.kind != "f" or dtype == "bool" or np.isfinite(array).all():
        return array.astype(dtype)
    if dtype not in ("int32", "int64") or not (array < np.inf).all():
        raise Uninterpreted(f"a number that is not finite, cast to {dtype}")
    # -inf becomes the least integer on x86, ARM and NVIDIA; they disagree on all others
    whole = np.where(np.isfinite(array), array, 0).astype(dtype)
    return np.where(np.isfinite(array), whole, np.iinfo(dtype).min)


def _read(attrs: Any) -> dict[str, Any]:
    """Return attributes in Python's own types."""
    if attrs is None:
        return {}
    names = [f.name for f in type(attrs).__tvm_ffi_type_info__.fields]
    return {name: _plain(getattr(attrs, name)) for name in names}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, tirx.FloatImm):
        return float(value)
    if hasattr(value, "__len__"):
        return tuple(map(_plain, value))
    return str(value)


def evaluate(
    func: relax.Function,
    inputs: Sequence[Any],
    functions: PrimFuncs | None = None,
    hook: Hook | None = None,
    mod: ir.IRModule | None = None,
) -> list[Array]:
    """Run a Relax function on float64 copies of its inputs; always return a list of results.

    `func`: a function without branches.
    `inputs`: its arguments: tensors, numbers, shapes.
    `functions`: what the PrimFuncs of those names compute.
    `hook`: changes the value of a binding on the way.
    `mod`: where other PrimFuncs are.
    Raises `Uninterpreted` if it has what has no meaning here.
    """
    interpreter = Interpreter(functions, mod)
    symbols: dict[Any, int] = {}
    values: dict[relax.Var, Value] = {}
    for param, given in zip(func.params, inputs, strict=True):
        if isinstance(param.ty, relax.TensorType):
            given = stored(np.asarray(given), str(param.ty.dtype), rounds=False)
        values[param] = given
        symbols.update(_symbols(param.ty, given))
    for binding in (b for block in func.body.blocks for b in block.bindings):
        if isinstance(binding, relax.MatchCast):
            values[binding.var] = interpreter.value(binding.value, values, Sizes(symbols))
            symbols.update(_symbols(binding.ty, values[binding.var]))
        else:
            interpreter.run([(binding.var, binding.value)], values, Sizes(symbols), hook)
    result = interpreter.value(func.body.body, values, Sizes(symbols))
    return list(result) if isinstance(result, tuple) else [result]


def _symbols(ty: ir.Type, value: Value) -> dict[tirx.Var, int]:
    """Return the sizes of a value whose names the type gives."""
    if isinstance(ty, relax.TensorType) and ty.shape is not None:
        named = zip(ty.shape.values, value.shape, strict=True)
    elif isinstance(ty, relax.ShapeType) and ty.values is not None:
        named = zip(ty.values, value, strict=True)
    else:
        return {}
    return {dim: size for dim, size in named if isinstance(dim, ir.Var)}
