"""Rows of a cache, written where they are.

A decoder with a static cache writes the keys and values of new tokens into a buffer.  AOTAutograd
makes a copy of the whole buffer of it, with other rows, and copies all that back at the end.  Where
nothing else reads the buffer, here the rows alone are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from tvm import relax, tirx

from ..tvm_ir import IRBuilder, T

_aten = torch.ops.aten

OPAQUE = 8
"""The `relax` operator pattern of a kernel that nothing is fused with (kOpaque)."""


def write_rows(cache: torch.Tensor, axis: int, rows: torch.Tensor, values: torch.Tensor) -> Any:
    """Write `values` to the places `rows` along an axis of `cache`, and return `cache`."""
    return cache.index_copy_(axis, rows.long(), values)


def write_in_place(module: GraphModule) -> None:
    """Replace copies of caches with other rows by writes of those rows.

    rewrite: ``new = index_put(cache, [None, rows], values); ...; copy_(cache, new)`` ->
    ``new = write_rows(cache, 1, rows, values); ...``

    declines when: something else reads the cache, rows are chosen along several axes, or by
    masks, or values are broadcast.
    """
    graph = module.graph
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        cache, new = copy.args[0], copy.args[1]
        if new.args[:1] != (cache,) or cache.op != "placeholder" or set(cache.users) != {new, copy}:
            continue
        found = chosen_rows(new)
        if found is None or copy.users:
            continue
        axis, rows = found
        new.target, new.args, new.kwargs = write_rows, (cache, axis, rows, new.args[2]), {}
        graph.erase_node(copy)


def chosen_rows(new: Node) -> tuple[int, Node] | None:
    """Return along which one axis, and where, an ``index_put`` writes whole rows; None if not so."""
    if new.target is not _aten.index_put.default:
        return None
    if len(new.args) > 3 and new.args[3]:
        return None
    chosen = [(axis, rows) for axis, rows in enumerate(new.args[1]) if rows is not None]
    if len(chosen) != 1:
        return None
    axis, rows = chosen[0]
    index, values, whole = (node.meta["val"] for node in (rows, new.args[2], new.args[0]))
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return None
    shape = list(whole.shape)
    shape[axis] = index.shape[0]
    same = values.dim() == len(shape) and all(a is b or a == b for a, b in zip(values.shape, shape))
    return (axis, rows) if same and values.dtype == whole.dtype else None


_FRESH = ("full.default", "zeros.default", "full_like.default", "zeros_like.default")


def is_fresh(node: Node) -> bool:
    """Tell whether a value is memory of its own that one operator reads."""
    made = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    new = made and (node.target.__name__ in _FRESH or chosen_rows(node) is not None)
    return new and len(node.users) == 1


def write_call(
    builder: relax.BlockBuilder, cache: relax.Expr, axis: int, rows: relax.Expr, values: relax.Expr
) -> relax.Var:
    """Return the cache after rows of it were written in place.

    Rows that the cache does not have are not written; negative ones count from the end.
    """
    func = _kernel(cache.ty, axis, rows.ty, values.ty)
    gvar = builder.add_func(func, "write_rows")
    args = relax.Tuple([cache, rows, values])
    return builder.emit(relax.op.call_tir_inplace(gvar, args, [0], cache.ty))


def _kernel(cache: Any, axis: int, rows: Any, values: Any) -> tirx.PrimFunc:
    fresh: dict[tirx.Var, tirx.Var] = {}

    def own(size: Any) -> Any:
        """Return a size by variables of the kernel's own."""
        if isinstance(size, tirx.IntImm):
            return int(size.value)
        if isinstance(size, tirx.Var):
            return fresh.setdefault(size, tirx.Var(size.name, "int64"))
        return tirx.Var("size", "int64")

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"op_pattern": OPAQUE, "tirx.noalias": True})
        handles = [T.arg(name, T.handle()) for name in ("cache", "rows", "values")]
        shapes = [[own(size) for size in ty.shape.values] for ty in (cache, rows, values)]
        types = (cache, rows, values)
        into, places, given = (
            T.match_buffer(handle, shape, str(ty.dtype))
            for handle, shape, ty in zip(handles, shapes, types, strict=True)
        )
        with T.grid(*shapes[2]) as loops:
            loops = list(loops)
            with T.sblock("write_rows"):
                at = list(T.axis.remap("S" * len(loops), loops))
                row = places[at[axis]].astype("int64")
                size = tirx.const(0, "int64") + shapes[0][axis]
                row = tirx.Select(row < 0, row + size, row)
                target = [row if n == axis else v for n, v in enumerate(at)]
                T.reads([given[tuple(at)], places[at[axis]]])
                T.writes([into[tuple(target)]])
                with T.If(tirx.all(row >= 0, row < size)), T.Then():
                    T.buffer_store(into, given[tuple(at)], target)
    return builder.get()
