"""Attention as one PrimFunc: softmax by key blocks, so that the scores are never stored whole.

The algorithm is FlashAttention's (Dao et al., 2022, https://arxiv.org/abs/2205.14135, algorithm 1,
with the loop order of FlashAttention-2) on the online softmax of Milakov and Gimelshein (2018,
https://arxiv.org/abs/1805.02867).  What one tile does, whose blocks
`relax_fusion.dlight_rules.attention` schedules:

::

    tile(batch, kv_head, tile)              scratch: q_tile, kv_tile, scores, row_*, new_max, acc
      q_load, row_init, acc_init
      for each key block that the tile sees:
        keys
          [k_load, shared_load]          kv_tile = k, and what heads share
          scores, mask                   (see `relax_fusion.compute.attention_scores`)
          row_max -> max_init, max_lanes, max_fold*
          exp                            scores = exp(scores - new_max)
          row_sum -> sum_init, sum_lanes, sum_fold*
          row_keep                       row_max = new_max
          [v_load]                       kv_tile = v
          values  -> values_init, values_dot, values_store
      row_end, store

Blocks named after an arrow are nested in the one before it; a CPU with few rows has none of those
in brackets, and reads keys and values where they lie.  Within one block no scratch that
threads share is read after it was written: TVM can put a barrier between two of these blocks, and
not inside of one, where only some threads may be active.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from ..errors import LoweringError
from ..estimator.tile_plan import TilePlan
from ..matching.expressions import int64
from ..tvm_ir import IRBuilder, T
from ..workload import Attention
from .attention_scores import OnlineSoftmax, Place, ScoreBlocks, Scores
from .attention_tile import (
    FLOAT,
    Operands,
    TileShape,
    arrange,
    block,
    place_of,
    scratch,
    tile_shape,
    zero,
)
from .reference import declare


@dataclass(frozen=True)
class Sizes:
    """Batch, query and key lengths."""

    batch: tirx.Expr
    q_len: tirx.Expr
    kv_len: tirx.Expr


def attention_prim_func(work: Attention, plan: TilePlan) -> tirx.PrimFunc:
    """Return the unscheduled PrimFunc of `work`, tiled as `plan` says.

    ``block_m`` rows and ``block_n`` key positions are held at once, and ``reg_m`` rows by ``reg_n``
    columns are summed in registers (``lanes`` columns where ``reg_n`` is not a multiple of them).
    The query heads that share keys are rows of one tile.  Rows that see no key are zero.

    Its parameters are the operands of ``work.graph``; all sizes are int64.  (``relax.call_tir``
    takes scalars among the inputs, in front of the outputs.)  Raises `LoweringError` if the
    key/value heads do not divide the query heads.
    """
    if work.q_heads % work.kv_heads:
        raise LoweringError(
            f"attention: {work.kv_heads} key/value heads do not divide {work.q_heads} query heads"
        )
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"tirx.noalias": True})
        _tiles(work, plan, *_operands_of(declare(work.graph), work))
    return builder.get()


def _operands_of(params: Sequence[tirx.Var], work: Attention) -> tuple[Sizes, Operands]:
    """Return the sizes and the buffers that the parameters of a function are."""
    operands = (*work.graph.inputs, *work.graph.outputs)
    named = {o.name: param for o, param in zip(operands, params, strict=True)}
    batch, q_len = (named["q"].ty.shape[work.q_layout.index(axis)] for axis in "bs")
    kv_len = named.pop("kv_len", named["k"].ty.shape[work.kv_layout.index("s")])
    return Sizes(batch, q_len, kv_len), Operands(**named)


def _tiles(work: Attention, plan: TilePlan, sizes: Sizes, operands: Operands) -> None:
    """Emit the loops over batch, key heads and row tiles, and the tile inside."""
    shape = tile_shape(work, plan)
    rows = sizes.q_len * int64(work.q_heads // work.kv_heads)
    tiles = (rows + int64(shape.rows - 1)) // int64(shape.rows)
    with T.grid(sizes.batch, int64(work.kv_heads), tiles) as loops:
        IRBuilder.name_many(["b", "h", "t"], list(loops))
        with T.sblock("tile"):
            batch, head, tile = T.axis.remap("SSS", list(loops))
            IRBuilder.name_many(["vb", "vh", "vt"], [batch, head, tile])
            emitter = TileEmitter(
                work,
                shape,
                operands,
                place=(batch, head, tile),
                lengths=(sizes.q_len, _keys_of(work, sizes.kv_len, operands, batch)),
            )
            emitter.emit()


def _keys_of(work: Attention, kv_len: tirx.Expr, operands: Operands, batch: tirx.Expr) -> tirx.Expr:
    """Return how many keys a batch entry has."""
    if work.lengths is None or operands.lengths is None:
        return kv_len
    length = operands.lengths[batch if work.lengths.by_batch else int64(0)].astype("int64")
    return tirx.max(tirx.min(length + int64(work.lengths.more), kv_len), int64(0))


Position = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]


class TileEmitter:
    """Emits the body of one tile block, into the IR builder that is open.

    `place` is the batch, the key head and the row tile of this block, `lengths` are the numbers of
    query and of key positions.
    """

    def __init__(
        self,
        work: Attention,
        shape: TileShape,
        operands: Operands,
        *,
        place: tuple[tirx.Var, tirx.Var, tirx.Var],
        lengths: tuple[tirx.Expr, tirx.Expr],
    ) -> None:
        """Allocate the scratch, in the block that is open."""
        self.work, self.shape, self.operands = work, shape, operands
        self.batch, self.kv_head, self.tile = place
        self.group = int64(work.q_heads // work.kv_heads)
        self.q_len, self.kv_len = lengths
        rows, features = shape.rows, max(work.head_dim, work.v_dim)
        self.q_tile = scratch("q_tile", (rows, work.head_dim), shape.stage_dtype)
        self.kv_tile = None
        if not shape.dot_lanes:  # keys and values are needed in turn, so they share one stage
            self.kv_tile = scratch("kv_tile", (shape.keys * features,), shape.stage_dtype)
        self.softmax = OnlineSoftmax(shape)
        self.rules = Scores(work, operands, self.q_len, self.kv_len, shape.on_gpu)
        self.dots = ScoreBlocks(shape, self.rules)
        # Each thread keeps its register tiles of the result from one key block to the next.
        self.columns = work.v_dim // shape.reg_values
        self.owned = rows // shape.reg_rows * self.columns
        self.slots = -(-self.owned // shape.threads)
        own = (self.slots, shape.threads, shape.reg_rows, shape.reg_values)
        self.acc = scratch("acc", own)
        self.first_key: tirx.Expr = int64(0)

    def emit(self) -> None:
        """Emit the whole tile."""
        operands = self.operands
        self._load_queries()
        self.softmax.start(self._sink if operands.sinks is not None else None)
        self._clear()
        first, blocks = self._key_blocks()
        with T.serial(blocks) as loop:
            IRBuilder.name("kb", loop)
            with T.sblock("keys"):
                key_block = T.axis.scan((int64(0), blocks), loop, dtype="int64")
                IRBuilder.name("vkb", key_block)
                self.first_key = (first + key_block) * int64(self.shape.keys)
                self._load_keys()
                self.dots.emit(self.q_tile, self._keys(), self.softmax.scores, self._place)
                self.softmax.advance()
                self._load_kv("v", self.work.v_dim, self._v_at)
                self._values()
        self.softmax.finish()
        self._store()

    def _query(self, row: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the query and the head of a row of the tile."""
        row = self.tile * int64(self.shape.rows) + row
        return row // self.group, self.kv_head * self.group + row % self.group

    def _sink(self, row: tirx.Expr) -> tirx.Expr:
        """Return the score that the softmax of a row has besides those of its keys."""
        assert self.operands.sinks is not None
        return self.operands.sinks[self._query(row)[1]].astype(FLOAT)

    def _key_blocks(self) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the first key block that a row of this tile sees, and how many there are on."""
        keys = int64(self.shape.keys)
        last = self._query(int64(self.shape.rows - 1))[0]
        last = tirx.min(last, self.q_len - int64(1))
        first = self.rules.keys_begin(self._query(int64(0))[0]) // keys
        end = (self.rules.keys_end(last) + keys - int64(1)) // keys
        return first, end - first if self.work.window is None else tirx.max(end - first, int64(0))

    def _load_queries(self) -> None:
        work = self.work
        with block("q_load", i=self.shape.rows, d=work.head_dim) as (i, d):
            query, head = self._query(i)
            at = place_of(work, "q", self.batch, query, head, d)
            inside = query < self.q_len
            T.buffer_store(self.q_tile, self._staged(inside, self.operands.q, at), [i, d])

    def _staged(self, inside: tirx.Expr, source: tirx.Var, at: list[tirx.Expr]) -> tirx.Expr:
        """Return an element as it is staged, 0 where it lies outside of its source."""
        dtype = self.shape.stage_dtype
        return tirx.if_then_else(inside, source[tuple(at)].astype(dtype), tirx.const(0, dtype))

    def _load_kv(self, name: str, features: int, position: Position) -> None:
        """Stage a block of keys or values; what lies past `kv_len` may be garbage and reads 0."""
        if self.kv_tile is None:
            return
        with block(f"{name}_load", j=self.shape.keys, d=features) as (j, d):
            key = self.first_key + j
            at = place_of(self.work, name, self.batch, key, self.kv_head, d)
            value = self._staged(key < self.kv_len, getattr(self.operands, name), at)
            T.buffer_store(self.kv_tile, value, [position(j, d)])

    def _load_keys(self) -> None:
        """Stage a block of keys: the features of a head's own, then those that heads share."""
        work, own = self.work, self.work.head_dim - self.work.shared
        self._load_kv("k", own, self._k_at)
        if self.kv_tile is None or self.operands.shared is None:
            return
        with block("shared_load", j=self.shape.keys, d=work.shared) as (j, d):
            key = self.first_key + j
            at = [self.batch, key, d]
            value = self._staged(key < self.kv_len, self.operands.shared, at)
            T.buffer_store(self.kv_tile, value, [self._k_at(j, d + own)])

    def _keys(self) -> list[tuple[int, Position]]:
        """Return the parts of a key that lie apart, as `ScoreBlocks` takes them."""
        work = self.work
        if self.kv_tile is not None or not work.shared:
            return [(work.head_dim, partial(self._read, "k", self._k_at))]
        own = work.head_dim - work.shared
        return [(own, partial(self._read, "k", self._k_at)), (work.shared, self._shared)]

    def _shared(self, key: tirx.Expr, feature: tirx.Expr) -> tirx.Expr:
        """Return a feature that all heads share, of a key of the block."""
        assert self.operands.shared is not None
        return self.operands.shared[self.batch, self._last(key), feature].astype(FLOAT)

    def _read(self, name: str, position: Position, key: tirx.Expr, feature: tirx.Expr) -> tirx.Expr:
        """Return a staged element, or the one that lies in memory, of the last key past the end.

        The score of a key past the end is hidden, whatever it is.
        """
        if self.kv_tile is not None:
            return self.kv_tile[position(key, feature)].astype(FLOAT)
        at = place_of(self.work, name, self.batch, self._last(key), self.kv_head, feature)
        return getattr(self.operands, name)[tuple(at)].astype(FLOAT)

    def _last(self, key: tirx.Expr) -> tirx.Expr:
        """Return where a key of the block lies, or the last one of all."""
        return tirx.min(self.first_key + key, self.kv_len - int64(1))

    def _k_at(self, key: tirx.Expr, feature: tirx.Expr) -> tirx.Expr:
        """Return where a key lies in the stage: transposed, so that neighbours are keys."""
        return feature * int64(self.shape.keys) + key

    def _v_at(self, key: tirx.Expr, feature: tirx.Expr) -> tirx.Expr:
        """Return where a value lies in the stage."""
        return key * int64(self.work.v_dim) + feature

    def _clear(self) -> None:
        with block("acc_init", **self._own_axes(), **self._own_tile()) as at:
            T.buffer_store(self.acc, zero(), at)

    def _place(self, i: tirx.Expr, j: tirx.Expr) -> Place:
        """Return which score stands at row `i` and column `j` of the tile."""
        query, head = self._query(i)
        return Place(self.batch, head, query, self.first_key + j)

    def _own_axes(self) -> dict[str, int]:
        return {"s": self.slots, "x": self.shape.threads}

    def _own_tile(self) -> dict[str, int]:
        return {"ii": self.shape.reg_rows, "ci": self.shape.reg_values}

    def _own_place(self, slot: tirx.Expr, thread: tirx.Expr) -> tuple[tirx.Expr, ...]:
        """Return first row, first column and validity of a register tile of the result."""
        index = slot * self.shape.threads + thread
        row = index // self.columns * self.shape.reg_rows
        return row, index % self.columns * self.shape.reg_values, index < self.owned

    def _values(self) -> None:
        """Emit ``acc = acc * row_scale + scores @ v``."""
        with block("values", **self._own_axes()) as (slot, thread):
            _, _, owned = self._own_place(slot, thread)
            if self.slots * self.shape.threads == self.owned:
                self._values_tile(slot, thread)
            else:
                with T.If(owned), T.Then():
                    self._values_tile(slot, thread)

    def _values_tile(self, slot: tirx.Expr, thread: tirx.Expr) -> None:
        row, column, _ = self._own_place(slot, thread)
        tile = self._own_tile()
        part = scratch("part", tuple(tile.values()), scope="local")
        with block("values_init", **tile) as (ii, ci):
            kept = self.acc[slot, thread, ii, ci] * self.softmax.row_scale[row + ii]
            T.buffer_store(part, kept, [ii, ci])
        with block("values_dot", J=self.shape.keys, **tile) as (j, ii, ci):
            v = self._read("v", self._v_at, j, column + ci)
            T.buffer_store(part, part[ii, ci] + self.softmax.scores[row + ii, j] * v, [ii, ci])
        with block("values_store", **tile) as (ii, ci):
            T.buffer_store(self.acc, part[ii, ci], [slot, thread, ii, ci])

    def _store(self) -> None:
        work = self.work
        with block("store", **self._own_axes(), **self._own_tile()) as (s, x, ii, ci):
            first, column, owned = self._own_place(s, x)
            query, head = self._query(first + ii)
            value = self.acc[s, x, ii, ci] / self.softmax.row_scale[first + ii]
            at = arrange(work.out_layout, self.batch, query, head, column + ci)
            with T.If(tirx.And(owned, query < self.q_len)), T.Then():
                T.buffer_store(self.operands.out, value.astype(work.out_dtype), at)
