"""The largest element of each row, which front ends take off in front of a softmax."""

from __future__ import annotations

from tvm import relax

from ..pattern import BlockView, is_call
from ..shapes import shape_of


def row_maximum(
    view: BlockView, expr: relax.Expr
) -> tuple[relax.Expr, tuple[relax.Var, ...]] | None:
    """Read ``max(x, axis=-1, keepdims=True)``, or the first result of ``topk(x, 1)``.

    Returns
    -------
    relax.Expr
        The rows x.
    tuple of relax.Var
        The bindings from x to the maximum.
    """
    path: tuple[relax.Var, ...] = ()
    while isinstance(expr, relax.Var):
        path = (expr, *path)
        value = view.definition(expr)
        if is_call(value, "relax.max"):
            return (value.args[0], path) if is_by_row(value) else None
        if is_call(value, "relax.topk"):
            return _largest(view, expr, value, path)
        if not isinstance(value, relax.TupleGetItem):
            return None
        # PyTorch's importer packs the results of topk into a tuple of its own.
        whole = view.definition(value.tuple_value)
        packed = isinstance(whole, relax.Tuple)
        if packed and isinstance(value.tuple_value, relax.Var):
            path = (value.tuple_value, *path)
        if not packed and int(value.index) != 0:
            return None
        expr = whole.fields[int(value.index)] if packed else value.tuple_value
    return None


def is_by_row(call: relax.Call) -> bool:
    """Tell whether a reduction leaves one element of each row, where the row was."""
    rank = len(shape_of(call.args[0]) or ())
    axes = [int(a) % max(rank, 1) for a in call.attrs.axis or ()]
    return axes == [rank - 1] and bool(call.attrs.keepdims)


def _largest(
    view: BlockView, var: relax.Var, call: relax.Call, path: tuple[relax.Var, ...]
) -> tuple[relax.Expr, tuple[relax.Var, ...]] | None:
    """Read a topk of one element, together with the places that it finds and nobody asks for."""
    rank = len(shape_of(call.args[0]) or ())
    attrs = call.attrs
    if int(attrs.k) != 1 or int(attrs.axis) % max(rank, 1) != rank - 1 or not bool(attrs.largest):
        return None
    unread = tuple(u for u in view.uses(var) if u not in path)
    return call.args[0], (*path, *unread)
