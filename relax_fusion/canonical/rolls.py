"""Rows by numbers that are known: one slice of neighbours, or two that are joined."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx

from ..matching.operators import OPERATORS, named
from ..matching.shapes import dtype_of, shape_of
from ..tvm_ir import GenericConst
from .rewriter import Rewriter


def numbers(rewriter: Rewriter, expr: relax.Expr) -> np.ndarray | None:
    """Return the whole numbers that a tensor of constants and counted numbers has."""
    value = rewriter.definition(expr)
    if "int" not in dtype_of(expr):
        return None
    if isinstance(value, GenericConst):
        return value.value.numpy()
    if rewriter.call(expr, "relax.arange") is not None:
        static = all(isinstance(number, tirx.IntImm) for number in value.args)
        return np.arange(*map(int, value.args), dtype=dtype_of(expr)) if static else None
    if rewriter.call(expr, *named("arithmetic")) is None:
        return None
    operator = OPERATORS[value.op.name.removeprefix("relax.")].numpy
    operands = [numbers(rewriter, arg) for arg in value.args]
    if operator is None or any(operand is None for operand in operands):
        return None
    made = np.asarray(operator(*operands))
    return made if str(made.dtype) == dtype_of(expr) else None


def rolled(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Return rows by number as a slice, or as two that are joined, None if they are more runs."""
    shape, places = shape_of(call.args[0]), numbers(rewriter, call.args[1])
    if shape is None or places is None or places.ndim != 1 or call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    if not isinstance(shape[axis], tirx.IntImm) or not places.size:
        return None
    if places.min() < 0 or places.max() >= int(shape[axis]):
        return None
    runs = np.split(places, 1 + np.flatnonzero(np.diff(places) != 1))
    if len(runs) > 2:
        return None
    parts = [
        relax.op.strided_slice(
            call.args[0], [axis], [int(run[0])], [int(run[-1]) + 1], assume_inbound=True
        )
        for run in runs
    ]
    return parts[0] if len(parts) == 1 else relax.op.concat([*map(rewriter.emit, parts)], axis)
