"""Tensors that hold the features of a projection, moved but not changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from .pattern import BlockView, Definitions, PrimExpr
from .shapes import permutation, product, same_shape, shape_of

FEATURES, HEAD, LANE = -1, -2, -3
"""What an axis holds, beside rows, which are counted: features of heads, heads, features of one."""


@dataclass(frozen=True)
class Moved:
    """A tensor that holds features `start` to `stop` of a projection, moved but not changed.

    `axes` says what each axis holds, `path` are the bindings from the projection to it.
    """

    var: relax.Var
    axes: tuple[int, ...]
    start: int
    stop: int
    path: tuple[relax.Var, ...] = ()

    @property
    def shape(self) -> list[PrimExpr]:
        """The dimensions."""
        return shape_of(self.var) or []


def moves(view: BlockView, at: Moved, depth: int = 6) -> Iterator[Moved]:
    """Yield `at` and what is made of it by data movements."""
    yield at
    for user in view.uses(at.var) if depth else ():
        for moved in moved_by(view, at, user):
            yield from moves(view, moved, depth - 1)


def moved_by(view: BlockView, at: Moved, user: relax.Var) -> Iterator[Moved]:
    """Yield the tensors that `user` makes of `at` by moving its elements."""
    path = (*at.path, user)
    if isinstance(view.defs[user], relax.Var):  # another name: what made `at` is not done again
        yield replace(at, var=user, path=path)
    elif view.call(user, "relax.reshape") is not None:
        axes = _reshaped_axes(at, shape_of(user) or [])
        if axes is not None:
            yield replace(at, var=user, axes=axes, path=path)
    elif (call := view.call(user, "relax.permute_dims")) is not None:
        axes = tuple(at.axes[a] for a in permutation(call, len(at.axes)))
        yield replace(at, var=user, axes=axes, path=path)
    elif (parts := split_parts(view, user)) is not None:
        for item in view.uses(user):
            value = view.defs[item]
            if isinstance(value, relax.TupleGetItem):
                ends = (*parts.starts, parts.extent)
                section = ends[int(value.index)], ends[int(value.index) + 1]
                yield from _section(replace(at, var=item, path=(*path, item)), parts.axis, section)
    elif (cut := static_slice(view, user)) is not None:
        yield from _section(replace(at, var=user, path=path), cut.axis, (cut.start, cut.stop))


def _section(at: Moved, axis: int, section: tuple[int, int]) -> Iterator[Moved]:
    """Yield `at` as what is left of it by a cut along the features or the heads."""
    start, stop = section
    if at.axes[axis] == FEATURES:
        yield replace(at, start=at.start + start, stop=at.start + stop)
    elif at.axes[axis] == HEAD and LANE in at.axes:
        width = int(at.shape[at.axes.index(LANE)])
        yield replace(at, start=at.start + start * width, stop=at.start + stop * width)


def _reshaped_axes(at: Moved, shape: list[PrimExpr]) -> tuple[int, ...] | None:
    """Return what the axes hold after a reshape that keeps rows and features apart."""
    rows = [a for a in at.axes if a >= 0]
    before = at.axes[len(rows) :]
    if rows != sorted(rows) or at.axes[: len(rows)] != tuple(rows):
        return None
    last = at.shape[len(rows) :]
    for after in ((FEATURES,), (HEAD, LANE)):
        count = len(shape) - len(after)
        if count < 1 or not same_shape((product(shape[count:]),), (product(last),)):
            continue
        whole = after == before and same_shape(shape[count:], last)
        regrouped = {after, before} == {(FEATURES,), (HEAD, LANE)}
        known = all(isinstance(d, tirx.IntImm) for d in shape[count:])
        if known and (whole or regrouped):
            return (*range(count), *after)
    return None


@dataclass(frozen=True)
class Cut:
    """Elements `start` to `stop` of an axis of `source` that has `extent` of them."""

    source: relax.Expr
    axis: int
    rank: int
    extent: int
    start: int
    stop: int


def static_slice(view: Definitions, expr: relax.Expr) -> Cut | None:
    """Read a slice along one static axis, without a stride, between static ends."""
    call = view.call(expr, "relax.strided_slice")
    shape = shape_of(call.args[0]) if call is not None else None
    if call is None or shape is None:
        return None
    axes, begin, end = (_ints(a) for a in call.args[1:4])
    strides = _ints(call.args[4]) if len(call.args) > 4 else [1]
    if axes is None or begin is None or end is None or strides != [1]:
        return None
    if not len(axes) == len(begin) == len(end) == 1:
        return None
    axis = axes[0] % len(shape)
    if not isinstance(shape[axis], tirx.IntImm):
        return None
    extent = int(shape[axis])
    start, stop = (min(v + extent if v < 0 else v, extent) for v in (begin[0], end[0]))
    return Cut(call.args[0], axis, len(shape), extent, start, stop)


@dataclass(frozen=True)
class Parts:
    """A split of a static axis of `source`, of `extent` elements, at `starts`."""

    source: relax.Expr
    axis: int
    rank: int
    extent: int
    starts: tuple[int, ...]


def split_parts(view: Definitions, expr: relax.Expr) -> Parts | None:
    """Read a split along a static axis."""
    call = view.call(expr, "relax.split")
    shape = shape_of(call.args[0]) if call is not None else None
    if call is None or shape is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    if not isinstance(shape[axis], tirx.IntImm):
        return None
    extent, sections = int(shape[axis]), call.attrs.indices_or_sections
    if hasattr(sections, "__len__"):
        starts = (0, *(int(s) for s in sections))
    else:
        step = -(-extent // int(sections))
        starts = tuple(range(0, extent, step))
    return Parts(call.args[0], axis, len(shape), extent, starts)


def _ints(expr: relax.Expr) -> list[int] | None:
    """Return the elements of a tuple of static integers."""
    fields: Sequence[PrimExpr] = expr.fields if isinstance(expr, relax.Tuple) else expr.values
    if not all(isinstance(f, tirx.IntImm) for f in fields):
        return None
    return [int(f) for f in fields]


def keeps_features(before: relax.Expr, after: relax.Expr) -> bool:
    """Tell whether a reshape of `before` to `after` leaves the features, the last axis, alone."""
    old, new = shape_of(before) or [], shape_of(after) or []
    return len(new) > 1 and same_shape(old[-1:], new[-1:])


def ungrouped(view: BlockView, expr: relax.Expr) -> tuple[relax.Expr, tuple[relax.Var, ...]]:
    """Look through reshapes that group the rows of a tensor anew and leave its features alone.

    PyTorch's exporter writes them around each matmul: ``[b, s, k]`` becomes ``[b * s, k]``.

    Returns
    -------
    relax.Expr
        The tensor in front of them.
    tuple of relax.Var
        The reshapes, `expr` the last; empty if it is none.
    """
    path: tuple[relax.Var, ...] = ()
    while (call := view.call(expr, "relax.reshape")) is not None:
        if not isinstance(expr, relax.Var) or not keeps_features(call.args[0], expr):
            break
        expr, path = call.args[0], (expr, *path)
    return expr, path


def same_expr(view: BlockView, a: relax.Expr, b: relax.Expr) -> bool:
    """Tell whether two expressions are one tensor, views of the same size looked through."""
    a, b = through_views(view, a), through_views(view, b)
    return a.same_as(b) and same_shape(shape_of(a), shape_of(b))


def through_views(view: BlockView, expr: relax.Expr) -> relax.Expr:
    """Return the tensor of which `expr` is only another view of all elements."""
    while (
        call := view.call(expr, "relax.expand_dims", "relax.reshape", "relax.squeeze")
    ) is not None:
        expr = call.args[0]
    return expr
