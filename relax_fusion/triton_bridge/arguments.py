"""What a kernel can be called with, and the Triton type of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from triton.runtime.jit import JITFunction
from tvm import ir, relax, tirx

from ..errors import KernelError
from .kernel import ALIGNMENT

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Out:
    """The `index`-th output, as an argument of a kernel: a pointer to memory that it fills."""

    index: int = 0


@dataclass(frozen=True)
class InOut:
    """A tensor that the kernel changes in place, and that is the `index`-th output.

    Nothing may read `tensor` after the call: as with ``R.call_tir_inplace``, that is the caller's
    promise.
    """

    tensor: relax.Expr
    index: int = 0


@dataclass(frozen=True)
class Workspace:
    """Device memory of one call, contents undefined; planned and reused like any tensor of Relax.

    Parameters
    ----------
    shape : sequence of int or PrimExpr
        May use the symbolic dims of the inputs.
    dtype : str
        A dtype of TVM.
    """

    shape: Sequence[Any]
    dtype: str = "float32"


@dataclass(frozen=True)
class TensorMap:
    """A tensor passed as a TMA descriptor that the host makes (``desc.load([...])`` in the kernel).

    Parameters
    ----------
    of : relax.Expr, Out, InOut or Workspace
        A row-major tensor of rank 1 to 5, whose rows are multiples of 16 bytes.
    block : sequence of int
        Elements that one copy moves, outermost dimension first.
    """

    of: Any
    block: Sequence[int]


OUT = Out(0)
"""The first output."""

_TRITON_DTYPES = {
    **{f"float{bits}": f"fp{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "bf16",
    "bool": "i1",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


def triton_dtype(dtype: str, what: str) -> str:
    """Return Triton's name of a dtype of TVM.

    Raises
    ------
    KernelError
        If it has none; the message begins with `what`.
    """
    if dtype not in _TRITON_DTYPES:
        raise KernelError(f"{what} has dtype {dtype}; Triton has {', '.join(_TRITON_DTYPES)}")
    return _TRITON_DTYPES[dtype]


def bind(
    function: JITFunction, args: Sequence[Any] | Mapping[str, Any], constexprs: Mapping[str, Any]
) -> dict[str, Any]:
    """Match arguments with the run-time parameters of a kernel, in the order of its signature.

    Raises
    ------
    KernelError
        If there are too many or too few, or a name is no parameter.
    """
    name = function.__name__
    runtime = [p for p in function.params if not p.is_constexpr and p.name not in constexprs]
    names = [p.name for p in runtime]
    all_names = {p.name for p in function.params}
    fixed = [p for p in function.params if p.is_constexpr or p.name in constexprs]
    for given in constexprs:
        if given not in all_names:
            raise KernelError(f"{name} has no parameter {given!r}; it has {', '.join(all_names)}")
    for p in fixed:
        if p.name not in constexprs and not p.has_default:
            raise KernelError(f"{name} needs a value for its constexpr {p.name!r}")
    if isinstance(args, Mapping):
        bound = dict(args)
    else:
        if len(args) > len(names):
            raise KernelError(_count(name, len(args), names))
        bound = dict(zip(names, args, strict=False))
    for given in bound:
        if given not in names:
            raise KernelError(f"{name} has no run-time parameter {given!r}; {_list(names)}")
    missing = [p.name for p in runtime if p.name not in bound and not p.has_default]
    if missing:
        raise KernelError(_count(name, len(bound), names) + f"; {missing[0]!r} is missing")
    return {p.name: bound.get(p.name, p.default) for p in runtime}


def _count(name: str, given: int, names: list[str]) -> str:
    return f"{name} takes {len(names)} run-time arguments ({', '.join(names)}), {given} were given"


def _list(names: list[str]) -> str:
    return f"it takes {', '.join(names)}" if names else "it takes none"


def all_constexprs(function: JITFunction, constexprs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `constexprs` and the defaults of those that were left out."""
    defaults = {p.name: p.default for p in function.params if p.is_constexpr and p.has_default}
    return {**defaults, **constexprs}


@dataclass(frozen=True)
class Scalar:
    """A number that a kernel gets at run time: its Triton type, its value, what is known of it."""

    kind: str
    value: ir.Expr
    aligned: bool = False


def scalar(value: Any, what: str) -> Scalar | None:
    """Return how a number is passed; None if it becomes a constant of the kernel (None, or 1).

    A Python integer is int32 if it fits.  An expression over symbolic dims is int64 unless it is
    provably smaller, or is cast to int32 by the caller: then a larger value is an error at run
    time, never wrapped around.

    Raises
    ------
    KernelError
        If `value` is no number; the message begins with `what`.
    """
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        value = value.value
    if isinstance(value, bool):
        return Scalar("i1", tirx.IntImm("int64", int(value)))
    if value is None or (isinstance(value, int) and value == 1):
        return None
    if isinstance(value, int):
        return _integer(tirx.IntImm("int64", value), value)
    if isinstance(value, float):
        return Scalar("fp32", tirx.FloatImm("float64", value))
    dtype = str(value.ty.dtype) if is_number(value) else ""
    if dtype == "int64":
        bound = tvm.sym.Analyzer().const_int_bound(value)
        return _integer(value, max(abs(bound.min_value), abs(bound.max_value)))
    if dtype == "int32":
        narrowed = isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == "int64"
        return _integer(value.value if narrowed else tirx.Cast("int64", value), 0)
    raise KernelError(
        f"{what} is {value!r}; it must be a tensor, a number, an expression of int32 or int64, "
        "Out, InOut, Workspace, TensorMap or None"
    )


def is_number(value: Any) -> bool:
    """Tell whether `value` is an expression over symbolic dims."""
    return isinstance(value, ir.Expr) and isinstance(value.ty, ir.PrimType)


def is_tensor(value: Any) -> bool:
    """Tell whether `value` is a tensor of Relax."""
    return isinstance(value, ir.Expr) and isinstance(value.ty, relax.TensorType)


def _integer(value: ir.Expr, magnitude: int) -> Scalar:
    rest = tvm.sym.Analyzer().simplify(tirx.floormod(value, ALIGNMENT))
    aligned = isinstance(rest, tirx.IntImm) and int(rest.value) == 0
    return Scalar("i32" if magnitude <= INT32_MAX else "i64", value, aligned)
