"""Tensors that hold the features of a projection, moved but not changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax, tirx

from ..tvm_ir import GenericConst
from .operators import VIEWS
from .pattern import BlockView, Definitions, PrimExpr, is_call
from .shapes import permutation, same_shape, shape_of


@dataclass(frozen=True)
class Run:
    """`size` features, `step` apart; 0 for one that is repeated."""

    size: int
    step: int


Features = tuple[Run, ...]
"""The features along an axis, the outermost run first; none for an axis of size 1."""


@dataclass(frozen=True)
class Moved:
    """A tensor that holds features of a projection, moved or repeated but not changed.

    `axes` says what each axis holds: rows, which are counted, or features, of which `start` is the
    first.  `path` are the bindings from the projection to it; `dims` its dimensions, where it is
    seen in other ones than its variable has.
    """

    var: relax.Var
    axes: tuple[int | Features, ...]
    start: int = 0
    path: tuple[relax.Var, ...] = ()
    dims: tuple[PrimExpr, ...] | None = None

    @property
    def shape(self) -> list[PrimExpr]:
        """The dimensions."""
        return list(self.dims) if self.dims is not None else shape_of(self.var) or []

    def by_heads(self, width: int) -> Moved | None:
        """Return it with an axis for the heads of `width` features in the last; None if not so."""
        held, (*rows, last) = self.axes[-1], self.shape
        runs = held if isinstance(held, tuple) else ()
        axes = _cut(runs, [int(last) // width, width])
        dims = (*rows, *(tirx.IntImm("int64", n) for n in (int(last) // width, width)))
        return None if axes is None else replace(self, axes=(*self.axes[:-1], *axes), dims=dims)

    def features(self, axes: slice = slice(None)) -> np.ndarray:
        """Return the features that it holds, or those at the beginning of the other axes.

        What is repeated is among them as often.
        """
        places = np.array([self.start])
        for held in self.axes[axes]:
            for run in held if isinstance(held, tuple) else ():
                places = np.add.outer(places, np.arange(run.size) * run.step).ravel()
        return places


def moves(view: BlockView, at: Moved, depth: int = 8) -> Iterator[Moved]:
    """Yield `at` and what is made of it by data movements."""
    yield at
    for user in view.uses(at.var) if depth else ():
        for moved in moved_by(view, at, user):
            yield from moves(view, moved, depth - 1)


def moved_by(view: BlockView, at: Moved, user: relax.Var) -> Iterator[Moved]:
    """Yield the tensors that `user` makes of `at` by moving or repeating its elements."""
    at = replace(at, path=(*at.path, user))
    if view.call(user, "relax.split") is not None:
        for item in view.uses(user):
            if (cut := cut_of(view, item)) is not None:
                yield from _section(replace(at, var=item, path=(*at.path, item)), cut)
        return
    at = replace(at, var=user)
    if isinstance(view.defs[user], relax.Var):  # another name: what made `at` is not done again
        yield at
    elif (call := view.call(user, "relax.permute_dims")) is not None:
        yield replace(at, axes=tuple(at.axes[a] for a in permutation(call, len(at.axes))))
    elif view.call(user, *VIEWS) is not None:
        yield from _regrouped(at)
    elif (call := view.call(user, "relax.broadcast_to")) is not None:
        yield from _repeated(at, shape_of(call.args[0]) or [])
    elif (cut := cut_of(view, user)) is not None and cut.stride == 1:
        yield from _section(at, cut)


def _section(at: Moved, cut: Cut) -> Iterator[Moved]:
    """Yield `at` as what is left of it by a cut along an axis of features."""
    axis, start, stop = cut.axis, cut.start, cut.stop
    held = at.axes[axis]
    if not isinstance(held, tuple) or start >= stop:
        return
    first, *rest = held or (Run(1, 0),)
    inner = math.prod(run.size for run in rest)
    if start % inner == 0 == stop % inner:
        kept = _merged([Run((stop - start) // inner, first.step), *rest])
        axes = (*at.axes[:axis], *(() if cut.single else (kept,)), *at.axes[axis + 1 :])
        yield replace(at, axes=axes, start=at.start + start // inner * first.step)


def _regrouped(at: Moved) -> Iterator[Moved]:
    """Yield `at`, whose axes are of a tensor of another shape, if rows and features stay apart."""
    rows = [a for a in at.axes if isinstance(a, int)]
    if rows != sorted(rows) or list(at.axes[: len(rows)]) != rows:
        return
    runs = _merged(run for held in at.axes if isinstance(held, tuple) for run in held)
    size, shape = math.prod(run.size for run in runs), at.shape
    sizes: list[int] = []
    for count in reversed(range(1, len(shape))):
        if not isinstance(shape[count], tirx.IntImm):
            return
        sizes.insert(0, int(shape[count]))
        if math.prod(sizes) == size:
            axes = _cut(runs, sizes)
            if axes is not None:
                yield replace(at, axes=(*range(count), *axes))
            return


def _merged(runs: Iterable[Run]) -> Features:
    """Return the same features in as few runs as they can be."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1].step == run.step * run.size:
            run = Run(found.pop().size * run.size, run.step)
        if run.size > 1:
            found.append(run)
    return tuple(found)


