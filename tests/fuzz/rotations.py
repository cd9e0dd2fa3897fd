"""Rotary embeddings of the heads of a projection, behind movements, at random."""

from __future__ import annotations

from tvm import ir, relax
from tvm.relax import op

from relax_fusion.matching.shapes import dtype_of

from .feed_forward import END, bias, project
from .writer import Dim, IllTyped, Writer

Angles = tuple[relax.Expr, relax.Expr]


def turned(w: Writer, x: relax.Var, angles: Angles) -> relax.Var:
    """Rotate the last axis, as Hugging Face writes it: ``x * cos + rotate_half(x) * sin``.

    Its halves, or neighbours; sometimes its first features alone, put together with the others.
    """
    axis, half = len(w.shape(x)) - 1, w.shape(x)[-1] // 2
    if isinstance(half, ir.Expr):
        return x  # a size that a match_cast bound
    if half > 1 and w.chance(25):
        first = w(op.strided_slice, x, [axis], [0], [2])
        cut = [w(op.strided_slice, a, [axis], [0], [2]) for a in angles]
        rest = w(op.strided_slice, x, [axis], [2], [w.pick(END, 2 * half)])
        return w(op.concat, [turned(w, first, (cut[0], cut[1])), rest], w.pick(-1, axis))
    if w.chance(25):
        low, high = (w(op.strided_slice, x, [axis], [i], [END], [2]) for i in range(2))
        parts = [w(op.expand_dims, part, [axis + 1]) for part in (w(op.negative, high), low)]
        pairs = w(op.concat, parts if w.chance(96) else parts[::-1], -1)
        return _sum(w, x, w(op.reshape, pairs, w.shape(x)), angles)
    middle = half if w.chance(97) else 1
    if w.chance(25):
        parts = w.emit(op.split(x, w.pick(2, [half]), w.pick(-1, axis)))
        low, high = (w.emit(relax.TupleGetItem(parts, i)) for i in range(2))
    else:
        low = w(op.strided_slice, x, [axis], [0], [middle])
        high = w(op.strided_slice, x, [axis], [middle], [w.pick(END, 2 * half)])
    parts = [w(op.negative, high), low] if w.chance(96) else [low, w(op.negative, high)]
    return _sum(w, x, w(op.concat, parts, w.pick(-1, axis)), angles)


def _sum(w: Writer, x: relax.Var, rotated: relax.Var, angles: Angles) -> relax.Var:
    cos, sin = angles if w.chance(96) else angles[::-1]
    first = w.either(op.multiply, x, cos)
    return w.either(op.add, first, w.either(op.multiply, rotated, sin))


def angles(w: Writer, shape: list[Dim], heads: int, dtype: str) -> Angles:
    """Return cosines and sines that broadcast to `shape`, rarely ones that differ by head."""
    kept = [w.chance(6 if axis == heads else 75) for axis in range(len(shape) - 1)]
    dims = [d if keep else 1 for d, keep in zip(shape, kept, strict=False)] + shape[-1:]
    if w.chance(40):
        first = next((n for n, d in enumerate(dims) if not isinstance(d, int) or d != 1), -1)
        dims = dims[first:]
    if w.chance(30) and heads == len(shape) - 2:
        flat = [d for n, d in enumerate(shape) if n != heads][-2:]
        made = [w(op.expand_dims, w.param(flat, dtype), [1]) for _ in range(2)]
        return made[0], made[1]
    return w.param(dims, dtype), w.param(dims, dtype)


def rotated_heads(w: Writer, x: relax.Var) -> relax.Var:
    """Project to heads, rotate some of them, and return them or what is made of them."""
    head = w.pick(2, 4, 6, 8)
    parts = [w.pick(1, 2, 3) for _ in range(w.pick(1, 1, 2, 3))]
    y = bias(w, project(w, x, sum(parts) * head), 30)
    items = [y]
    if len(parts) > 1:
        ends = [sum(parts[: i + 1]) * head for i in range(len(parts) - 1)]
        pieces = w.emit(op.split(y, ends, -1))
        items = [w.emit(relax.TupleGetItem(pieces, i)) for i in range(len(parts))]
    shared: dict[str, Angles] = {}
    for item, heads in zip(items, parts, strict=True):
        _part(w, item, (heads, head), shared)
    return w.results.pop()


def _part(w: Writer, x: relax.Var, size: tuple[int, int], shared: dict[str, Angles]) -> None:
    shape = [*w.shape(x)[:-1], *size]
    moved, at = w(op.reshape, x, shape), len(shape) - 2
    if len(shape) == 4 and w.chance(50):
        axes = w.pick([0, 2, 1, 3], [0, 2, 1, 3], [2, 0, 1, 3], [1, 0, 2, 3])
        moved, at = w(op.permute_dims, moved, axes), axes.index(at)
    if not w.chance(75):
        w.results.append(moved)
        return
    shape = w.shape(moved)
    key = str(shape[-2:] if at != len(shape) - 2 else shape[:-2]) + str(at)
    wide = dtype_of(x) != "float32" and w.chance(25)
    moved = w(op.astype, moved, "float32") if wide else moved
    if key not in shared or w.chance(10):
        shared[key] = angles(w, shape, at, dtype_of(moved))
    if dtype_of(shared[key][0]) != dtype_of(moved):
        shared[key] = angles(w, shape, at, dtype_of(moved))
    try:
        made = turned(w, moved, shared[key])
    except IllTyped:  # angles of another part, which do not broadcast to this one
        made = turned(w, moved, angles(w, shape, at, dtype_of(moved)))
    made = w(op.astype, made, dtype_of(x)) if wide else made
    w.results.append(made)
    if w.chance(8):
        w.results.append(moved)
