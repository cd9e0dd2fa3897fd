"""What a kernel can be called with: tensors and numbers of Relax, and what they don't say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx

from ..errors import KernelError
from ..tvm_ir import Analyzer
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
class Part:
    """A row-major tensor from element `start` on, as a pointer or in a tensor map."""

    of: relax.Expr
    start: int


@dataclass(frozen=True)
class TensorMap:
    """A tensor passed as a TMA descriptor that the host makes (``desc.load([...])`` in the kernel).

    Parameters
    ----------
    of : relax.Expr, Part, Out, InOut or Workspace
        A row-major tensor of rank 1 to 5, whose rows are multiples of 16 bytes; a part begins at
        such a multiple.
    block : sequence of int
        Elements that one copy moves, outermost dimension first.
    shape, strides : sequence of int or PrimExpr, optional
        Sizes that the kernel sees, one to five, each at least 1, and the distances in elements
        between neighbours along them: another order of the tensor's dimensions, or a part from its
        first element on.  The last stride is 1, the others are multiples of 16 bytes.  By default
        the tensor's own, or those of a row-major tensor of `shape`.
    """

    of: Any
    block: Sequence[int]
    shape: Sequence[Any] | None = None
    strides: Sequence[Any] | None = None

    def layout(self, own: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return sizes and strides, for a tensor whose shape is `own`."""
        shape = own if self.shape is None else self.shape
        return shape, row_major_strides(shape) if self.strides is None else self.strides


def row_major_strides(shape: Sequence[Any]) -> list[Any]:
    """Return the distance, in elements, between neighbours along every dimension."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides


OUT = Out(0)
"""The first output."""


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

    Raises `KernelError` if `value` is no number; the message begins with `what`.
    """
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        value = bool(value.value) if str(value.ty.dtype) == "bool" else value.value
    if isinstance(value, bool):
        return Scalar("i1", tirx.IntImm("int64", int(value)))
    if value is None or (isinstance(value, int) and value == 1):
        return None
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise KernelError(f"{what} is {value}; it must fit 64 bits")
        return _integer(tirx.IntImm("int64", value), value, value)
    if isinstance(value, float):
        return Scalar("fp32", tirx.FloatImm("float64", value))
    dtype = str(value.ty.dtype) if is_number(value) else ""
    if dtype == "int64":
        bound = Analyzer().const_int_bound(value)
        return _integer(value, bound.min_value, bound.max_value)
    if dtype == "int32":
        narrowed = isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == "int64"
        return _integer(value.value if narrowed else tirx.Cast("int64", value), 0, 0)
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


def _integer(value: ir.Expr, least: int, most: int) -> Scalar:
    rest = Analyzer().simplify(tirx.floormod(value, ALIGNMENT))
    aligned = isinstance(rest, tirx.IntImm) and int(rest.value) == 0
    small = least >= -INT32_MAX - 1 and most <= INT32_MAX
    return Scalar("i32" if small else "i64", value, aligned)
