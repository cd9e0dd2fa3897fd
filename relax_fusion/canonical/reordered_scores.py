"""Scores of rotated queries and keys, whose features are in one order in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import relax, tirx

from ..matching.constants import binary
from ..matching.operators import VIEWS, named
from ..matching.pattern import is_call
from ..matching.rotation import Pairing, Rotation, rotation_at
from ..matching.shapes import dtype_of, is_one, permutation, product, same_shape, shape_of
from .rewriter import Rewriter, same_type

_MOST_STEPS = 12
"""Between a rotation and the scores are no more operators."""


@dataclass(frozen=True)
class _Found:
    """Features of a tensor, the `width` ones from `start` on, that are halves of neighbours.

    `made` writes the tensor down with these as neighbours.
    """

    start: int
    width: int
    made: Callable[[], relax.Expr]


def scores_of_neighbours(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write pairs as neighbours in queries and in keys, where both have them as halves."""
    queries, keys, *rest = call.args
    ranks = [len(shape_of(operand) or ()) for operand in (queries, keys)]
    if min(ranks) < 2:
        return None
    axes = ranks[0] - 1, ranks[1] - (2 if is_call(call, "relax.matmul") else 1)
    left = _halves(rewriter, queries, axes[0])
    right = _halves(rewriter, keys, axes[1]) if left is not None else None
    if left is None or right is None or (left.start, left.width) != (right.start, right.width):
        return None
    args = [rewriter.emit(left.made()), rewriter.emit(right.made()), *rest]
    return relax.Call(call.op, args, call.attrs)


def _halves(rewriter: Rewriter, expr: relax.Expr, axis: int, steps: int = 0) -> _Found | None:
    """Follow the features of a tensor to the rotation that put them in halves."""
    shape, value = shape_of(expr), rewriter.definition(expr)
    if not shape or not isinstance(value, relax.Call) or steps > _MOST_STEPS:
        return None
    if axis == len(shape) - 1 and isinstance(expr, relax.Var):
        turned = _rotation(rewriter, expr)
        if turned is not None:
            return _Found(0, int(shape[axis]), lambda: rotated(rewriter, turned))
    if is_call(value, "relax.concat"):
        return _of_parts(rewriter, value, axis, steps)
    source, before = _source(rewriter, value, axis)
    found = None if source is None else _halves(rewriter, source, before, steps + 1)
    if found is None:
        return None

    def again() -> relax.Expr:
        made = rewriter.emit(found.made())
        args = [made if arg.same_as(source) else arg for arg in value.args]
        return relax.Call(value.op, args, value.attrs)

    return replace(found, made=again)


def _of_parts(rewriter: Rewriter, call: relax.Call, axis: int, steps: int) -> _Found | None:
    """Follow the one part of a concatenation along the features that a rotation put in halves."""
    rank = len(shape_of(call) or ())
    if not isinstance(call.args[0], relax.Tuple) or int(call.attrs.axis or 0) % rank != axis:
        return None
    fields, start, found = list(call.args[0].fields), 0, list[tuple[int, _Found]]()
    for i, field in enumerate(fields):
        part, size = _halves(rewriter, field, axis, steps + 1), (shape_of(field) or [None])[axis]
        if part is not None:
            found.append((i, replace(part, start=start + part.start)))
        if not isinstance(size, tirx.IntImm):
            return None
        start += int(size)
    if len(found) != 1:
        return None
    ((at, part),) = found

    def again() -> relax.Expr:
        made = rewriter.emit(part.made())
        return relax.op.concat([made if i == at else f for i, f in enumerate(fields)], axis)

    return replace(part, made=again)


def _source(rewriter: Rewriter, value: relax.Call, axis: int) -> tuple[relax.Expr | None, int]:
    """Return what a movement, a cast or a product with a number is of, and the axis there."""
    shape, source = shape_of(value) or [], value.args[0]
    before = shape_of(source) or []
    if is_call(value, "relax.multiply", "relax.divide"):
        pairs = binary(rewriter, value, "relax.multiply") or ((value.args[0], value.args[1]),)
        for data, factor in pairs:
            own = shape_of(factor)
            is_number = own is not None and all(map(is_one, own))
            if is_number and same_shape(shape_of(data), shape):
                return data, axis
        return None, axis
    if is_call(value, *named("cast")):
        return source, axis
    if is_call(value, "relax.permute_dims"):
        return source, permutation(value, len(shape))[axis]
    if is_call(value, *VIEWS):
        kept = [product(shape[:axis]), shape[axis]]
        same = (i for i, n in enumerate(before) if same_shape([product(before[:i]), n], kept))
        at = next(same, None)
        return (None, axis) if at is None else (source, at)
    if is_call(value, "relax.broadcast_to"):
        at = axis - len(shape) + len(before)
        fits = at >= 0 and same_shape(before[at : at + 1], shape[axis : axis + 1])
        return (source, at) if fits else (None, axis)
    return None, axis


