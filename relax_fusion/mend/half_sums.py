"""Sums of half precision, which TVM's own legalisation adds up in half precision.

A sum of float16 stays at 2048 where ones are added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax, te, topi
from tvm.relax.transform.legalize_ops import statistical

from .nan import REDUCTION, by_tvm

_HALVES = ("float16", "bfloat16")


def _in_float32(
    compute: Callable[..., te.Tensor], bb: relax.BlockBuilder, call: relax.Call, **attrs: int
) -> relax.Expr:
    """Legalise an operator in float32, rounded once; TVM's own serves other dtypes."""
    dtype = str(call.ty.dtype)
    if dtype not in _HALVES:
        made = bb.normalize(by_tvm(bb, call))
        if str(made.ty.dtype) == dtype:
            return made
        return bb.call_te(topi.cast, bb.emit(made), dtype)  # of integers by a symbolic number

    def formula(x: te.Tensor) -> te.Tensor:
        return topi.cast(compute(topi.cast(x, "float32")), dtype)

    how = {"primfunc_name_hint": call.op.name.rsplit(".", 1)[-1], "primfunc_attrs": attrs or None}
    return bb.call_te(formula, call.args[0], **how)


def _reduction(
    compute: Callable[..., te.Tensor], bb: relax.BlockBuilder, call: relax.Call, **attrs: int
) -> relax.Expr:
    how = {"axis": call.attrs.axis, "keepdims": call.attrs.keepdims}
    return _in_float32(partial(compute, **how), bb, call, **attrs)


def _softmax(
    compute: Callable[..., te.Tensor], bb: relax.BlockBuilder, call: relax.Call
) -> relax.Expr:
    return _in_float32(partial(compute, axis=call.attrs.axis), bb, call)


def _deviation(x: te.Tensor, **how: Any) -> te.Tensor:
    return topi.sqrt(statistical._te_variance(x, **how))


LEGALIZE_MAP: dict[str, Callable[..., Any]] = {
    "relax.sum": partial(_reduction, topi.sum, op_pattern=REDUCTION),
    "relax.prod": partial(_reduction, topi.prod, op_pattern=REDUCTION),
    "relax.mean": partial(_reduction, statistical._te_mean),
    "relax.variance": partial(_reduction, statistical._te_variance),
    "relax.std": partial(_reduction, _deviation),
    "relax.nn.softmax": partial(_softmax, topi.nn.softmax),
    "relax.nn.log_softmax": partial(_softmax, topi.nn.log_softmax),
}
