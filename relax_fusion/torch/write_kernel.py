"""The kernel that writes rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tvm import relax, tirx

from ..compute.reference import statement
from ..transforms.modules import OPAQUE
from ..tvm_ir import IRBuilder, T


def write_call(
    builder: relax.BlockBuilder,
    cache: relax.Expr,
    axis: int,
    rows: relax.Expr,
    values: relax.Expr,
    *,
    in_place: bool,
) -> relax.Var:
    """Return a cache with other rows: the cache itself, or a copy.

    Rows that the cache does not have are not written; negative ones count from the end.
    """
    func = _kernel((cache.ty, rows.ty, values.ty), axis, in_place)
    gvar = builder.add_func(func, "write_rows" if in_place else "with_rows")
    args = relax.Tuple([cache, rows, values])
    if in_place:
        return builder.emit(relax.op.call_tir_inplace(gvar, args, [0], cache.ty))
    return builder.emit(relax.call_tir(gvar, args, cache.ty))


def _kernel(types: tuple[Any, ...], axis: int, in_place: bool) -> tirx.PrimFunc:
    fresh: dict[tirx.Var, tirx.Var] = {}

    def own(size: Any) -> Any:
        """Return a size by variables of the kernel's own."""
        if isinstance(size, tirx.IntImm):
            return int(size.value)
        key = size if isinstance(size, tirx.Var) else tirx.Var("size", "int64")
        return fresh.setdefault(key, tirx.Var(key.name, "int64"))

    shapes = [[own(size) for size in ty.shape.values] for ty in types]
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"op_pattern": OPAQUE, "tirx.noalias": True})
        names = ("cache", "rows", "values")
        cache, places, values = (
            T.arg(name, T.buffer(shape, str(ty.dtype)))
            for name, shape, ty in zip(names, shapes, types, strict=True)
        )
        into = cache
        if not in_place:
            into = T.arg("copy", T.buffer(shapes[0], str(types[0].dtype)))
            with _each("copy", shapes[0]) as at:
                T.buffer_store(into, cache[tuple(at)], at)
        with _each("write_rows", shapes[2]) as at:
            row = places[at[axis]].astype("int64")
            size = tirx.const(0, "int64") + shapes[0][axis]
            row = tirx.Select(row < 0, row + size, row)
            target = [row if n == axis else place for n, place in enumerate(at)]
            T.reads([values[tuple(at)], places[at[axis]]])
            T.writes([into[tuple(target)]])
            with T.If(tirx.all(row >= 0, row < size)), T.Then():
                T.buffer_store(into, values[tuple(at)], target)
    return builder.get()


def _each(name: str, shape: Sequence[Any]) -> AbstractContextManager[list[tirx.Var]]:
    """Open a block for each element of `shape`."""
    return statement(name, {f"i{n}": size for n, size in enumerate(shape)}, "S" * len(shape))
