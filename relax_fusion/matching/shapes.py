"""Shapes, sizes and dtypes of Relax expressions, and the guards about them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tvm import ir, relax, tirx
from tvm.target import Target

from ..errors import Decline, Reason
from ..tvm_ir import Analyzer
from ..workload import FLOAT_BYTES, Dim, DynamicDim
from .bindings import items_of
from .expressions import found_in
from .pattern import PrimExpr, Refused, Shape, guard

_ANALYZER = Analyzer()


def shape_of(expr: relax.Expr) -> list[PrimExpr] | None:
    """Return the dimensions of a tensor, or None if its rank or shape is unknown."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return items_of(ty.shape.values)


def dtype_of(expr: relax.Expr) -> str:
    """Return the element type of a tensor, ``""`` if it is unknown."""
    ty = expr.ty
    return str(ty.dtype) if isinstance(ty, relax.TensorType) and ty.dtype is not None else ""


def known_shape(expr: relax.Expr, what: str) -> list[PrimExpr]:
    """Return the shape of `expr`, refusing the chain if it is not known at compile time."""
    shape = shape_of(expr)
    if shape is None:
        raise Refused(Reason.SHAPE, f"{what} has no known shape: {expr.ty}")
    return shape


def has_computed_sizes(*exprs: relax.Expr) -> bool:
    """Tell whether sizes of tensors, or of their tuples, contain calls, as of ``x[m - n : m]``.

    TVM's fusing passes take these for calls of Relax operators.
    """
    return any(found_in(expr.ty, ir.Call) for expr in exprs)


def static(dim: PrimExpr | int, what: str) -> int:
    """Return a dimension as an int, refusing the chain if it is dynamic or zero."""
    value = dim if isinstance(dim, int) else int(dim) if isinstance(dim, tirx.IntImm) else None
    if value is None:
        raise Refused(Reason.SHAPE, f"{what} is dynamic ({dim}); it must be static")
    guard(value > 0, Reason.SHAPE, f"{what} is {value}; it must be at least 1")
    return value


def permutation(call: relax.Call, rank: int) -> list[int]:
    """Return which axes a `permute_dims` takes one after the other, counted from the first."""
    return [int(a) % rank for a in call.attrs.axes or range(rank)[::-1]]


def same_shape(a: Shape | None, b: Shape | None) -> bool:
    """Tell whether two shapes are provably equal."""
    return a is not None and b is not None and len(a) == len(b) and all(map(_same_dim, a, b))


def _same_dim(a: PrimExpr | int, b: PrimExpr | int) -> bool:
    return bool(_ANALYZER.can_prove_equal(a, b))


def is_one(size: PrimExpr | int) -> bool:
    """Tell whether a size is 1."""
    return same_shape((size,), (1,))


def shape_text(shape: Shape) -> str:
    """Return a shape as a reader writes it."""
    sizes = (int(d) if isinstance(d, tirx.IntImm) else d for d in shape)
    return f"[{', '.join(map(str, sizes))}]"


def product(dims: Shape) -> PrimExpr | int:
    """Return the simplified product of dimensions, an int where all are static."""
    total: PrimExpr | int = tirx.IntImm("int64", 1)
    for dim in dims:
        total = total * dim
    total = _ANALYZER.simplify(total)
    return int(total) if isinstance(total, tirx.IntImm) else total


def period_of(other: Shape, shape: Shape) -> int:
    """Return after how many rows those of a tensor ``[1, s, n]`` or ``[s, n]`` repeat.

    0 where it is no such tensor beside ``[b, s, n]``, or a number is not known.
    """
    own = other[next((i for i, size in enumerate(other) if not is_one(size)), 0) : -1]
    rows = product(own)
    same = len(own) < len(shape) and same_shape(own, shape[len(shape) - 1 - len(own) : -1])
    return rows if same and isinstance(rows, int) else 0


