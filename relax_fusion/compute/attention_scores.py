"""The scores of one attention tile against one block of keys, and what becomes of each of them.

::

    GPU                                          CPU, in brackets where rows are few
      scores -> scores_init, scores_dot,           scores -> scores_init, scores_dot,
                scores_store (masked)                        [scores_fold*], scores_store (as is)
                                                   mask, or mask_edge in the last block of keys

A CPU masks in a pass of its own, over whole vectors: a register tile may be narrower.  Where
tensors are read key by key, the last block of keys needs a choice for every element, which TVM does
not put into vectors, so the others have a loop without it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..matching.expressions import int64
from ..tvm_ir import T
from ..workload import Attention, MaskDims
from .activations import tanh
from .attention_tile import (
    FLOAT,
    Operands,
    TileShape,
    block,
    finite,
    halves,
    let,
    minus_infinity,
    scratch,
    zero,
)

Step = Callable[[tirx.Expr], tirx.Expr]


@dataclass(frozen=True)
class Place:
    """Which score is meant: one query of one head against one key."""

    batch: tirx.Expr
    head: tirx.Expr
    query: tirx.Expr
    key: tirx.Expr


@dataclass(frozen=True)
class Scores:
    """What a workload does to its scores, and which of them it hides."""

    work: Attention
    operands: Operands
    q_len: tirx.Expr
    kv_len: tirx.Expr
    on_gpu: bool

    def reads_by_key(self) -> bool:
        """Tell whether there are tensors with an element for each key."""
        return any(dims and dims[3] for dims in (self.work.bias_dims, self.work.mask_dims))

    def masked(self, dot: tirx.Expr, place: Place, *, whole: bool = False) -> tirx.Expr:
        """Return the score of a dot product, minus infinity where the query does not see the key.

        `whole` promises that the key is one of `kv_len`.
        """
        score = dot * tirx.const(self.work.scale, FLOAT)
        for step in self._steps(place, whole):
            score = step(score)
        return tirx.Select(self._visible(place, whole), score, minus_infinity())

    def _steps(self, place: Place, whole: bool) -> list[Step]:
        """Return what becomes of a scaled dot product, in order: soft-cap, bias, ALiBi."""
        work, operands, found = self.work, self.operands, list[Step]()
        if work.softcap is not None:
            cap = tirx.const(work.softcap, FLOAT)
            function = tanh if self.on_gpu else tirx.tanh
            found.append(lambda score: cap * function(score / cap))
        if operands.bias is not None and work.bias_dims is not None:
            bias = self._read(operands.bias, work.bias_dims, place, whole)
            if work.bias_op == "add":
                found.append(lambda score: score + bias)
            else:
                found.append(lambda score: self._least(score, bias))
        if operands.slopes is not None:
            distance = (place.key - self.position(place.query)).astype("int32").astype(FLOAT)
            slope = operands.slopes[place.head].astype(FLOAT)
            found.append(lambda score: score + slope * distance)
        return found

    def position(self, query: tirx.Expr) -> tirx.Expr:
        """Return the key position at which a query stands."""
        return query + self.kv_len - self.q_len if self.work.causal == "bottom_right" else query

    def keys_end(self, last_query: tirx.Expr) -> tirx.Expr:
        """Return the first key position that no query up to `last_query` sees."""
        if self.work.causal == "none":
            return self.kv_len
        return tirx.max(tirx.min(self.kv_len, self.position(last_query) + int64(1)), int64(0))

    def keys_begin(self, first_query: tirx.Expr) -> tirx.Expr:
        """Return the first key position that a query from `first_query` on sees."""
        if self.work.window is None:
            return int64(0)
        return tirx.max(self.position(first_query) - int64(self.work.window - 1), int64(0))

    def _visible(self, place: Place, whole: bool) -> tirx.Expr:
        work, position = self.work, self.position(place.query)
        visible = tirx.const(True, "bool") if whole else place.key < self.kv_len
        if work.causal != "none":
            visible = tirx.And(visible, place.key <= position)
        if work.window is not None:
            visible = tirx.And(visible, place.key > position - int64(work.window))
        if self.operands.mask is not None and work.mask_dims is not None:
            visible = tirx.And(
                visible, self._read(self.operands.mask, work.mask_dims, place, whole)
            )
        return visible

    def _read(self, source: tirx.Var, dims: MaskDims, place: Place, whole: bool) -> tirx.Expr:
        """Return what `source` holds for a score, and anything beyond the last query or key.

        A choice between keys would keep the scores of neighbours out of one vector.
        """
        query = tirx.min(place.query, self.q_len - int64(1))
        places = (place.batch, place.head, query, place.key)
        at = tuple(p if has else int64(0) for p, has in zip(places, dims, strict=True))
        value = source[at]
        value = value if str(source.ty.dtype) == "bool" else value.astype(FLOAT)
        if whole or not dims[3]:
            return value
        outside = tirx.const(0, str(value.ty.dtype))
        return tirx.if_then_else(place.key < self.kv_len, value, outside)

    def _least(self, score: tirx.Expr, bias: tirx.Expr) -> tirx.Expr:
        """Return the smaller one, or NaN where either is: a comparison with NaN is false.

        Not by a `Let` on a GPU, for the reasons that its tanh has.
        """

        def least(score: tirx.Expr) -> tirx.Expr:
            larger = tirx.Select(bias < score, bias, score + bias)
            return tirx.Select(score <= bias, score, larger)

        return least(score) if self.on_gpu else let("score", score, least)


KeyOf = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
PlaceOf = Callable[[tirx.Expr, tirx.Expr], Place]
Keys = Sequence[tuple[int, KeyOf]]

DOTS = "scores_dot", "scores_dot_shared"
"""Blocks that multiply features of a head's own, or all that are staged, and those of all heads."""


