"""The softmax of an attention, the maximum of each row, and what stands in front of the values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import relax

from ...errors import Reason
from ...workload import FLOAT_BYTES
from ..axes import is_plain_copy
from ..elements import Elements
from ..movements import prefix_slice
from ..operators import VIEWS
from ..pattern import BlockView, guard, is_call
from ..shapes import dtype_of, is_one, same_shape, shape_of, shape_text
from .scores import Scores


@dataclass(frozen=True)
class Softmax:
    """Where the scores go into a softmax, with one more score for each head or without.

    `scores` are those that depend on a key; `sinks` is of their shape, with one key.
    """

    scores: Scores
    sinks: relax.Expr | None = None


def softmax_of(view: BlockView, weights: relax.Expr, end: relax.Var) -> Softmax | None:
    """Find the softmax that made the weights of a matmul whose result is `end`."""
    keys = (shape_of(weights) or [])[-1:]
    weights, covers = _through_views(view, weights, (end,))
    sliced = prefix_slice(view, weights)
    if sliced is not None:
        last = len(shape_of(weights) or ()) - 1
        if sliced.axis != last:
            return None
        weights, covers = _through_views(view, sliced.source, (weights, *covers))
    safe = _without_empty_rows(view, weights)
    if safe is not None:
        weights, covers = safe[0], (*safe[1], *covers)
    softmax = view.call(weights, "relax.nn.softmax")
    shape = shape_of(weights)
    if softmax is None or shape is None:
        return None
    axis = int(softmax.attrs.axis) % len(shape)
    last = len(shape) - 1
    guard(axis == last, Reason.AXIS, f"the softmax is over axis {axis}, not the last")
    at = Scores(softmax.args[0], (weights, *covers))
    found = Softmax(at) if sliced is None else _with_sinks(view, at)
    if found is not None:
        row = found.scores.shape[-1:]
        detail = f"the softmax is over {shape_text(row)}, the values are {shape_text(keys)}"
        guard(same_shape(row, keys), Reason.LAYOUT, detail)
    return found


def _through_views(
    view: BlockView, expr: relax.Expr, covers: tuple[relax.Var, ...]
) -> tuple[relax.Expr, tuple[relax.Var, ...]]:
    """Look through casts and views; weights are rounded to the values' dtype in a kernel."""
    while (call := view.call(expr, *VIEWS, "relax.astype", "relax.broadcast_to")) is not None:
        if call.op.name == "relax.broadcast_to" and not is_plain_copy(view, expr):
            break
        if dtype_of(expr) not in FLOAT_BYTES:
            break  # a cast that rounds
        covers, expr = (expr, *covers), call.args[0]
    return expr, covers


def _without_empty_rows(
    view: BlockView, weights: relax.Expr
) -> tuple[relax.Expr, tuple[relax.Var, ...]] | None:
    """Look through PyTorch's safe softmax, which has zeros where each score is minus infinity.

    ``where(not any(not (s == -inf)), zeros, softmax(s))``, or ``where(isnan(w), zeros, w)`` of
    ``w = softmax(s)``, as its exporter to ONNX writes it.  A kernel does the same, but has NaN for
    scores that are NaN.
    """
    choice = view.call(weights, "relax.where")
    if choice is None:
        return None
    empty, zeros, inner = choice.args
    softmax = view.call(inner, "relax.nn.softmax")
    if softmax is None or Elements(view).uniform(zeros) != 0:
        return None
    guarded = view.call(empty, "relax.isnan")
    if guarded is not None:
        return (inner, (weights, empty)) if guarded.args[0].same_as(inner) else None
    covers, call = [weights], None
    for name in ("logical_not", "astype", "max", "astype", "logical_not", "equal"):
        call = view.call(empty, f"relax.{name}")
        if call is None or (name == "max" and not is_by_row(call)):
            return None
        covers.append(empty)
        empty = call.args[0]
    limit = Elements(view).uniform(call.args[1]) if call is not None else None
    if limit != float("-inf") or not empty.same_as(softmax.args[0]):
        return None
    if isinstance(zeros, relax.Var) and view.call(zeros, "relax.full_like") is not None:
        covers.append(zeros)
    return inner, tuple(covers)


def _with_sinks(view: BlockView, at: Scores) -> Softmax | None:
    """Read ``softmax(concat(scores, sinks))``, with the largest taken off in between or not."""
    call = view.call(at.expr, "relax.astype")
    if call is not None:
        at = at.inside(call.args[0])
    shifted = view.call(at.expr, "relax.subtract")
    if shifted is not None:
        largest = row_maximum(view, shifted.args[1])
        if largest is None or not largest[0].same_as(shifted.args[0]):
            return None
        at = at.inside(shifted.args[0])
        at = replace(at, covers=(*largest[1], *at.covers))
    joined = view.call(at.expr, "relax.concat")
    if joined is None or not isinstance(joined.args[0], relax.Tuple):
        return None
    fields = joined.args[0].fields
    axis = 0 if joined.attrs.axis is None else int(joined.attrs.axis)
    if len(fields) != 2 or axis % len(at.shape) != len(at.shape) - 1:
        return None
    scores, sinks = fields
    shape = shape_of(sinks)
    if shape is None or not is_one(shape[-1]):
        return None
    return Softmax(at.inside(scores), sinks)


def row_maximum(
    view: BlockView, expr: relax.Expr
) -> tuple[relax.Expr, tuple[relax.Var, ...]] | None:
    """Read ``max(x, axis=-1, keepdims=True)``, or the first result of ``topk(x, 1)``.

    Return the rows x, and the bindings from there to the maximum.
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
