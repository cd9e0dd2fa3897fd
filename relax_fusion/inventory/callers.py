"""Work of a function in the sizes of the function that calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tvm import ir, relax, tirx

from ..matching.pattern import PrimExpr
from ..report.item import Array, Item, Product
from ..report.sizes import Extent, renamed
from .operators import extent


def sizes_in_call(func: relax.Function, call: relax.Call) -> dict[str, Extent]:
    """Return what the symbolic sizes of a function are where it is called, by their names."""
    found: dict[str, Extent] = {}
    for param, arg in zip(func.params, call.args, strict=False):
        for mine, theirs in _pairs(param.ty, arg.ty):
            if isinstance(mine, tirx.Var):
                found.setdefault(mine.name, extent(theirs))
    return found


def _pairs(mine: ir.Type, theirs: ir.Type) -> Iterator[tuple[PrimExpr, PrimExpr]]:
    """Yield the sizes of a parameter beside those of its argument."""
    if isinstance(mine, ir.TupleType) and isinstance(theirs, ir.TupleType):
        for one, other in zip(mine.fields, theirs.fields, strict=False):
            yield from _pairs(one, other)
    else:
        yield from zip(_sizes(mine), _sizes(theirs), strict=False)


def _sizes(ty: ir.Type) -> Sequence[PrimExpr]:
    known = ty.shape if isinstance(ty, relax.TensorType) else ty
    return list(known.values) if isinstance(known, relax.ShapeExpr | relax.ShapeType) else ()


def seen_from_caller(item: Item, sizes: Mapping[str, Extent]) -> Item:
    """Return an item whose sizes are in the names of the caller's.

    Parameters
    ----------
    item : Item
        The work of a function that is called.
    sizes : mapping of str to int or str
        What `sizes_in_call` returned.
    """

    def own(size: Extent) -> Extent:
        return renamed(size, sizes)

    return replace(
        item,
        products=tuple(Product(*map(own, (p.m, p.n, p.k, p.batch))) for p in item.products),
        arrays=tuple(Array(tuple(map(own, a.shape)), a.dtype) for a in item.arrays),
        dims=tuple((name, own(size)) for name, size in item.dims),
    )
