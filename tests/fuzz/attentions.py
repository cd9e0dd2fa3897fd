"""Attention as an operator and written out, with what front ends do to scores, at random."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
from tvm import relax, tirx
from tvm.relax import op

from relax_fusion.matching.shapes import dtype_of

from ..support import masks_at_random
from .feed_forward import bias, project
from .rotations import angles, turned
from .writer import LENGTHS, Dim, Writer

QKV = tuple[relax.Var, relax.Var, relax.Var]


def attention(w: Writer, x: relax.Var) -> relax.Var:
    """Project to q, k, v, attend, and project back; `x` is ``[b, s, width]``."""
    if len(w.shape(x)) != 3:
        return project(w, x, w.shape(x)[-1])
    heads, dim = w.pick((1, 4), (1, 8), (2, 4), (2, 6), (3, 4), (4, 8))
    groups = w.pick(*[g for g in (1, 1, 2, 3, 4) if heads % g == 0])
    b, s, width = w.shape(x)
    counts = (heads, heads // groups, heads // groups)
    if w.chance(40):
        whole = bias(w, project(w, x, sum(counts) * dim))
        ends = [counts[0] * dim, (counts[0] + counts[1]) * dim]
        parts = w.emit(op.split(whole, ends, -1))
        qkv = [w.emit(relax.TupleGetItem(parts, i)) for i in range(3)]
    else:
        qkv = [bias(w, project(w, x, n * dim), 25) for n in counts]
    q, k, v = (w(op.reshape, t, [b, s, n, dim]) for t, n in zip(qkv, counts, strict=True))
    if w.chance(20) and dtype_of(q) == dtype_of(k):
        table = angles(w, [b, s, 1, dim], 2, dtype_of(q))
        q, k = turned(w, q, table), turned(w, k, table)
    y = attend(w, cached(w, (q, k, v)), groups)
    y = w(op.reshape, y, [b, s, heads * dim])
    return bias(w, project(w, y, width), 30) if w.chance(60) else y


def bare(w: Writer) -> relax.Var:
    """Attend over parameters, in any of the layouts."""
    heads, dim = w.pick((1, 4), (2, 4), (2, 5), (3, 4), (4, 8))
    groups = w.pick(*[g for g in (1, 1, 2, 4) if heads % g == 0])
    b, s = (w.symbol(n) if w.chance(30) else w.pick(*LENGTHS) for n in ("b", "s"))
    t = w.pick(s, s, w.symbol("t"), w.pick(*LENGTHS))
    if w.chance(25):
        return attend(w, merged(w, (b, s), heads, groups, dim), groups)
    q = w.param((b, s, heads, dim))
    k, v = (w.param((b, t, heads // groups, d)) for d in (dim, w.pick(dim, dim, 3)))
    return attend(w, cached(w, (q, k, v)), groups)


def merged(w: Writer, rows: tuple[Dim, Dim], heads: int, groups: int, dim: int) -> QKV:
    """Cut q, k and v out of one tensor: after one another, in turns, or group by group."""
    own = heads // groups
    by_group = w.chance(40)
    outer, counts = ([own], (groups, 1, 1)) if by_group else ([], (heads, own, own))
    skipped = w.pick(0, 0, 0, 1, dim // 2)
    ends = [skipped + sum(counts[: i + 1]) * dim for i in range(3)]
    x = w.param((*rows, *outer, ends[-1]))
    axis = 2 + len(outer)
    if not skipped and w.chance(50):
        split = w.emit(op.split(x, ends[:2], axis))
        parts = [w.emit(relax.TupleGetItem(split, i)) for i in range(3)]
    else:
        ranges = zip((skipped, *ends), ends, strict=False)
        parts = [w(op.strided_slice, x, [axis], [begin], [end]) for begin, end in ranges]
    q, k, v = (
        w(op.reshape, part, [*rows, n, dim])
        for part, n in zip(parts, (heads, own, own), strict=True)
    )
    return q, k, v


def cached(w: Writer, qkv: QKV) -> QKV:
    """Take the first positions of caches in place of keys and values, or leave them."""
    if not w.chance(25):
        return qkv
    q, k, v = qkv
    b, _, heads, dim = w.shape(k)
    length, capacity = w.symbol("m"), w.pick(16, w.symbol("c"))
    w.params.append(relax.Var(f"p{len(w.params)}", relax.ShapeType([length])))
    if w.chance(30):
        return q, *(w.param((b, length, heads, d)) for d in (dim, w.shape(v)[-1]))
    begin = 0 if w.chance(92) else 1
    caches = [
        w.param((b, capacity, heads, d), dtype_of(x)) for d, x in ((dim, k), (w.shape(v)[-1], v))
    ]
    k, v = (
        w(op.strided_slice, c, [1], [begin], [length + begin], assume_inbound=True) for c in caches
    )
    return q, k, v


def attend(w: Writer, qkv: QKV, groups: int) -> relax.Var:
    """Attend from q over k and v, all ``[b, s, heads, dim]``, as operator or written out."""
    q, k, v = qkv
    if len({dtype_of(t) for t in qkv}) > 1:
        k, v = (w(op.astype, t, dtype_of(q)) if dtype_of(t) != dtype_of(q) else t for t in (k, v))
    if groups > 1:
        k, v = _repeated(w, k, groups), _repeated(w, v, groups)
    return _operator(w, (q, k, v)) if w.chance(35) else _written(w, (q, k, v))


def _repeated(w: Writer, x: relax.Var, times: int) -> relax.Var:
    """Repeat each head for several heads of queries."""
    if w.chance(50):
        return w(op.repeat, x, times, 2)
    b, s, n, h = w.shape(x)
    wide = w(op.broadcast_to, w(op.expand_dims, x, [3]), [b, s, n, times, h])
    if w.chance(5):
        wide = w(op.permute_dims, wide, [0, 1, 3, 2, 4])
    return w(op.reshape, wide, [b, s, n * times, h])


def _operator(w: Writer, qkv: QKV) -> relax.Var:
    (b, s, n, dim), t = w.shape(qkv[0]), w.shape(qkv[1])[1]
    number = w.pick(None, dim**-0.5 if isinstance(dim, int) else None, 0.5)
    scale = None if number is None else tirx.FloatImm("float32", number)
    if w.chance(40):
        shape = [w.pick(b, 1), w.pick(n, 1), w.pick(s, 1), t]
        extra = w.param(shape)
        if w.chance(30) and t == s:
            return w(op.nn.attention, *qkv, extra, scale, w.pick("TopLeft", "BottomRight"))
        return w(op.nn.attention, *qkv, extra, scale)
    causal = w.pick(None, "TopLeft", "BottomRight")
    window = w.pick(1, 3, 8) if causal and w.chance(15) else None
    return w(op.nn.attention, *qkv, None, scale, causal, window)


def _written(w: Writer, qkv: QKV) -> relax.Var:
    """Write the attention out in heads-first layout."""
    q, k, v = qkv
    dim = w.shape(q)[-1]
    q, v = (w(op.permute_dims, x, [0, 2, 1, 3]) for x in (q, v))
    if w.chance(50):
        k = w(op.permute_dims, k, [0, 2, 3, 1])
    else:
        k = w(op.permute_dims, w(op.permute_dims, k, [0, 2, 1, 3]), [0, 1, 3, 2])
    at, number = w.pick("scores", "scores", "query", "key", "none", "both"), dim**-0.5
    # Of 4 features, the root is the number of a gelu, which is read as more than its dtype holds
    root = math.sqrt(number) if dim != 4 else number**0.25
    q = w.times(q, root) if at == "both" else q
    q = w.times(q, number) if at == "query" else q
    k = w.times(k, number / root if at == "both" else number) if at in ("key", "both") else k
    flat = w.chance(15)
    b, n, s, _ = w.shape(q)
    t = w.shape(v)[2]
    if flat:
        q, k, v = (w(op.reshape, x, [b * n, *w.shape(x)[2:]]) for x in (q, k, v))
    scores = w(op.matmul, q, k, "float32" if w.chance(8) else None)
    if flat:
        scores = w(op.reshape, scores, [b, n, s, t])
    wide = dtype_of(scores) != "float32" and w.chance(50)
    early = wide and w.chance(50)
    scores = w(op.astype, scores, "float32") if early else scores
    scores = w.times(scores, number) if at == "scores" else scores
    scores = modified(w, scores)
    scores = w(op.astype, scores, "float32") if wide and not early else scores
    weights = normalised(w, scores, w.pick(-1, 3) if w.chance(96) else -2)
    if dtype_of(weights) != dtype_of(v):
        weights = w(op.astype, weights, dtype_of(v))
    if flat:
        weights = w(op.reshape, weights, [b * n, s, t])
    mixed = w(op.matmul, weights, v)
    mixed = w(op.reshape, mixed, [b, n, s, w.shape(v)[-1]]) if flat else mixed
    return w(op.permute_dims, mixed, [0, 2, 1, 3])


# --- scores ----------------------------------------------------------------------------------


def modified(w: Writer, scores: relax.Var) -> relax.Var:
    """Cap, bias and mask scores ``[b, n, s, t]``, each or not, in any order."""
    steps = ["capped"] * w.chance(15)
    for _ in range(w.pick(0, 1, 1, 1, 2, 2, 3)):
        steps.append(w.pick(*_STEPS, "band", "band", "padding"))
    if w.chance(10):
        w.rng.shuffle(steps)
    for step in steps:
        scores = _capped(w, scores) if step == "capped" else _STEPS[step](w, scores)
    return scores


def normalised(w: Writer, scores: relax.Var, axis: int) -> relax.Var:
    """Normalise over the keys, sometimes with one more score for each head."""
    if axis == -2 or not w.chance(10):
        return w(op.nn.softmax, scores, axis)
    b, n, s, t = w.shape(scores)
    sinks = w(op.reshape, w.param((n,), dtype_of(scores)), [1, n, 1, 1])
    column = w(op.broadcast_to, sinks, [b, n, s, 1])
    joined = w(op.concat, [scores, column], w.pick(-1, 3))
    return w(op.strided_slice, w(op.nn.softmax, joined, -1), [3], [0], [t])


def _capped(w: Writer, scores: relax.Var) -> relax.Var:
    cap = w.pick(2.0, 5.0)
    inside = w.times(scores, 1.0 / cap)
    return w.times(w(op.tanh, inside), cap if w.chance(95) else 1.5)


def _partial(w: Writer, scores: relax.Var) -> list[Dim]:
    b, n, s, t = w.shape(scores)
    return [w.pick(b, 1), w.pick(n, 1, 1), w.pick(s, 1), t]


def _added(w: Writer, scores: relax.Var) -> relax.Var:
    return w.either(op.add, scores, w.param(_partial(w, scores), dtype_of(scores)))


def _least(w: Writer, scores: relax.Var) -> relax.Var:
    return w.either(op.minimum, scores, w.param(_partial(w, scores), dtype_of(scores)))


def _alibi(w: Writer, scores: relax.Var) -> relax.Var:
    """Add slopes times the distances of keys and queries."""
    _, n, s, t = w.shape(scores)
    dtype = dtype_of(scores)
    first = w.pick(0, t - s)
    rows = w(op.expand_dims, w(op.arange, first, first + s, 1, "int64"), [1])
    columns = w(op.expand_dims, w(op.arange, 0, t, 1, "int64"), [0])
    distance = w(op.astype, w(op.subtract, columns, rows), dtype)
    slopes = w(op.reshape, w.param((n,), dtype), [n, 1, 1])
    return w.either(op.add, scores, w.either(op.multiply, slopes, distance))


def _masked_by_data(w: Writer, scores: relax.Var) -> relax.Var:
    return _where(w, scores, w.param(_partial(w, scores), "bool"))


def _masked_by_position(w: Writer, scores: relax.Var) -> relax.Var:
    return _where(w, scores, _draft(w, scores, 0))


def _masked_at_random(w: Writer, scores: relax.Var) -> relax.Var:
    """Mask by whatever operators make of positions and constants."""
    return _where(w, scores, _draft(w, scores, w.pick(3, 6, 12)))


def _draft(w: Writer, scores: relax.Var, steps: int) -> relax.Var:
    """Return a condition ``[s, t]`` of positions, written by `masks_at_random`."""
    s, t = w.shape(scores)[-2:]
    draft = masks_at_random.Draft(w.rng, s, t, (), masks_at_random.NUMBERS)
    draft.builder = w.normalizer
    if steps:
        draft.block(steps)
    band = draft.emit(draft.band())
    conditions = [v for v in draft.pool if dtype_of(v) == "bool"]
    if steps and w.chance(60):
        join = w.pick(op.logical_and, op.logical_or, op.bitwise_and, op.bitwise_xor)
        band = draft.emit(join(band, w.rng.choice(conditions)))
    if w.chance(30):
        band = draft.emit(op.logical_not(band))
    for binding in draft.bindings:
        w.bindings.append((binding.var, binding.value, False))
    return band


def _where(w: Writer, scores: relax.Var, seen: relax.Expr) -> relax.Var:
    """Keep the scores that are seen, in one of the ways of front ends."""
    dtype = dtype_of(scores)
    far = w.pick(-math.inf, *_low(dtype))
    hidden, how = w.scalar(far, scores), w.pick("where", "where", "where not", "add", "add", "full")
    if how == "where":
        return w(op.where, seen, scores, hidden)
    if how == "where not":
        return w(op.where, w(op.logical_not, seen), hidden, scores)
    if how == "full":
        shape = relax.ShapeExpr(w.shape(seen))
        wide = w(op.full, shape, relax.const(far, dtype), dtype)
        return w.either(op.add, scores, w(op.where, seen, w(op.zeros, shape, dtype), wide))
    if math.isinf(far) or w.chance(60):
        mask = w(op.where, seen, w.scalar(0.0, scores), hidden)
    else:
        one = w(op.astype, seen, dtype)
        mask = w(op.multiply, w(op.subtract, w.scalar(1.0, scores), one), hidden)
    return w.either(op.add, scores, mask)


def _low(dtype: str) -> tuple[float, ...]:
    """Return numbers that front ends write for masks and clamps."""
    least = float(ml_dtypes.finfo(dtype).min)
    return least, least, -6e4 if dtype == "float16" else -1e9, -1e4, -100.0


def _padded(w: Writer, scores: relax.Var) -> relax.Var:
    """Add a number where a key is padding, which is known at run time only."""
    b, _, _, t = w.shape(scores)
    dtype, hidden = dtype_of(scores), w.scalar(w.pick(*_low(dtype_of(scores))), scores)
    seen = w.param((b, t), "bool")
    if w.chance(50):
        seen = w(op.astype, seen, "int64")
    hides = w(op.subtract, w.scalar(1.0, scores), w(op.astype, seen, dtype))
    mask = w(op.expand_dims, w(op.multiply, hides, hidden), [1, 2])
    return w.either(op.add, scores, mask)


def _clamped(w: Writer, scores: relax.Var) -> relax.Var:
    """Hold scores between numbers, some of which none of them reaches."""
    low, high = w.pick(*_low(dtype_of(scores))), -w.pick(*_low(dtype_of(scores)))
    how = w.pick("maximum", "maximum", "minimum", "clip")
    if how == "clip":
        return w(op.clip, scores, low, high)
    number = w.scalar(low if how == "maximum" else high, scores)
    return w.either(op.maximum if how == "maximum" else op.minimum, scores, number)


_STEPS: dict[str, Any] = {
    "add": _added,
    "min": _least,
    "alibi": _alibi,
    "data": _masked_by_data,
    "band": _masked_by_position,
    "random": _masked_at_random,
    "padding": _padded,
    "clamp": _clamped,
}
