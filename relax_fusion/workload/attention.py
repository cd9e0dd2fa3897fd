"""Attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .base import Atom, Described, repr_without
from .builder import GraphBuilder, Handle, Place
from .dims import Dim, DynamicDim, extent, renamed
from .dtypes import DTYPE_BYTES
from .graph import Band, Graph
from .norm_matmul import NormMatmul, Projection, WeightLayout
from .values import At, Axis, AxisValue, Const, Expr, Read, Size, apply, at


@dataclass(frozen=True)
class Heads:
    """Which heads of a tensor are read: head h is ``start + step * h`` of `total`."""

    total: int
    start: int = 0
    step: int = 1

    def at(self, head: Axis | At) -> At:
        """Return the coordinate of a head in the tensor."""
        place = at(head)
        terms = tuple((axis, stride * self.step) for axis, stride in place.terms)
        return At(terms, self.start + place.start * self.step)

    def wrong(self, count: int) -> Iterator[str]:
        """Yield why these cannot be `count` heads."""
        for name, least in (("total", 1), ("start", 0), ("step", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                yield f"{name} is {value!r}, must be an integer from {least} on"
                return
        last = self.start + self.step * (count - 1)
        if last >= self.total:
            yield f"head {last} is read, there are {self.total}"


@dataclass(frozen=True)
class Lengths:
    """How many keys there are, where a tensor tells it: ``lengths[b] + more`` of batch entry b."""

    dtype: str  # of the tensor: int32 or int64
    by_batch: bool  # whether each batch entry has a number of its own; else one is for all
    more: int = 0  # what is added to it


Causal = Literal["none", "top_left", "bottom_right"]
HeadLayout = Literal["bsnh", "bnsh"]
BiasOp = Literal["add", "min"]
MaskDims = tuple[bool, bool, bool, bool]

CAPACITY = DynamicDim("kv_capacity")
"""Positions of preallocated key and value buffers."""


@dataclass(frozen=True)
class Attention(Described):
    """``softmax(bias(softcap(scale * q @ k^T)), masked) @ v`` per head.

    A query whose keys are all hidden gives zeros.  Position i of the queries stands at key
    ``p = i``, bottom-right aligned at ``p = i + kv_len - q_len``; `lengths` take the place of
    `kv_len` in that.

    Parameters
    ----------
    batch, q_len, kv_len : Dim
        Sizes that may be dynamic.
    q_heads, kv_heads : int
        Query heads, and key/value heads, which divide them (grouped-query attention).
    head_dim, v_dim : int
        Features of a query or key, and of a value.
    scale : float
        Multiplies the scores first of all.
    causal : {"none", "top_left", "bottom_right"}
        Query i sees keys ``<= i`` (top left) or ``<= i + kv_len - q_len`` (bottom right).
    bias_dims : tuple of bool, optional
        For a bias of four dimensions ``[batch, heads, q_len, kv_len]``: which of them have their
        full size (the others are 1 and broadcast).  None: no bias.
    q_layout, kv_layout, out_layout : {"bsnh", "bnsh"}
        Order of batch (b), sequence (s), heads (n) and features (h).
    kv_prefix : bool
        Whether k and v are handed over as larger buffers of which the first `kv_len` positions
        are read (a preallocated cache).
    dtype, out_dtype : str
        Of q, k, v and of the result.  Scores and sums are kept in float32.
    bias_dtype : str
        Of the bias.
    bias_op : {"add", "min"}
        Whether the bias is added to a score, or is the most that it can be.
    mask_dims : tuple of bool, optional
        As `bias_dims`, for a boolean mask that is true where a query sees a key.
    window : int, optional
        A query sees keys ``> p - window`` only; with a causal mask, that many at most.
    softcap : float, optional
        Scaled scores s become ``softcap * tanh(s / softcap)`` before the bias.
    alibi : str, optional
        Dtype of slopes ``[q_heads]``: ``slope[head] * (key - p)`` is added to the scores, after
        the bias (Press et al., 2022, https://arxiv.org/abs/2108.12409).  None: no slopes.
    sinks : str, optional
        Dtype of sinks ``[q_heads]``: each softmax has a further score, whose value is zero
        (attention sinks, as in gpt-oss); it is neither scaled nor masked.  None: no sinks.
    lengths : Lengths, optional
        Only the first keys are there, as many as a tensor says (none if that is negative, `kv_len`
        if it is more).  Kernels read no others.  None: all `kv_len` of them.
    q_in, k_in, v_in : Heads, optional
        Where the heads of q, k and v are in a tensor ``[b, s, n, h]`` that has others, too, as a
        merged projection.  None: the tensor has no others.
    shared : int
        The last features of a key, which all heads share: they are an operand ``[b, s, shared]``,
        and k has those in front of them (latent attention).
    """

    batch: Dim
    q_len: Dim
    kv_len: Dim
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    scale: float
    causal: Causal
    bias_dims: MaskDims | None
    dtype: str
    out_dtype: str
    q_layout: HeadLayout = "bsnh"
    kv_layout: HeadLayout = "bsnh"
    out_layout: HeadLayout = "bsnh"
    kv_prefix: bool = False
    bias_dtype: str = "float32"
    bias_op: BiasOp = "add"
    mask_dims: MaskDims | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: str | None = None
    sinks: str | None = None
    lengths: Lengths | None = None
    q_in: Heads | None = None
    k_in: Heads | None = None
    v_in: Heads | None = None
    shared: int = 0

    def __repr__(self) -> str:
        """Return the fields, of which the last is left out if unused: keys are made of it."""
        return repr_without(self, "shared")

    __hash__ = Described.__hash__

    def apart(self, **sizes: int) -> list[Atom]:
        """Return scores, softmax and values, and copies of repeated, cached or joined keys.

        Scores are written and read again twice, unmasked.  A transposition that a layout asks for
        is left out: it may be fused into a neighbour.
        """
        batch, rows = extent(self.batch, sizes["batch"]), extent(self.q_len, sizes["q_len"])
        keys, b = extent(self.kv_len, sizes["kv_len"]), DTYPE_BYTES[self.dtype]
        moved, group = self.bytes(**sizes), self.q_heads // self.kv_heads
        count, scores = batch * self.q_heads, batch * self.q_heads * rows * keys
        each = [batch * self.kv_heads * keys * n * b for n in (self.head_dim, self.v_dim)]
        copied = [Atom((1 + group) * own) for own in each if group > 1 or self.kv_prefix]
        copied += [Atom(each[0] + moved["k"] + moved["shared"])] if self.shared else []
        maker: Literal["rule", "tvm"] = "rule" if isinstance(self.kv_len, int) else "tvm"

        def product(k: int, n: int, layout: WeightLayout, beside: int = 0) -> Atom:
            q_rows = DynamicDim("rows")
            work = NormMatmul(q_rows, k, (Projection(n, layout),), None, self.dtype, self.dtype)
            return Atom(beside, work, rows, count, maker)

        masks = moved.get("bias", 0) + moved.get("mask", 0)
        return [
            *copied,
            product(self.head_dim, keys, "nk", masks),
            Atom(2 * scores * b, rows=count * rows, scores=scores),
            product(keys, self.v_dim, "kn"),
        ]

    def heads_in(self, name: str) -> Heads:
        """Return which heads of its tensor q, k or v are."""
        parts = {"q": self.q_in, "k": self.k_in, "v": self.v_in}
        return parts[name] or Heads(self.q_heads if name == "q" else self.kv_heads)

    def _graph(self) -> Graph:
        return _Writer(self).graph()

    @property
    def ranged(self) -> dict[str, Dim]:
        """Query positions as rows, key positions and the batch, as they are called in the graph."""
        writer = _Writer(self)
        return {"rows": writer.i.size, "keys": writer.t.size, "batch": writer.b.size}


class _Writer:
    """The axes of an attention, and what is written down with them.

    Query head ``n * group + e`` reads key head n.
    """

    def __init__(self, work: Attention):
        self.work = work
        self.g = GraphBuilder()
        group = work.q_heads // work.kv_heads
        known: dict[Dim, Dim] = {}
        for name, dim in (("batch", work.batch), ("q_len", work.q_len), ("kv_len", work.kv_len)):
            known.setdefault(dim, renamed(dim, name))  # what is one size has one name
        self.b = Axis("b", known[work.batch])
        self.n, self.e = Axis("n", work.kv_heads), Axis("e", group)
        self.i, self.t = Axis("i", known[work.q_len]), Axis("t", known[work.kv_len])
        self.d, self.c = Axis("d", work.head_dim - work.shared), Axis("c", work.v_dim)
        self.head = self.n * group + self.e
        self.length: Expr | None = None
        self.row = (self.b, self.n, self.e, self.i)

    def graph(self) -> Graph:
        """Write down operands, scores, softmax and result."""
        work, g = self.work, self.g
        keys = CAPACITY if work.kv_prefix else self.t.size
        of = {name: work.heads_in(name) for name in ("q", "k", "v")}
        q = self._input("q", work.q_layout, (self.i.size, of["q"].total, work.head_dim))
        k = self._input("k", work.kv_layout, (keys, of["k"].total, self.d.size))
        v = self._input("v", work.kv_layout, (keys, of["v"].total, work.v_dim))
        if work.shared:
            g.input("shared", (self.b.size, keys, work.shared), work.dtype)
        bias = self._by_score("bias", work.bias_dims, work.bias_dtype)
        mask = self._by_score("mask", work.mask_dims, "bool")
        slopes = g.input("slopes", (work.q_heads,), work.alibi) if work.alibi else None
        sinks = g.input("sinks", (work.q_heads,), work.sinks) if work.sinks else None
        self.length = self._length()
        there = self._there(mask)
        if work.kv_prefix:
            g.scalar("kv_len", self.t.size)
        query = self._at(q, work.q_layout, self.i, of["q"].at(self.head), self.d)
        key = self._at(k, work.kv_layout, self.t, of["k"].at(self.n), self.d)
        value = self._at(v, work.kv_layout, self.t, of["v"].at(self.n), self.c)
        score = self._score(self._dot(q, query * key), bias, slopes)
        seen: dict[str, Any] = {"band": self._band(), "where": there}
        sink = None if sinks is None else sinks[self.head]
        at_row = (*self.row, self.t)
        s = g.map("score", at_row, score, "float32")[at_row]
        largest = g.max("row_max", self.row, (self.t,), s, start=sink, **seen)[self.row]
        top = apply("finite", largest)
        weight = g.map("weight", at_row, apply("exp", s - top), "float32")[at_row]
        first = None if sink is None else apply("exp", sink - top)
        total = g.sum("row_sum", self.row, (self.t,), weight, start=first, **seen)
        at_out = (*self.row, self.c)
        acc = g.sum("acc", at_out, (self.t,), weight * value, **seen)[at_out]
        shape = self._shape(work.out_layout, (self.i.size, work.q_heads, work.v_dim))
        out = g.tensor("out", shape, work.out_dtype)
        place = self._at(out, work.out_layout, self.i, self.head, self.c)
        g.part(place, at_out, apply("ratio", acc, total[self.row]))
        g.output(out)
        return g.graph()

    def _shape(self, layout: HeadLayout, sizes: tuple[Dim, Dim, Dim]) -> list[Dim]:
        by_letter = dict(zip("bsnh", (self.b.size, *sizes), strict=True))
        return [by_letter[letter] for letter in layout]

    def _input(self, name: str, layout: HeadLayout, sizes: tuple[Dim, Dim, Dim]) -> Handle:
        return self.g.input(name, self._shape(layout, sizes), self.work.dtype)

    def _dot(self, q: Handle, product: Expr) -> Expr:
        """Return the products of features of a head's own, and of those that heads share."""
        work, at_row = self.work, (*self.row, self.t)
        dot: Expr = self.g.sum("dot", at_row, (self.d,), product)[at_row]
        if not work.shared:
            return dot
        r, head = Axis("r", work.shared), work.heads_in("q").at(self.head)
        query = self._at(q, work.q_layout, self.i, head, r + (work.head_dim - work.shared))
        key = Handle("shared")[(self.b, self.t, r)]
        return dot + self.g.sum("dot_shared", at_row, (r,), query * key)[at_row]

    def _at(self, tensor: Handle, layout: HeadLayout, s: Axis, n: At, h: Place) -> Read:
        by_letter: dict[str, Place] = {"b": self.b, "s": s, "n": n, "h": h}
        return tensor[tuple(by_letter[letter] for letter in layout)]

    def _by_score(self, name: str, dims: MaskDims | None, dtype: str) -> Read | None:
        """Add an operand with an element for each score; return it, 0 where it broadcasts."""
        if dims is None:
            return None
        full = (self.b.size, self.work.q_heads, self.i.size, self.t.size)
        shape = [size if has else 1 for size, has in zip(full, dims, strict=True)]
        places: tuple[Place, ...] = (self.b, self.head, self.i, self.t)
        tensor = self.g.input(name, shape, dtype)
        return tensor[tuple(p if has else 0 for p, has in zip(places, dims, strict=True))]

    def _length(self) -> Expr | None:
        """Add the tensor that tells how many keys there are; return an element of it."""
        lengths = self.work.lengths
        if lengths is None:
            return None
        tensor = self.g.input("lengths", (self.b.size if lengths.by_batch else 1,), lengths.dtype)
        length: Expr = tensor[(self.b if lengths.by_batch else 0,)]
        return length + float(lengths.more) if lengths.more else length

    def _there(self, mask: Read | None) -> Expr | None:
        """Return what is not 0 of keys that are there and seen, None of all of them."""
        if self.length is None or self.work.causal == "bottom_right":
            return mask
        there = apply("maximum", self.length - AxisValue("t"), Const(0.0))
        return there if mask is None else there * mask

    def _score(self, dot: Expr, bias: Read | None, slopes: Handle | None) -> Expr:
        """Return what becomes of a dot product, in order: scale, soft-cap, bias, ALiBi."""
        work = self.work
        score: Expr = dot * work.scale
        if work.softcap is not None:
            score = Const(work.softcap) * apply("tanh", score / work.softcap)
        if bias is not None:
            score = score + bias if work.bias_op == "add" else apply("minimum", score, bias)
        if slopes is not None:
            distance: Expr = AxisValue("t") - AxisValue("i")
            offset = self._offset()
            distance = distance if offset is None else distance - offset
            score = score + slopes[self.head] * distance
        return score

    def _offset(self) -> Expr | None:
        """Return the key position at which the first query stands; None for 0."""
        if self.work.causal != "bottom_right":
            return None
        size = Size(self.t.size)
        keys = size if self.length is None else apply("minimum", self.length, size)
        return keys - Size(self.i.size)

    def _band(self) -> Band | None:
        """Return the causal mask and the window."""
        work, offset = self.work, self._offset()
        if work.causal == "none" and work.window is None:
            return None
        start: Expr = Const(0.0) if offset is None else offset
        most = None if work.causal == "none" else start
        return Band("t", "i", None if work.window is None else start - (work.window - 1.0), most)
