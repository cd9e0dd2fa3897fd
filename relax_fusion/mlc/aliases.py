"""Names and conventions that TVM 0.27 changed, as MLC-LLM still uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op as nn_op
from tvm.script import tirx as T

from ..matching.expressions import found_in, substitute
from ..tvm_ir import GenericConst, SBlock, SBlockRealize, is_prim_expr


def restore() -> list[tuple[Any, str]]:
    """Give TVM's modules what they no longer have; what is there stays as it is.

    The owners and names that were absent are returned, which `remove` takes.
    """
    moved = {
        relax: {"Constant": GenericConst, "StringImm": ir.StringImm, "DataTypeImm": DataTypeImm},
        tirx: {
            "SBlock": SBlock,
            "SBlockRealize": SBlockRealize,
            "stmt_functor": SimpleNamespace(substitute=substitute, post_order_visit=_visit),
        },
        GenericConst: {"data": property(lambda self: self.value)},
        relax.Var: {"name_hint": property(lambda self: self.name)},
    }
    added = [(owner, name) for owner in moved for name in moved[owner] if not hasattr(owner, name)]
    for owner, name in added:
        setattr(owner, name, moved[owner][name])
    if "__bool__" not in vars(ir.Var):
        ir.Var.__bool__ = _is_there
        added.append((ir.Var, "__bool__"))
    if nn_op.tensor_ir_op is not tensor_ir_op:
        nn_op.tensor_ir_op = nn.tensor_ir_op = tensor_ir_op
        added.append((nn_op, "tensor_ir_op"))
    return added


def remove(added: Iterable[tuple[Any, str]]) -> None:
    """Take back what `restore` added."""
    for owner, name in added:
        if owner is nn_op:
            nn_op.tensor_ir_op = nn.tensor_ir_op = _tensor_ir_op
        else:
            delattr(owner, name)


def _is_there(var: ir.Var) -> bool:
    """Return True of a buffer, which has been a variable since 0.27, and raise of any other.

    TVM's own RoPE with the factors of LongRoPE asks a buffer so whether it was given.
    """
    return tirx.is_buffer_var(var) or var.__nonzero__()


def _visit(root: Any, call: Any) -> None:
    for node in found_in(root, ir.Expr):
        call(node)


class _TypeOfTypes(type):
    def __call__(cls, dtype: Any) -> GenericConst:
        return GenericConst(tvm.DataType(str(dtype)), relax.AnyType())

    def __instancecheck__(cls, expr: Any) -> bool:
        return isinstance(expr, GenericConst)


class DataTypeImm(metaclass=_TypeOfTypes):
    """What Relax called a constant that is a type of elements."""


def do_not_check(package: str) -> None:
    """Let the modules of a package write TVMScript that TVM 0.27 reads but takes for ill-formed.

    It refuses a name for a value inside a block that also indexes or scales what is read.
    """
    for name, module in sys.modules.items():
        if name.startswith(f"{package}.") and getattr(module, "T", None) is T:
            module.T = _Unchecked()  # type: ignore[attr-defined]


class _Unchecked:
    def __getattr__(self, name: str) -> Any:
        return getattr(T, name)

    def prim_func(self, **options: Any) -> Any:
        return T.prim_func(check_well_formed=False, **options)


def tensor_ir_op(func: tirx.PrimFunc, name_hint: str, args: Any, out: Any) -> Any:
    """Call a PrimFunc whose numbers stand behind its outputs, or in front of them as in TVM 0.27.

    Numbers are cast to the dtypes of the parameters, which TVM 0.27 demands.

    rewrite: ``f(inputs, outputs, numbers)`` -> ``f(inputs, numbers, outputs)``
    """
    outputs = len(out) if isinstance(out, list | tuple) else 1
    tensors = [p for p in func.params if tirx.is_buffer_var(p)]
    numbers = list(func.params)[len(tensors) :]
    if tensors == list(func.params)[: len(tensors)] and numbers:
        params = [*tensors[:-outputs], *numbers, *tensors[-outputs:]]
        func = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
    given = [args] if not isinstance(args, list | tuple) else list(args)
    if len(given) == len(func.params) - outputs:
        given = [_cast(arg, param) for arg, param in zip(given, func.params, strict=False)]
    return _tensor_ir_op(func, name_hint, given, out)


def _cast(arg: Any, param: tirx.Var) -> Any:
    """Return a number in the dtype of the parameter that takes it; tensors as they are."""
    if not is_prim_expr(arg) or tirx.is_buffer_var(param):
        return arg
    return tirx.Cast(str(param.ty.dtype), arg) if arg.ty != param.ty else arg


_tensor_ir_op = nn_op.tensor_ir_op