def _rotation(rewriter: Rewriter, end: relax.Var) -> Rotation | None:
    """Read a rotation of neighbours whose result has them as halves, as one that has neighbours."""

    def probe(value: relax.Expr) -> relax.Var:
        return rewriter.probe(rewriter.builder.normalize(value))

    found = rotation_at(rewriter, end)
    if found is not None and found.pairing == "halves":
        found = None if found.by_pair else _of_reordered(rewriter, found)
    elif found is None and (concat := rewriter.call(end, "relax.concat")) is not None:
        shape, fields = shape_of(end) or [], concat.args[0]
        last = int(concat.attrs.axis or 0) % len(shape) == len(shape) - 1
        if not last or not isinstance(fields, relax.Tuple) or len(fields.fields) != 2:
            return None
        low, high = fields.fields
        if rewriter.call(low, "relax.subtract") is None or not same_type(low, high):
            return None
        found = rotation_at(rewriter, probe(joined(probe, (low, high), "neighbours", shape)))
    else:
        return None
    if found is None or found.pairing != "neighbours":
        return None
    return found if dtype_of(found.source) == dtype_of(found.cos) == dtype_of(end) else None


def _of_reordered(rewriter: Rewriter, found: Rotation) -> Rotation | None:
    """Read a rotation of halves whose source has neighbours in that order."""
    whole = rewriter.call(found.source, "relax.reshape")
    turned = rewriter.call(whole.args[0], "relax.permute_dims") if whole is not None else None
    shape, inner = shape_of(found.source), shape_of(turned) if turned is not None else None
    if turned is None or not shape or not inner or len(inner) != len(shape) + 1:
        return None
    last, axes = len(shape) - 1, permutation(turned, len(inner))
    half = int(shape[last]) // 2 if isinstance(shape[last], tirx.IntImm) else 0
    if axes[last:] != [last + 1, last] or not same_shape(inner, [*shape[:-1], 2, half]):
        return None
    before = shape_of(turned.args[0]) or []
    pairs = rewriter.call(turned.args[0], "relax.reshape")
    source = turned.args[0] if pairs is None else pairs.args[0]
    merged = [*before[:last], shape[last]]
    if not same_shape(shape_of(source), merged):
        source = rewriter.emit(relax.op.reshape(source, merged))
    if axes[:last] != list(range(last)):
        source = rewriter.emit(relax.op.permute_dims(source, [*axes[:last], last]))
    cos, sin = (_neighbours(rewriter, angles) for angles in (found.cos, found.sin))
    if cos is None or sin is None:
        return None
    return replace(found, source=source, cos=cos, sin=sin, pairing="neighbours")


def _neighbours(rewriter: Rewriter, angles: relax.Expr) -> relax.Expr | None:
    """Return angles of halves in the order of neighbours."""
    shape = shape_of(angles)
    if not shape or not isinstance(shape[-1], tirx.IntImm) or int(shape[-1]) % 2:
        return None
    rank = len(shape)
    halves = rewriter.emit(relax.op.reshape(angles, [*shape[:-1], 2, int(shape[-1]) // 2]))
    turned = rewriter.emit(relax.op.permute_dims(halves, [*range(rank - 1), rank, rank - 1]))
    return rewriter.emit(relax.op.reshape(turned, shape))


def rotated(rewriter: Rewriter, found: Rotation) -> relax.Expr:
    """Write down a rotation."""
    x, shape, pairing = found.source, shape_of(found.source) or [], found.pairing
    low, high = _pairs(rewriter, x, pairing)

    def times(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return rewriter.emit(relax.op.multiply(a, b))

    if found.by_pair:
        first = relax.op.subtract(times(low, found.cos), times(high, found.sin))
        second = relax.op.add(times(high, found.cos), times(low, found.sin))
        return joined(rewriter.emit, (rewriter.emit(first), rewriter.emit(second)), pairing, shape)
    minus = rewriter.emit(relax.op.negative(high))
    turned = rewriter.emit(joined(rewriter.emit, (minus, low), pairing, shape))
    return relax.op.add(times(x, found.cos), times(turned, found.sin))


def _pairs(rewriter: Rewriter, x: relax.Expr, pairing: Pairing) -> tuple[relax.Expr, relax.Expr]:
    """Return the first and the second elements of the pairs of the last axis."""
    *lead, size = shape_of(x) or []
    half = int(size) // 2
    pairs = [2, half] if pairing == "halves" else [half, 2]
    cut = rewriter.emit(relax.op.reshape(x, [*lead, *pairs]))
    axis = len(lead) + (pairing == "neighbours")
    parts = (relax.op.strided_slice(cut, [axis], [i], [i + 1], assume_inbound=True) for i in (0, 1))
    first, second = (relax.op.reshape(rewriter.emit(part), [*lead, half]) for part in parts)
    return rewriter.emit(first), rewriter.emit(second)


def joined(
    bind: Callable[[relax.Expr], relax.Expr],
    parts: tuple[relax.Expr, relax.Expr],
    pairing: Pairing,
    shape: list[tirx.Expr],
) -> relax.Expr:
    """Put first and second elements together again."""
    last = len(shape) - 1
    if pairing == "halves":
        return relax.op.concat([*parts], last)
    apart = [bind(relax.op.expand_dims(part, [last + 1])) for part in parts]
    return relax.op.reshape(bind(relax.op.concat(apart, last + 1)), shape)