def _cut(runs: Features, sizes: Sequence[int]) -> list[Features] | None:
    """Return the runs along axes of these sizes, None if one would end within another."""
    rest, axes = list(runs), list[Features]()
    for size in reversed(sizes):
        held: list[Run] = []
        while size > 1:
            run = rest.pop()
            inner = math.gcd(size, run.size)
            if inner not in (size, run.size):
                return None
            if inner < run.size:
                rest.append(Run(run.size // inner, run.step * inner))
            held.insert(0, Run(inner, run.step))
            size //= inner
        axes.insert(0, tuple(held))
    return axes


def _repeated(at: Moved, before: Sequence[PrimExpr]) -> Iterator[Moved]:
    """Yield `at`, whose axes are of a tensor of shape `before`, if only features are repeated."""
    shape = at.shape
    axes: list[int | Features] = list(at.axes)
    if len(shape) != len(before):
        return
    for axis, (old, new) in enumerate(zip(before, shape, strict=True)):
        if not same_shape((old,), (new,)):
            if axes[axis] != () or not isinstance(new, tirx.IntImm):
                return
            axes[axis] = (Run(int(new), 0),)
    yield replace(at, axes=tuple(axes))


@dataclass(frozen=True)
class Cut:
    """Every `stride`-th of the elements `start` to `stop` of an axis of `source`.

    The axis has `extent` elements; of a `single` one, it is not there any more.
    """

    source: relax.Expr
    axis: int
    extent: int
    start: int
    stop: int
    stride: int = 1
    single: bool = False


def cut_of(view: Definitions, expr: relax.Expr) -> Cut | None:
    """Read a slice, an item of a split or a `take` of one element, along one static axis."""
    value = view.definition(expr)
    item = value if isinstance(value, relax.TupleGetItem) else None
    names = ("relax.strided_slice", "relax.take") if item is None else ("relax.split",)
    call = view.call(expr if item is None else item.tuple_value, *names)
    shape = shape_of(call.args[0]) if call is not None else None
    if call is None or shape is None:
        return None
    given = _ints(call.args[1]) if is_call(call, "relax.strided_slice") else [call.attrs.axis]
    if given is None or len(given) != 1 or given[0] is None:
        return None
    axis = int(given[0]) % len(shape)
    extent = int(shape[axis]) if isinstance(shape[axis], tirx.IntImm) else None
    if extent is None:
        return None
    if item is not None:
        ends = _of_split(call, int(item.index), extent)
    elif is_call(call, "relax.take"):
        ends = _of_take(view, call, extent)
    else:
        ends = _of_slice(call, extent)
    single = is_call(call, "relax.take")
    return None if ends is None else Cut(call.args[0], axis, extent, *ends, single)


def _of_split(call: relax.Call, index: int, extent: int) -> tuple[int, int, int] | None:
    """Return where an item of a split begins and ends."""
    sections = call.attrs.indices_or_sections
    if hasattr(sections, "__len__"):
        starts = [0, *map(int, sections)]
    else:
        starts = [*range(0, extent, -(-extent // int(sections)))] if extent else []
    return None if index >= len(starts) else (starts[index], [*starts, extent][index + 1], 1)


def _of_take(view: Definitions, call: relax.Call, extent: int) -> tuple[int, int, int] | None:
    """Return the one place that a constant number is."""
    index = view.definition(call.args[1])
    if not isinstance(index, GenericConst) or shape_of(index) != []:
        return None
    start = int(index.value.numpy())
    return (start, start + 1, 1) if 0 <= start < extent else None


def _of_slice(call: relax.Call, extent: int) -> tuple[int, int, int] | None:
    """Return where a slice begins and ends, and its stride."""
    begin, end = (_ints(a) for a in call.args[2:4])
    strides = _ints(call.args[4]) if len(call.args) > 4 else [1]
    if begin is None or end is None or strides is None or len(strides) != 1:
        return None
    start, stop = (min(v + extent if v < 0 else v, extent) for v in (begin[0], end[0]))
    return start, stop, strides[0]


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
    Returns the tensor in front of them, and the reshapes, `expr` the last; no reshapes if it is
    none.
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
    while (call := view.call(expr, *VIEWS)) is not None:
        expr = call.args[0]
    return expr


@dataclass(frozen=True)
class Prefix:
    """The first `length` elements of an axis of `source`."""

    source: relax.Expr
    axis: int
    length: PrimExpr


def prefix_slice(view: BlockView, expr: relax.Expr) -> Prefix | None:
    """Read a slice of the first elements of one axis."""
    call = view.call(expr, "relax.strided_slice")
    shape = shape_of(expr) if call is not None else None
    if call is None or shape is None:
        return None
    axes, begin = (_values(a) for a in call.args[1:3])
    strides = _values(call.args[4]) if len(call.args) > 4 else [1]
    if len(axes) != 1 or not same_shape(begin, (0,)) or not same_shape(strides, (1,)):
        return None
    axis = int(axes[0]) % len(shape)
    # The end may lie beyond the tensor, where the slice stops; its type has the true length.
    return Prefix(call.args[0], axis, shape[axis])


def _values(expr: relax.Expr) -> list[PrimExpr]:
    """Return the elements of a tuple of primitive values."""
    return list(expr.fields if isinstance(expr, relax.Tuple) else expr.values)
