"""The softmax of an attention tile, carried along from one key block to the next.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
https://arxiv.org/abs/1805.02867, algorithm 3, applied to a block of keys at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from tvm import tirx

from ..tvm_ir import T
from .attention_tile import FLOAT, TileShape, block, finite, halves, minus_infinity, scratch, zero

Fold = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]


class OnlineSoftmax:
    """Emits the blocks that turn scores into weights and keep each row's maximum and sum.

    Parameters
    ----------
    shape : TileShape
        Sizes of the tile.

    Attributes
    ----------
    scores : tirx.Var
        float32 ``[rows, keys]``: scores going in, ``exp(score - maximum)`` coming out.
    row_scale : tirx.Var
        float32 ``[rows]``: what results so far have to be multiplied by after `advance`, and be
        divided by after `finish`.
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
