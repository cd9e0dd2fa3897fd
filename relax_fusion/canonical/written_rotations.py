"""Rotations as operators, from what is known of them."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, tirx

from ..matching.rotation import Pairing, Rotation
from ..matching.shapes import shape_of
from .rewriter import Rewriter


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