class ScoreBlocks:
    """Emits the blocks that compute scores; `rules` say what becomes of a dot product."""

    def __init__(self, shape: TileShape, rules: Scores) -> None:
        self.shape, self.rules = shape, rules
        self.lanes = shape.dot_lanes
        """Partial sums of a score; 0 where a register holds neighbouring keys."""

    def emit(self, q_tile: tirx.Var, keys: Keys, scores: tirx.Var, place: PlaceOf) -> None:
        """Fill `scores`.

        `keys` are the parts of the features of a key: how many, and a function that returns one of
        them of the key of a column.  `place` tells which score stands at a row and a column.
        """
        self._products(q_tile, keys, scores, place)
        if self.shape.on_gpu:
            return
        if not self.rules.reads_by_key():
            self._mask("mask", scores, place, whole=False)
            return
        end = place(int64(0), int64(self.shape.keys)).key
        with T.If(end <= self.rules.kv_len):
            with T.Then():
                self._mask("mask", scores, place, whole=True)
            with T.Else():
                self._mask("mask_edge", scores, place, whole=False)

    def _products(self, q_tile: tirx.Var, keys_of: Keys, scores: tirx.Var, place: PlaceOf) -> None:
        """Emit the register tiles.

        A sum is one register element, or `lanes` of them that lie side by side and are folded.
        """
        shape, lanes = self.shape, max(1, self.lanes)
        rows, keys = shape.reg_rows, max(1, shape.reg_keys // lanes)
        outer = {"io": shape.rows // rows, "jo": shape.keys // keys}
        # What is side by side comes last: lanes of one score, or neighbouring keys.
        tile = {"s": rows * keys, "l": lanes} if self.lanes else {"s": rows, "l": keys}
        with block("scores", **outer) as (io, jo):
            dot = scratch("dot", tuple(tile.values()), scope="local")
            with block("scores_init", **tile) as at:
                T.buffer_store(dot, zero(), at)
            first = 0
            for number, (features, key) in enumerate(keys_of):
                with block(DOTS[number], D=features // lanes, **tile) as (d, s, lane):
                    i, j = (s // keys, s % keys) if self.lanes else (s, lane)
                    feature = d * lanes + lane if self.lanes else d
                    q = q_tile[io * rows + i, feature + first].astype(FLOAT)
                    product = q * key(jo * keys + j, feature)
                    T.buffer_store(dot, dot[s, lane] + product, [s, lane])
                first += features
            for width in halves(self.lanes):
                with block(f"scores_fold{width}", s=rows * keys, l=width) as (s, lane):
                    T.buffer_store(dot, dot[s, lane] + dot[s, lane + width], [s, lane])
            tile["l"] = 1 if self.lanes else keys
            with block("scores_store", **tile) as (s, lane):
                i, j = (s // keys, s % keys) if self.lanes else (s, lane)
                i, j = io * rows + i, jo * keys + j
                value = dot[s, lane]
                value = self.rules.masked(value, place(i, j)) if shape.on_gpu else value
                T.buffer_store(scores, value, [i, j])

    def _mask(self, name: str, scores: tirx.Var, place: PlaceOf, *, whole: bool) -> None:
        shape, width = self.shape, self.shape.reg_keys
        with block(name, i=shape.rows, jo=shape.keys // width, ji=width) as (i, jo, ji):
            j = jo * width + ji
            value = self.rules.masked(scores[i, j], place(i, j), whole=whole)
            T.buffer_store(scores, value, [i, j])


Fold = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]


class OnlineSoftmax:
    """Emits the blocks that turn scores into weights and keep each row's maximum and sum.

    `shape`: sizes of the tile.
    `scores`: float32 ``[rows, keys]``: scores going in, ``exp(score - maximum)`` coming out.
    `row_scale`: float32 ``[rows]``: what results so far have to be multiplied by after `advance`,
    and be divided by after `finish`.
    """

    def __init__(self, shape: TileShape) -> None:
        """Allocate the scratch, in the block that is open."""
        self.shape = shape
        self.scores = scratch("scores", (shape.rows, shape.keys))
        self.row_max = scratch("row_max", (shape.rows,))
        self.row_sum = scratch("row_sum", (shape.rows,))
        self.row_scale = scratch("row_scale", (shape.rows,))
        self.new_max = scratch("new_max", (shape.rows,))

    def start(self, sink: Callable[[tirx.Expr], tirx.Expr] | None) -> None:
        """Begin with no key seen.

        The `sink` of a row is a score that adds to the sum and to nothing else.
        """
        with block("row_init", i=self.shape.rows) as (i,):
            top, total = minus_infinity(), zero()
            if sink is not None:
                top = sink(i)
                total = tirx.exp(top - finite(top))
            T.buffer_store(self.row_max, top, [i])
            T.buffer_store(self.row_sum, total, [i])

    def advance(self) -> None:
        """Take in a block of scores."""
        self._maximum()
        self._exponentials()
        self._sum()
        self._keep()

    def _lanes(self, name: str, start: tirx.Expr, fold: Fold, row: tirx.Expr) -> tirx.Var:
        """Fold a row of scores into partial results, and the upper halves of those into the lower.

        One accumulator would make every step wait for the one before.
        """
        lanes = self.shape.fold_lanes
        part = scratch(f"row_{name}_part", (lanes,), scope="local")
        with block(name + "_init", ji=lanes) as (ji,):
            T.buffer_store(part, start, [ji])
        with block(name + "_lanes", JO=self.shape.keys // lanes, ji=lanes) as (jo, ji):
            T.buffer_store(part, fold(part[ji], self.scores[row, jo * lanes + ji]), [ji])
        for width in halves(lanes):
            with block(f"{name}_fold{width}", ji=width) as (ji,):
                T.buffer_store(part, fold(part[ji], part[ji + width]), [ji])
        return part

    def _maximum(self) -> None:
        with block("row_max", i=self.shape.rows) as (i,):
            part = self._lanes("max", minus_infinity(), tirx.max, i)
            T.buffer_store(self.new_max, tirx.max(self.row_max[i], part[0]), [i])

    def _exponentials(self) -> None:
        width = self.shape.reg_keys
        axes = {"i": self.shape.rows, "jo": self.shape.keys // width, "ji": width}
        with block("exp", **axes) as (i, jo, ji):
            j = jo * width + ji
            value = tirx.exp(self.scores[i, j] - finite(self.new_max[i]))
            T.buffer_store(self.scores, value, [i, j])

    def _sum(self) -> None:
        """Add this block to the sums, after bringing them to the new maxima."""
        with block("row_sum", i=self.shape.rows) as (i,):
            part = self._lanes("sum", zero(), operator.add, i)
            ratio = scratch("ratio", (1,), scope="local")
            # Minus infinity, before the first key, has to come out as a ratio of 0: with 0 in its
            # place, a row whose scores are all below -88 would get exp(88) and NaN.
            change = self.row_max[i] - finite(self.new_max[i])
            T.buffer_store(ratio, tirx.exp(change), [0])
            T.buffer_store(self.row_scale, ratio[0], [i])
            T.buffer_store(self.row_sum, self.row_sum[i] * ratio[0] + part[0], [i])

    def _keep(self) -> None:
        with block("row_keep", i=self.shape.rows) as (i,):
            T.buffer_store(self.row_max, self.new_max[i], [i])

    def finish(self) -> None:
        """Note what the result is divided by; a sum of 0 means that the row saw no key.

        Not done in the store: between the two TVM sees a need for a barrier, and otherwise takes
        the barriers of the key loop for enough, which does not run where no key is visible.
        """
        with block("row_end", i=self.shape.rows) as (i,):
            empty = self.row_sum[i] == zero()
            divisor = tirx.Select(empty, tirx.const(1, FLOAT), self.row_sum[i])
            T.buffer_store(self.row_scale, divisor, [i])
