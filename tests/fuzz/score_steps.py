"""What attentions that are written out do to their scores, in the spellings of front ends."""

from __future__ import annotations

import math

from .draft import Draft
from .graph import const


def modified(d: Draft, scores: int) -> int:
    """Cap, bias and mask scores ``[b, n, s, t]``, each or not; every row keeps a key."""
    if d.chance(20):
        cap = d.pick(2.0, 5.0)
        inside = d.either("multiply", scores, d.scalar(1.0 / cap, scores))
        scores = d.either("multiply", d.unary("tanh", inside), d.scalar(cap, scores))
    step = d.pick("none", "none", "add", "add", "min", "alibi", "seen", "band", "band and seen")
    if step in ("add", "min"):
        mask = _mask(d, scores, d.pick("data", "hidden", "infinite"), d.nodes[scores].dtype)
        return d.either("add" if step == "add" else "minimum", scores, mask)
    if step == "alibi":
        return d.either("add", scores, _alibi(d, scores))
    for part in ("band", "seen"):
        if part in step:
            window = step == "band" and d.chance(40)
            seen = _mask(d, scores, "seen", "bool") if part == "seen" else _band(d, scores, window)
            scores = _where(d, scores, seen)
    return scores


def softmax(d: Draft, scores: int, axis: int) -> int:
    """Normalise over the keys, sometimes with one more score for each head."""
    if axis != -1 or not d.chance(15):
        return d.reduce("softmax", scores, axis)
    b, n, s, t = d.shape(scores)
    dtype = d.nodes[scores].dtype
    sinks = d.reshape(d.param((n,), "data", dtype), (const(1), n, const(1), const(1)))
    column = d.add_node("broadcast_to", (sinks,), (b, n, s, const(1)))
    # One key more than t: a size that is no product, and is not asked for
    joined = d.add_node("concat", (scores, column), (b, n, s, t), axis=-1)
    return d.slice(d.reduce("softmax", joined, -1), 3, 0, t)


def _mask(d: Draft, scores: int, kind: str, dtype: str) -> int:
    """Take a mask that broadcasts along some axes as a parameter."""
    one = const(1)
    b, n, s, t = d.shape(scores)
    return d.param((d.pick(b, one), d.pick(n, one), d.pick(s, one), t), kind, dtype)


def _band(d: Draft, scores: int, window: bool) -> int:
    """Compare positions; top left or bottom right, with a window or without."""
    s, t = d.shape(scores)[-2:]
    attrs = {"corner": d.pick("top", "bottom"), "window": d.pick(1, 3, 8) if window else None}
    return d.add_node("band", (), (s, t), "bool", **attrs)


def _where(d: Draft, scores: int, seen: int) -> int:
    """Keep the scores that are seen, and put something far below zero in the place of others."""
    wide = d.nodes[scores].dtype != "float16"
    far = d.scalar(d.pick(-math.inf, -1e9 if wide else -6e4), scores)
    shape = d.shape(scores)
    return d.add_node("where", (seen, scores, far), shape, d.nodes[scores].dtype)


def _alibi(d: Draft, scores: int) -> int:
    """Return slopes times the distances of keys and queries."""
    _, n, s, t = d.shape(scores)
    dtype = d.nodes[scores].dtype
    distance = d.add_node("distance", (), (s, t), dtype, corner=d.pick("top", "bottom"))
    slopes = d.reshape(d.param((n,), "data", dtype), (n, const(1), const(1)))
    return d.either("multiply", slopes, distance)
