"""Names and conventions that TVM 0.27 changed, as packages for TVM 0.26 still use them."""

from __future__ import annotations

import sys
from typing import Any

import tvm
from tvm import ir, relax, s_tir, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op as nn_op
from tvm.script import tirx as T


def restore() -> None:
    """Give TVM's modules what they no longer have; what is there stays as it is."""
    moved = {
        relax: {
            "Constant": ir.GenericConst,
            "StringImm": ir.StringImm,
            "DataTypeImm": DataTypeImm,
        },
        tirx: {"SBlock": s_tir.SBlock, "SBlockRealize": s_tir.SBlockRealize},
        ir.GenericConst: {"data": property(lambda self: self.value)},
    }
    for owner, names in moved.items():
        for name, thing in names.items():
            if not hasattr(owner, name):
                setattr(owner, name, thing)
    nn_op.tensor_ir_op = nn.tensor_ir_op = tensor_ir_op


class _TypeOfTypes(type):
    def __call__(cls, dtype: Any) -> ir.GenericConst:
        return ir.GenericConst(tvm.DataType(str(dtype)), relax.AnyType())

    def __instancecheck__(cls, expr: Any) -> bool:
        return isinstance(expr, ir.GenericConst)


class DataTypeImm(metaclass=_TypeOfTypes):
    """What Relax called a constant that is a type of elements."""


def do_not_check(package: str) -> None:
    """Let the modules of a package write TVMScript that TVM 0.27 reads but takes for ill-formed.

    It refuses a name for a value inside a block that also indexes or scales what is read.
    """
    for name, module in sys.modules.items():
        if name.startswith(f"{package}.") and getattr(module, "T", None) is T:
            module.T = _Unchecked()


class _Unchecked:
    def __getattr__(self, name: str) -> Any:
        return getattr(T, name)

    def prim_func(self, **options: Any) -> Any:
        return T.prim_func(check_well_formed=False, **options)


def tensor_ir_op(func: tirx.PrimFunc, name_hint: str, args: Any, out: Any) -> Any:
    """Call a PrimFunc whose numbers stand behind its outputs, or in front of them as in TVM 0.27.

    rewrite: ``f(inputs, outputs, numbers)`` -> ``f(inputs, numbers, outputs)``
    """
    outputs = len(out) if isinstance(out, list | tuple) else 1
    tensors = [p for p in func.params if tirx.is_buffer_var(p)]
    numbers = list(func.params)[len(tensors) :]
    if tensors == list(func.params)[: len(tensors)] and numbers:
        params = [*tensors[:-outputs], *numbers, *tensors[-outputs:]]
        func = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
    return _tensor_ir_op(func, name_hint, args, out)


_tensor_ir_op = nn_op.tensor_ir_op
