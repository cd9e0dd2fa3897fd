"""Movements of elements, read backwards: where an element was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from tvm import relax, tirx

from .pattern import Definitions
from .shapes import is_one, permutation, product, same_shape, shape_of

Place: TypeAlias = tuple[Any, ...]
"""The coordinates of an element."""

IN_ORDER = ("relax.expand_dims", "relax.squeeze", "relax.reshape", "relax.flatten")
"""Movements that leave elements one after the other as they were."""

MOVES = (*IN_ORDER, "relax.broadcast_to")
"""These, and repetition along dimensions."""


def origins(
    view: Definitions,
    expr: relax.Expr,
    place: Sequence[Any],
    ops: Sequence[str],
    simple: Callable[[Any], Any],
) -> Iterator[tuple[relax.Expr, Place]]:
    """Yield a tensor and the place of an element, then what each movement reads, and where there.

    `ops` are the movements to go through; `simple` returns a coordinate made simple.
    """
    at: Place | None = tuple(place)
    while at is not None:
        at = tuple(map(simple, at))
        yield expr, at
        call = view.call(expr, *ops)
        at = None if call is None else moved_place(call, at)
        expr = expr if call is None else call.args[0]


def moved_place(call: relax.Call, place: Place) -> Place | None:
    """Return the place in front of a movement of an element behind it; None if it is not known."""
    before, after = shape_of(call.args[0]) or [], shape_of(call) or []
    zero = tirx.IntImm("int64", 0)
    if call.op.name == "relax.broadcast_to":
        behind = place[len(place) - len(before) :]
        return tuple(zero if is_one(d) else p for d, p in zip(before, behind, strict=True))
    if call.op.name == "relax.tile":
        return tuple(p % d for d, p in zip(before, place[len(place) - len(before) :], strict=True))
    if call.op.name == "relax.permute_dims":
        axes = permutation(call, len(place))
        return tuple(place[axes.index(n)] for n in range(len(place)))
    left = [(d, p) for d, p in zip(after, place, strict=True) if not is_one(d)]
    inner = [n for n, d in enumerate(before) if not is_one(d)]
    found: dict[int, tirx.Expr] = {}
    while left and inner:
        some, inside = [left.pop()], [inner.pop()]
        while not same_shape(
            [product([d for d, _ in some])], [product([before[n] for n in inside])]
        ):
            short = _is_short([d for d, _ in some], [before[n] for n in inside])
            if not (left if short else inner):
                return None
            _extend(some, left) if short else _extend(inside, inner)
        if len(some) == len(inside) == 1:
            found[inside[0]] = some[0][1]
        else:
            sizes, places = zip(*some, strict=True)
            own = place_of(flat_of(places, sizes), [before[n] for n in inside])
            found |= zip(inside, own, strict=True)
    return None if left or inner else tuple(found.get(n, zero) for n in range(len(before)))


def _extend(some: list[Any], more: list[Any]) -> None:
    some.insert(0, more.pop())


def _is_short(first: list[Any], second: list[Any]) -> bool:
    """Tell whether the first sizes are to be made more: those of fewer elements, or known ones."""
    counts = [product(sizes) for sizes in (first, second)]
    known = [isinstance(count, int | tirx.IntImm) for count in counts]
    return int(counts[0]) < int(counts[1]) if all(known) else known[0]


def flat_of(place: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Return the number of an element, by its coordinates."""
    flat: Any = tirx.IntImm("int64", 0)
    for at, size in zip(place, sizes, strict=True):
        flat = flat * size + at
    return flat


def place_of(flat: Any, sizes: Sequence[Any]) -> list[Any]:
    """Return the coordinates of an element, by its number."""
    found: list[Any] = []
    for size in sizes[:0:-1]:
        found.insert(0, tirx.IntImm("int64", 0) if is_one(size) else flat % size)
        flat = flat if is_one(size) else flat // size
    return [flat, *found]