def groups_of(other: Shape, shape: Shape) -> tuple[tirx.Expr | int, int]:
    """Return how many rows a tensor ``[b, 1, n]`` has, each for how many of ``[b, s, n]``.

    0 where it is no such tensor, or s is not known.
    """
    if len(other) != len(shape) or not same_shape(other[-1:], shape[-1:]):
        return 0, 0
    lead = next(
        (i for i, size in enumerate(other[:-1]) if is_one(size) and not is_one(shape[i])), 0
    )
    if not (same_shape(other[:lead], shape[:lead]) and all(map(is_one, other[lead:-1]))):
        return 0, 0
    groups, rows = product(shape[:lead]), product(shape[lead:-1])
    return (groups, rows) if isinstance(rows, int) else (0, 0)


def as_dim(value: PrimExpr | int, bounds: Mapping[str, int] | None = None) -> Dim:
    """Describe a size for a workload: an int, or a `DynamicDim` named as it prints.

    `bounds` maps the names of symbolic variables to their largest values.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, tirx.IntImm):
        return int(value)
    return DynamicDim(str(value), _upper(value, bounds or {}))


def as_dims(
    values: Shape, bounds: Mapping[str, int] | None = None, reserved: Sequence[str] = ()
) -> list[Dim]:
    """Describe the sizes of one workload, in which a name stands for one size.

    Two variables may print alike, and ``n * m`` and ``m * n`` are one size.

    `reserved` are names that mean something else in the workload.
    """
    named: list[tuple[PrimExpr | int, DynamicDim]] = []
    dims: list[Dim] = []
    for value in values:
        dim = as_dim(value, bounds)
        if isinstance(dim, DynamicDim):
            known = next((d for v, d in named if _same_dim(v, value)), None)
            used = [*reserved, *(d.name for _, d in named)]
            dim = known or replace(dim, name=_unused(dim.name, used))
            named.append((value, dim))
        dims.append(dim)
    return dims


def _unused(name: str, used: Sequence[str]) -> str:
    """Return `name`, with a number behind it if it is used already."""
    candidates = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
    return next(c for c in candidates if c not in used)


def _upper(value: PrimExpr, bounds: Mapping[str, int]) -> int | None:
    """Return the largest value of a size, None if a variable in it has no bound."""
    analyzer = Analyzer()
    for var in tirx.analysis.undefined_vars(value):
        if var.name not in bounds:
            return None
        analyzer.bind(var, ir.Range(0, bounds[var.name] + 1))
    return int(analyzer.const_int_bound(value).max_value)


def check_dtype(dtype: str, what: str, others: Sequence[str] = ()) -> str:
    """Return `dtype`, refusing the chain if it is none that kernels handle, nor of `others`."""
    allowed = [*(d for d in FLOAT_BYTES if d != "float64"), *others]
    detail = f"{what} is {dtype or 'unknown'}; needs {', '.join(allowed)}"
    guard(dtype in allowed, Reason.DTYPE, detail)
    return dtype


def elsewhere(exprs: Sequence[relax.Expr], target: Target) -> Decline | None:
    """Refuse tensors of a kernel for `target` that are on several virtual devices or on another."""
    types = [e.ty for e in exprs if isinstance(e.ty, relax.TensorType)]
    found = [ty.vdevice for ty in types if ty.vdevice]
    names = sorted({f"{d.target.kind.name}:{d.vdevice_id}:{d.memory_scope}" for d in found})
    if len(names) > 1:
        return Decline(Reason.VDEVICE, f"tensors are on {' and '.join(names)}; must be on one")
    kind = target.kind.name
    if all(d.target.kind.name == kind and d.memory_scope == "global" for d in found):
        return None
    detail = f"tensors are on {names[0]}; kernels are made for global memory of {kind}"
    return Decline(Reason.VDEVICE, detail)


def check_operands(exprs: list[relax.Expr], dtype: str, others: Sequence[str] = ()) -> None:
    """Refuse operands of another dtype than the kernel's, which is a float or one of `others`."""
    check_dtype(dtype, "the chain", others)
    for expr in exprs:
        guard(
            dtype_of(expr) == dtype,
            Reason.DTYPE,
            f"an operand is {dtype_of(expr)}, the chain {dtype}",
        )
