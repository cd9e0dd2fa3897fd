"""Rotary embeddings written out: pairs of the last axis turned by whatever angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tvm import relax

from .constants import binary, scalar
from .movements import cut_of
from .operators import VIEWS
from .pattern import BlockView, Definitions, PrimExpr, is_call
from .shapes import dtype_of, same_shape, shape_of

if TYPE_CHECKING:
    from .norm_rotation import NormRotation

Pairing = Literal["halves", "neighbours"]

MOST_STEPS = 8
"""A rotation has at most so many bindings from its source to its end, along any way."""

MOST_READERS = 48
"""A search for the end of a rotation stops after so many bindings."""


@dataclass(frozen=True)
class Rotation:
    """A rotation of the last axis: `end` is `source` turned by the angles of `cos` and `sin`.

    `covers` are its bindings, `end` among them.  Elements are paired by halves or with their
    neighbours; `by_pair` tells that there is an angle for each pair, else for each element.
    `heads` is what a PrimFunc does that normalises heads before it rotates them, and its gamma.
    """

    source: relax.Expr
    cos: relax.Expr
    sin: relax.Expr
    covers: tuple[relax.Var, ...]
    end: relax.Var
    pairing: Pairing = "halves"
    by_pair: bool = False
    heads: tuple[NormRotation, relax.Expr] | None = None


@dataclass(frozen=True)
class _Part:
    """The first (`part` 0) or second elements of the pairs of the last axis of `source`."""

    source: relax.Expr
    pairing: Pairing
    part: int
    covers: tuple[relax.Var, ...]


@dataclass(frozen=True)
class _Joined:
    """First and second elements of pairs that were put together again."""

    low: relax.Expr
    high: relax.Expr
    pairing: Pairing
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
    """Look for the end of a rotation behind its source, the nearest first."""
    met: dict[relax.Var, None] = {}
    level = [source]
    for _ in range(MOST_STEPS):
        level = [u for v in level for u in view.uses(v) if u not in met]
        for end in dict.fromkeys(level):
            found = rotation_at(view, end)
            if found is not None and found.source.same_as(source):
                return found
        met.update(dict.fromkeys(level))
        if len(met) > MOST_READERS:
            break
    return None


def rotation_at(view: Definitions, end: relax.Var) -> Rotation | None:
    """Read a rotation of the last axis, operands of sums and products in any order.

    rewrite::

        t * cos + joined(-second(t), first(t)) * sin
        joined(first(t) * cos - second(t) * sin, second(t) * cos + first(t) * sin)

    The parts are halves, put together by a concatenation, or neighbours, by a further axis.
    """
    for first, second in binary(view, end, "relax.add"):
        for source, cos in binary(view, first, "relax.multiply"):
            for turned, sin in binary(view, second, "relax.multiply"):
                for part in _turned(view, turned, source):
                    covers = (first, *part.covers, second, end)
                    return Rotation(source, cos, sin, covers, end, part.pairing)
    return next((found for joined in _joined(view, end) for found in _by_pair(view, joined)), None)


def _turned(view: Definitions, expr: relax.Expr, source: relax.Expr) -> Iterator[_Part]:
    """Yield `source` with its pairs exchanged, the new first elements negated.

    Both may be widened, each behind its own cast.
    """
    wide, other = (view.call(e, "relax.astype") for e in (expr, source))
    if wide is not None and other is not None and dtype_of(expr) == dtype_of(source):
        for part in _turned(view, wide.args[0], other.args[0]):
            yield replace(part, source=source, covers=(*part.covers, expr))
    for joined in _joined(view, expr):
        minus = _negated(view, joined.low)
        low, high = _parts(view, joined.high), [] if minus is None else _parts(view, minus)
        for a in low:
            for b in high:
                if _are_pairs(a, b, joined.pairing) and a.source.same_as(source):
                    covers = (*a.covers, *b.covers, joined.low, *joined.covers)
                    yield replace(a, covers=tuple(dict.fromkeys(covers)))


def _by_pair(view: Definitions, joined: _Joined) -> Iterator[Rotation]:
    """Yield rotations whose first and second elements are computed apart."""
    minus = view.call(joined.low, "relax.subtract")
    if minus is None:
        return
    ac, bs = minus.args
    for bc, as_ in binary(view, joined.high, "relax.add"):
        for a, cos in binary(view, ac, "relax.multiply"):
            for b, sin in binary(view, bs, "relax.multiply"):
                if not _multiplies(view, bc, b, cos) or not _multiplies(view, as_, a, sin):
                    continue
                for low in _parts(view, a):
                    for high in _parts(view, b):
                        if not _are_pairs(low, high, joined.pairing):
                            continue
                        made = (ac, bs, joined.low, bc, as_, joined.high, *joined.covers)
                        covers = tuple(dict.fromkeys((*low.covers, *high.covers, *made)))
                        yield Rotation(
                            low.source, cos, sin, covers, covers[-1], joined.pairing, by_pair=True
                        )


def _multiplies(view: Definitions, expr: relax.Expr, a: relax.Expr, b: relax.Expr) -> bool:
    return any(x.same_as(a) and y.same_as(b) for x, y in binary(view, expr, "relax.multiply"))


def _are_pairs(low: _Part, high: _Part, pairing: Pairing) -> bool:
    """Tell whether two parts are the first and the second elements of the same pairs."""
    same = low.source.same_as(high.source) and low.pairing == high.pairing == pairing
    return same and (low.part, high.part) == (0, 1)


def _joined(view: Definitions, expr: relax.Expr) -> Iterator[_Joined]:
    """Yield what two parts `expr` is put together of, in the shape that they have without it."""
    whole = view.call(expr, "relax.reshape")
    made = expr if whole is None else whole.args[0]
    call = view.call(made, "relax.concat", "relax.stack")
    if call is None or not isinstance(call.args[0], relax.Tuple):
        return
    shape, inner, covers = shape_of(expr), shape_of(made), tuple(dict.fromkeys((made, expr)))
    if not shape or not inner:
        return
    fields = call.args[0].fields
    axis = (0 if call.attrs.axis is None else int(call.attrs.axis)) % len(inner)
    last, pairing = len(inner) - 1, _pairing_of(inner, shape)
    if whole is None:
        pairing = "halves" if axis == last and is_call(call, "relax.concat") else None
    elif (pairing, axis) not in (("neighbours", last), ("halves", last - 1)):
        pairing = None
    half = _half_of(shape)
    if pairing is None or len(fields) != 2 or half is None:
        return
    parts = [found for f in fields if (found := _seen_as(view, f, half)) is not None]
    if len(parts) == 2:
        (low, low_views), (high, high_views) = parts
        yield _Joined(low, high, pairing, (*low_views, *high_views, *covers))


def _half_of(shape: list[PrimExpr]) -> list[PrimExpr | int] | None:
    """Return a shape with half of the last axis, None if that is odd or unknown."""
    last = shape[-1]
    size = int(last) if hasattr(last, "value") else 1
    return None if size % 2 else [*shape[:-1], size // 2]


def _pairing_of(pairs: list[PrimExpr], shape: list[PrimExpr]) -> Pairing | None:
    """Return how a shape splits the last axis of another one into pairs."""
    half = _half_of(shape)
    if half is None or len(pairs) != len(half) + 1:
        return None
    if same_shape(pairs, [*half, 2]):
        return "neighbours"
    return "halves" if same_shape(pairs, [*half[:-1], 2, half[-1]]) else None


def _seen_as(
    view: Definitions, expr: relax.Expr, shape: list[PrimExpr | int]
) -> tuple[relax.Expr, tuple[relax.Var, ...]] | None:
    """Return `expr` in front of the views that took it from `shape`, and those views."""
    covers: tuple[relax.Var, ...] = ()
    while not same_shape(shape_of(expr), shape):
        call = view.call(expr, *VIEWS)
        if call is None:
            return None
        expr, covers = call.args[0], (expr, *covers)
    return expr, covers


def _negated(view: Definitions, expr: relax.Expr) -> relax.Expr | None:
    """Return what `expr` is the negative of."""
    call = view.call(expr, "relax.negative")
    if call is not None:
        return call.args[0]
    for data, factor in binary(view, expr, "relax.multiply"):
        if scalar(view, factor) == -1.0:
            return data
    return None


def _parts(view: Definitions, expr: relax.Expr) -> list[_Part]:
    """Return what `expr` may be a part of: each second element of the last axis, or half of it.

    Written as a slice or a split of that axis, or of one of size 2 into which it was reshaped.
    """
    covers: tuple[relax.Var, ...] = (expr,)
    shape = shape_of(expr)
    while (call := view.call(expr, "relax.reshape", "relax.squeeze")) is not None:
        expr, covers = call.args[0], (call.args[0], *covers)
    cut = cut_of(view, expr)
    if cut is None:
        return []
    value, found = view.definition(expr), list[_Part]()
    if isinstance(value, relax.TupleGetItem):
        covers = (value.tuple_value, *covers)
    source, axis, extent, step = cut.source, cut.axis, cut.extent, cut.stride
    start, stop = cut.start, cut.stop
    whole = shape_of(source)
    if not whole or extent % 2:
        return []
    last = len(whole) - 1
    if same_shape(shape, _half_of(whole)) and axis == last:
        if step == 2 and start in (0, 1) and stop >= extent - 1 + start:
            found.append(_Part(source, "neighbours", start, covers))
        elif step == 1 and (start, stop) in ((0, extent // 2), (extent // 2, extent)):
            found.append(_Part(source, "halves", int(start > 0), covers))
    pairs = view.call(source, "relax.reshape")
    before = shape_of(pairs.args[0]) if pairs is not None else None
    if pairs is not None and before and same_shape(shape, _half_of(before)):
        pairing = _pairing_of(whole, before)
        own = last if pairing == "neighbours" else last - 1
        if pairing is not None and (axis, extent, stop - start) == (own, 2, 1):
            found.append(_Part(pairs.args[0], pairing, start, (source, *covers)))
    return found
