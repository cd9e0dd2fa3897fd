"""TIR expressions and statements: what is in them, parts of them replaced, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from tvm import ir, tirx

from ..tvm_ir import TensorLoad, structural_equal, structural_map, structural_walk
from ..workload.reference import numpy_dtype

_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")

BINARY: Mapping[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}
"""Of two operands, by the names of their nodes."""


def found_in(root: object, kind: type) -> list[Any]:
    """Return the nodes of a kind in `root`, those inside of others first."""
    found: list[Any] = []
    structural_walk(root, (kind, found.append))
    return found


def loads_of(value: tirx.Expr) -> list[TensorLoad]:
    """Return the loads in `value`, those inside of indices first."""
    return found_in(value, TensorLoad)


def variables_of(root: object) -> set[tirx.Var]:
    """Return the variables in an expression or a statement, the buffers among them."""
    return set(found_in(root, ir.Var))


def different(nodes: Iterable[Any]) -> list[Any]:
    """Return `nodes` without those that are like one before."""
    found: list[Any] = []
    for node in nodes:
        if not any(structural_equal(node, other) for other in found):
            found.append(node)
    return found


def is_if_then_else(value: Any) -> bool:
    """Tell whether an expression is a call of ``if_then_else``, which computes one of its sides."""
    return isinstance(value, ir.Call) and bool(value.op.same_as(_IF_THEN_ELSE))


def chooses(value: tirx.Expr) -> bool:
    """Tell whether only one of several loads in `value` may be possible."""
    return any(map(is_if_then_else, found_in(value, ir.Call)))


def substitute(root: Any, values: Mapping[Any, Any]) -> Any:
    """Return an expression or a statement with variables replaced."""
    return structural_map(root, (ir.Var, lambda var: values.get(var, var)))


def int64(value: int) -> tirx.IntImm:
    """Return a whole number of the type that sizes have in Relax: of an int, TIR makes an int32."""
    return tirx.IntImm("int64", value)


def is_number(value: tirx.Expr, wanted: int) -> bool:
    """Tell whether an expression is the whole number `wanted`."""
    return isinstance(value, tirx.IntImm) and int(value) == wanted


def without_offset(index: tirx.Expr) -> tirx.Expr:
    """Return an index without the number that is added to it."""
    return index.a if isinstance(index, tirx.Add) and isinstance(index.b, tirx.IntImm) else index


def serial(loop: tirx.For) -> tirx.For:
    """Return a loop without the parallelism of a CPU, if it has any."""
    if loop.kind != tirx.ForKind.PARALLEL:
        return loop
    kind = tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body, step=loop.step)


def thread_tag(loop: tirx.For) -> str:
    """Return the name of the thread axis that a loop is bound to; "" if it is bound to none."""
    return str(loop.thread_binding.thread_tag) if loop.thread_binding is not None else ""


def ramp(first: tirx.Expr, lanes: int) -> tirx.Expr:
    """Return `lanes` neighbouring indices."""
    return tirx.Ramp(first, tirx.const(1, str(first.ty.dtype)), lanes)


def numbers_of(value: tirx.Expr, var: tirx.Var, numbers: np.ndarray) -> np.ndarray | None:
    """Return what an expression is where a variable is each of some numbers, rounded as its dtypes.

    None if there is something else in it than that variable, constants, casts, choices and
    `BINARY`.
    """
    if value.same_as(var):
        return numbers
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return np.asarray(value.value).astype(numpy_dtype(str(value.ty.dtype)))
    if isinstance(value, tirx.Cast):
        inner = numbers_of(value.value, var, numbers)
        return None if inner is None else inner.astype(numpy_dtype(str(value.ty.dtype)))
    function: Callable[..., Any] | None = BINARY.get(type(value).__name__)
    parts = [value.a, value.b] if function else []
    if isinstance(value, tirx.Select):
        function, parts = np.where, [value.condition, value.true_value, value.false_value]
    given = [numbers_of(part, var, numbers) for part in parts]
    return None if function is None or any(n is None for n in given) else function(*given)
