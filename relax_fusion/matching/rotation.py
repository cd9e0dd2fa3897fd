"""Rotary embeddings written out: ``t * cos + rotate_half(t) * sin``, by whatever angles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import relax

from .constants import binary, scalar
from .movements import split_parts, static_slice
from .pattern import BlockView, is_call
from .shapes import shape_of


@dataclass(frozen=True)
class Rotation:
    """A rotation of the last axis: `end` is `source` turned by the angles of `cos` and `sin`.

    `covers` are its bindings, `end` among them.
    """

    source: relax.Expr
    cos: relax.Expr
    sin: relax.Expr
    covers: tuple[relax.Var, ...]
    end: relax.Var


@dataclass(frozen=True)
class _Half:
    """The first (`part` 0) or second half of the last axis of `source`."""

    source: relax.Expr
    part: int
    covers: tuple[relax.Var, ...]


def rotation_of(view: BlockView, source: relax.Var) -> Rotation | None:
    """Return the rotation that reads `source`, computed in its dtype or in a wider one."""
    for user in view.uses(source):
        wide = _rotation_from(view, user) if is_call(view.defs[user], "relax.astype") else None
        if wide is not None:
            wide = replace(wide, source=source, covers=(user, *wide.covers))
            end = view.only_user(wide.end)
            if end is None or view.call(end, "relax.astype") is None:
                return wide
            return replace(wide, end=end, covers=(*wide.covers, end))
    return _rotation_from(view, source)


def _rotation_from(view: BlockView, source: relax.Var) -> Rotation | None:
    """Look for the sum at the end of a rotation two steps behind its source."""
    for product in view.uses(source):
        for end in view.uses(product):
            found = rotation_at(view, end)
            if found is not None and found.source.same_as(source):
                return found
    return None


def rotation_at(view: BlockView, end: relax.Var) -> Rotation | None:
    """Read ``t * cos + concat(-t[half:], t[:half]) * sin``, operands in any order."""
    for first, second in binary(view, end, "relax.add"):
        for source, cos in binary(view, first, "relax.multiply"):
            for turned, sin in binary(view, second, "relax.multiply"):
                halves = _half_turned(view, turned)
                if halves is not None and halves.source.same_as(source):
                    covers = (first, *halves.covers, second, end)
                    return Rotation(source, cos, sin, covers, end)
    return None


def _half_turned(view: BlockView, expr: relax.Expr) -> _Half | None:
    """Read ``concat(-t[half:], t[:half])``; `part` says nothing here."""
    call = view.call(expr, "relax.concat")
    shape = shape_of(expr)
    if call is None or shape is None or not isinstance(call.args[0], relax.Tuple):
        return None
    fields = call.args[0].fields
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    if len(fields) != 2 or axis % len(shape) != len(shape) - 1:
        return None
    minus = _negated(view, fields[0])
    high = _half(view, minus) if minus is not None else None
    low = _half(view, fields[1])
    if high is None or low is None or (low.part, high.part) != (0, 1):
        return None
    if not low.source.same_as(high.source):
        return None
    return _Half(low.source, 0, (*low.covers, *high.covers, fields[0], expr))


def _negated(view: BlockView, expr: relax.Expr) -> relax.Expr | None:
    """Return what `expr` is the negative of."""
    call = view.call(expr, "relax.negative")
    if call is not None:
        return call.args[0]
    for data, factor in binary(view, expr, "relax.multiply"):
        if scalar(view, factor) == -1.0:
            return data
    return None


def _half(view: BlockView, expr: relax.Expr) -> _Half | None:
    """Read a slice or a part of a split as half of the last axis."""
    value = view.definition(expr)
    if isinstance(value, relax.TupleGetItem):
        parts = split_parts(view, value.tuple_value)
        if parts is None or parts.axis != parts.rank - 1 or len(parts.starts) != 2:
            return None
        equal = parts.starts[1] * 2 == parts.extent
        covers = (value.tuple_value, expr)
        return _Half(parts.source, int(value.index), covers) if equal else None
    cut = static_slice(view, expr)
    if cut is None or cut.axis != cut.rank - 1 or cut.extent % 2:
        return None
    half = cut.extent // 2
    if (cut.start, cut.stop) not in ((0, half), (half, cut.extent)):
        return None
    return _Half(cut.source, int(cut.start > 0), (expr,))
