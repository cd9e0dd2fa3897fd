"""The scores of one attention tile against one block of keys.

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

from collections.abc import Callable

from tvm import tirx

from ..tvm_ir import T
from .attention_scores import Place, Scores
from .attention_tile import FLOAT, TileShape, block, halves, int64, scratch, zero

KeyOf = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
PlaceOf = Callable[[tirx.Expr, tirx.Expr], Place]


class ScoreBlocks:
    """Emits the blocks that compute scores.

    Parameters
    ----------
    shape : TileShape
        Sizes of the tile.
    head_dim : int
        Features of a query.
    rules : Scores
        What becomes of a dot product.
    """

    def __init__(self, shape: TileShape, head_dim: int, rules: Scores) -> None:
        self.shape, self.head_dim, self.rules = shape, head_dim, rules
        self.lanes = shape.dot_lanes
        """Partial sums of a score; 0 where a register holds neighbouring keys."""

    def emit(self, q_tile: tirx.Var, key: KeyOf, scores: tirx.Var, place: PlaceOf) -> None:
        """Fill `scores`.

        `key` returns a feature of the key of a column, `place` which score stands at a row and a
        column.
        """
        self._products(q_tile, key, scores, place)
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

    def _products(self, q_tile: tirx.Var, key: KeyOf, scores: tirx.Var, place: PlaceOf) -> None:
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
            with block("scores_dot", D=self.head_dim // lanes, **tile) as (d, s, lane):
                i, j = (s // keys, s % keys) if self.lanes else (s, lane)
                feature = d * lanes + lane if self.lanes else d
                q = q_tile[io * rows + i, feature].astype(FLOAT)
                product = q * key(jo * keys + j, feature)
                T.buffer_store(dot, dot[s, lane] + product, [s, lane])
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
