"""What one attention tile does: the blocks that `relax_fusion.dlight_rules.attention` schedules.

::

    tile(batch, head, tile)              scratch: q_tile, kv_tile, scores, row_*, new_max, acc
      q_load, row_init, acc_init
      for each key block that the tile sees:
        keys
          k_load                         kv_tile = k, transposed
          scores  -> scores_init, scores_dot, scores_mask
          row_max -> max_init, max_lanes, max_fold
          exp                            scores = exp(scores - new_max)
          row_sum -> sum_init, sum_lanes, sum_fold
          row_keep                       row_max = new_max
          v_load                         kv_tile = v
          values  -> values_init, values_dot, values_store
      row_end, store

Blocks named after an arrow are nested in the one before it.  Within one block no scratch that
threads share is read after it was written: TVM can put a barrier between two of these blocks, and
not inside of one, where only some threads may be active.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tile_plan import TilePlan
from ..workload import Attention

Fold = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]

WARP = 32
"""Threads that a plan counts as one warp."""

FLOAT = "float32"
"""Type of scores, sums and scratch."""


def int64(value: int) -> tirx.Expr:
    """Return `value` as an int64 constant, the index type of Relax."""
    return tirx.const(value, "int64")


def arrange(layout: str, b: object, s: object, n: object, h: object) -> list[object]:
    """Put batch, sequence, head and feature into the order of `layout`."""
    return [{"b": b, "s": s, "n": n, "h": h}[letter] for letter in layout]


@dataclass(frozen=True)
class Operands:
    """The buffers of the function; `bias` is None where there is no additive mask."""

    q: tirx.Var
    k: tirx.Var
    v: tirx.Var
    bias: tirx.Var | None
    out: tirx.Var


@dataclass(frozen=True)
class TileShape:
    """Sizes of one tile and of its register tiles, made by `tile_shape`.

    Parameters
    ----------
    rows, keys : int
        Query rows and key positions held at once.
    reg_rows : int
        Rows of a register tile.
    reg_keys, reg_values : int
        Columns of a register tile of scores, and of one of outputs.
    threads : int
        Threads that share the tile, 1 on a CPU.
    stage_dtype : str
        Of the staged q, k and v.
    """

    rows: int
    keys: int
    reg_rows: int
    reg_keys: int
    reg_values: int
    threads: int
    stage_dtype: str


def tile_shape(work: Attention, plan: TilePlan) -> TileShape:
    """Cut the tiles of `plan` down to `work`.

    A tile is not larger than a static size asks for.  A GPU stages operands in their own type,
    because shared memory is scarce; a CPU stages them as float32, because it converts a value once
    there and otherwise once for every row.
    """
    on_gpu = plan.num_warps > 0
    width = plan.reg_n if plan.reg_n % plan.lanes == 0 else plan.lanes
    rows, keys = plan.block_m, plan.block_n
    if isinstance(work.q_len, int):
        rows = min(rows, _round_up(work.q_len, plan.reg_m))
    if isinstance(work.kv_len, int):
        keys = min(keys, _round_up(work.kv_len, width))
    return TileShape(
        rows=rows,
        keys=keys,
        reg_rows=plan.reg_m,
        reg_keys=gcd(keys, width),
        reg_values=gcd(work.v_dim, width),
        threads=max(1, plan.num_warps * WARP),
        stage_dtype=work.dtype if on_gpu else FLOAT,
    )


def _round_up(value: int, step: int) -> int:
    return max(1, -(-value // step)) * step


@contextmanager
def _block(name: str, **axes: int) -> Iterator[list[tirx.Var]]:
    """Open loops of the given extents with a block in them; an axis in capitals is reduced."""
    with T.grid(*(int64(extent) for extent in axes.values())) as loops:
        loops = loops if isinstance(loops, (list, tuple)) or len(axes) > 1 else [loops]
        IRBuilder.name_many([axis.lower() for axis in axes], list(loops))
        with T.sblock(name):
            kinds = "".join("R" if axis.isupper() else "S" for axis in axes)
            bound = T.axis.remap(kinds, list(loops))
            bound = [bound] if len(axes) == 1 else list(bound)
            IRBuilder.name_many(["v" + axis.lower() for axis in axes], bound)
            yield bound


def _scratch(
    name: str, shape: tuple[int, ...], dtype: str = FLOAT, scope: str = "global"
) -> tirx.Var:
    buffer = T.sblock_alloc_buffer([int64(size) for size in shape], dtype, scope=scope)
    IRBuilder.name(name, buffer)
    return buffer


def _minus_infinity() -> tirx.Expr:
    return tirx.const(float("-inf"), FLOAT)


def _finite(value: tirx.Expr) -> tirx.Expr:
    """Return `value`, or 0 where it is minus infinity: a row with no key yet has no maximum.

    ``exp(-inf - 0)`` is 0, and ``exp(-inf - (-inf))`` would be NaN.
    """
    return tirx.Select(value == _minus_infinity(), tirx.const(0, FLOAT), value)


def _zero() -> tirx.Expr:
    return tirx.const(0, FLOAT)


class TileEmitter:
    """Emits the body of one tile block, into the IR builder that is open.

    Parameters
    ----------
    work : Attention
        What is computed.
    shape : TileShape
        Sizes of the tile.
    operands : Operands
        The buffers of the function.
    place : tuple of tirx.Var
        Batch, query head and query tile of this block.
    lengths : tuple of tirx.Expr
        Numbers of query and of key positions.
    suffix : str
        What every block name ends in.
    """

    def __init__(
        self,
        work: Attention,
        shape: TileShape,
        operands: Operands,
        *,
        place: tuple[tirx.Var, tirx.Var, tirx.Var],
        lengths: tuple[tirx.Expr, tirx.Expr],
        suffix: str,
    ) -> None:
        self.work, self.shape, self.operands = work, shape, operands
        self.batch, self.head, self.tile = place
        self.q_len, self.kv_len = lengths
        self.suffix = suffix
        rows, features = shape.rows, max(work.head_dim, work.v_dim)
        self.q_tile = _scratch("q_tile", (rows, work.head_dim), shape.stage_dtype)
        # Keys and values are needed one after the other, so they share one staging buffer.
        self.kv_tile = _scratch("kv_tile", (shape.keys * features,), shape.stage_dtype)
        self.scores = _scratch("scores", (rows, shape.keys))
        self.row_max = _scratch("row_max", (rows,))
        self.row_sum = _scratch("row_sum", (rows,))
        self.row_scale = _scratch("row_scale", (rows,))
        self.new_max = _scratch("new_max", (rows,))
        # Each thread keeps its register tiles of the result from one key block to the next.
        self.columns = work.v_dim // shape.reg_values
        self.owned = rows // shape.reg_rows * self.columns
        self.slots = -(-self.owned // shape.threads)
        own = (self.slots, shape.threads, shape.reg_rows, shape.reg_values)
        self.acc = _scratch("acc", own)
        self.first_key: tirx.Expr = int64(0)

    def emit(self) -> None:
        """Emit the whole tile."""
        self._load_queries()
        self._init_rows()
        blocks = self._key_blocks()
        with T.serial(blocks) as loop:
            IRBuilder.name("kb", loop)
            with self._named("keys"):
                block = T.axis.scan((int64(0), blocks), loop, dtype="int64")
                IRBuilder.name("vkb", block)
                self.first_key = block * int64(self.shape.keys)
                self._load_kv("k_load", self.operands.k, self.work.head_dim, self._k_at)
                self._scores()
                self._row_max()
                self._exp()
                self._row_sum()
                self._row_keep()
                self._load_kv("v_load", self.operands.v, self.work.v_dim, self._v_at)
                self._values()
        self._row_end()
        self._store()

    def _named(self, name: str, **axes: int) -> object:
        """Open the block `name`, with a loop around it for each axis."""
        return _block(name + self.suffix, **axes) if axes else T.sblock(name + self.suffix)

    def _row(self, row: tirx.Expr) -> tirx.Expr:
        """Return the query position of a row of the tile."""
        return self.tile * int64(self.shape.rows) + row

    def _diagonal(self) -> tirx.Expr:
        """Return how many more keys than its own index a causal query sees."""
        aligned_at_end = self.work.causal == "bottom_right"
        return self.kv_len - self.q_len if aligned_at_end else int64(0)

    def _key_blocks(self) -> tirx.Expr:
        """Return the number of key blocks up to the last one that a row of this tile sees."""
        keys = self.kv_len
        if self.work.causal != "none":
            rows_end = tirx.min(self._row(int64(self.shape.rows)), self.q_len)
            keys = tirx.min(keys, tirx.max(rows_end + self._diagonal(), int64(0)))
        return (keys + int64(self.shape.keys - 1)) // int64(self.shape.keys)

    def _load_queries(self) -> None:
        work = self.work
        with self._named("q_load", i=self.shape.rows, d=work.head_dim) as (i, d):
            row = self._row(i)
            at = arrange(work.q_layout, self.batch, row, self.head, d)
            self._stage(self.q_tile, [i, d], row < self.q_len, self.operands.q, at)

    def _stage(
        self,
        tile: tirx.Var,
        index: list[tirx.Expr],
        inside: tirx.Expr,
        source: tirx.Var,
        at: list[tirx.Expr],
    ) -> None:
        """Copy one element into a tile, or 0 where it lies outside of the source."""
        dtype = self.shape.stage_dtype
        value = tirx.if_then_else(inside, _cast(source[tuple(at)], dtype), tirx.const(0, dtype))
        T.buffer_store(tile, value, index)

    def _load_kv(
        self, name: str, source: tirx.Var, features: int, position: Callable[..., tirx.Expr]
    ) -> None:
        """Stage a block of keys or values; what lies past `kv_len` may be garbage and reads 0."""
        work = self.work
        with self._named(name, j=self.shape.keys, d=features) as (j, d):
            key = self.first_key + j
            kv_head = self.head // int64(work.q_heads // work.kv_heads)
            at = arrange(work.kv_layout, self.batch, key, kv_head, d)
            self._stage(self.kv_tile, [position(j, d)], key < self.kv_len, source, at)

    def _k_at(self, key: tirx.Expr, feature: tirx.Expr) -> tirx.Expr:
        """Return where a key lies in the stage: transposed, so that neighbours are keys."""
        return feature * int64(self.shape.keys) + key

    def _v_at(self, key: tirx.Expr, feature: tirx.Expr) -> tirx.Expr:
        """Return where a value lies in the stage."""
        return key * int64(self.work.v_dim) + feature

    def _init_rows(self) -> None:
        with self._named("row_init", i=self.shape.rows) as (i,):
            T.buffer_store(self.row_max, _minus_infinity(), [i])
            T.buffer_store(self.row_sum, _zero(), [i])
        with self._named("acc_init", **self._own_axes(), **self._own_tile()) as at:
            T.buffer_store(self.acc, _zero(), at)

    def _scores(self) -> None:
        """Emit ``scores = scale * q @ k^T + bias`` where visible, else minus infinity."""
        shape = self.shape
        rows, keys = shape.reg_rows, shape.reg_keys
        outer = {"io": shape.rows // rows, "jo": shape.keys // keys}
        with self._named("scores", **outer) as (io, jo):
            dot = _scratch("dot", (rows, keys), scope="local")
            with self._named("scores_init", ii=rows, ji=keys) as (ii, ji):
                T.buffer_store(dot, _zero(), [ii, ji])
            with self._named("scores_dot", D=self.work.head_dim, ii=rows, ji=keys) as (d, ii, ji):
                q = _cast(self.q_tile[io * rows + ii, d], FLOAT)
                k = _cast(self.kv_tile[self._k_at(jo * keys + ji, d)], FLOAT)
                T.buffer_store(dot, dot[ii, ji] + q * k, [ii, ji])
            with self._named("scores_mask", ii=rows, ji=keys) as (ii, ji):
                i, j = io * rows + ii, jo * keys + ji
                T.buffer_store(self.scores, self._masked(dot[ii, ji], i, j), [i, j])

    def _masked(self, dot: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        """Scale a dot product, add the bias, and hide it where the query does not see the key."""
        row, key = self._row(i), self.first_key + j
        visible = key < self.kv_len
        if self.work.causal != "none":
            visible = tirx.And(visible, key <= row + self._diagonal())
        score = dot * tirx.const(self.work.scale, FLOAT)
        if self.operands.bias is not None:
            places = (self.batch, self.head, row, key)
            at = [
                place if has else int64(0)
                for place, has in zip(places, self.work.bias_dims, strict=True)
            ]
            inside = tirx.And(row < self.q_len, key < self.kv_len)
            bias = _cast(self.operands.bias[tuple(at)], FLOAT)
            score = score + tirx.if_then_else(inside, bias, _zero())
        return tirx.Select(visible, score, _minus_infinity())

    def _lanes(self, name: str, start: tirx.Expr, fold: Fold, row: tirx.Expr) -> tirx.Var:
        """Fold a row of scores into one partial result per column of a register tile.

        One accumulator would make every step wait for the one before.
        """
        lanes = self.shape.reg_keys
        part = _scratch(name, (lanes,), scope="local")
        with self._named(name + "_init", ji=lanes) as (ji,):
            T.buffer_store(part, start, [ji])
        with self._named(name + "_lanes", JO=self.shape.keys // lanes, ji=lanes) as (jo, ji):
            T.buffer_store(part, fold(part[ji], self.scores[row, jo * lanes + ji]), [ji])
        return part

    def _row_max(self) -> None:
        with self._named("row_max", i=self.shape.rows) as (i,):
            part = self._lanes("max", _minus_infinity(), tirx.max, i)
            top = _scratch("top", (1,), scope="local")
            T.buffer_store(top, self.row_max[i], [0])
            with self._named("max_fold", JI=self.shape.reg_keys) as (ji,):
                T.buffer_store(top, tirx.max(top[0], part[ji]), [0])
            T.buffer_store(self.new_max, top[0], [i])

    def _exp(self) -> None:
        width = self.shape.reg_keys
        axes = {"i": self.shape.rows, "jo": self.shape.keys // width, "ji": width}
        with self._named("exp", **axes) as (i, jo, ji):
            j = jo * width + ji
            value = tirx.exp(self.scores[i, j] - _finite(self.new_max[i]))
            T.buffer_store(self.scores, value, [i, j])

    def _row_sum(self) -> None:
        """Add this block to the sums, after bringing them to the new maxima."""
        with self._named("row_sum", i=self.shape.rows) as (i,):
            part = self._lanes("sum", _zero(), operator.add, i)
            total = _scratch("total", (1,), scope="local")
            T.buffer_store(total, _zero(), [0])
            with self._named("sum_fold", JI=self.shape.reg_keys) as (ji,):
                T.buffer_store(total, total[0] + part[ji], [0])
            ratio = _scratch("ratio", (1,), scope="local")
            change = _finite(self.row_max[i]) - _finite(self.new_max[i])
            T.buffer_store(ratio, tirx.exp(change), [0])
            T.buffer_store(self.row_scale, ratio[0], [i])
            T.buffer_store(self.row_sum, self.row_sum[i] * ratio[0] + total[0], [i])

    def _row_keep(self) -> None:
        with self._named("row_keep", i=self.shape.rows) as (i,):
            T.buffer_store(self.row_max, self.new_max[i], [i])

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
        with self._named("values", **self._own_axes()) as (slot, thread):
            _, _, owned = self._own_place(slot, thread)
            if self.slots * self.shape.threads == self.owned:
                self._values_tile(slot, thread)
            else:
                with T.If(owned), T.Then():
                    self._values_tile(slot, thread)

    def _values_tile(self, slot: tirx.Expr, thread: tirx.Expr) -> None:
        row, column, _ = self._own_place(slot, thread)
        tile = self._own_tile()
        part = _scratch("part", tuple(tile.values()), scope="local")
        with self._named("values_init", **tile) as (ii, ci):
            kept = self.acc[slot, thread, ii, ci] * self.row_scale[row + ii]
            T.buffer_store(part, kept, [ii, ci])
        with self._named("values_dot", J=self.shape.keys, **tile) as (j, ii, ci):
            v = _cast(self.kv_tile[self._v_at(j, column + ci)], FLOAT)
            T.buffer_store(part, part[ii, ci] + self.scores[row + ii, j] * v, [ii, ci])
        with self._named("values_store", **tile) as (ii, ci):
            T.buffer_store(self.acc, part[ii, ci], [slot, thread, ii, ci])

    def _row_end(self) -> None:
        """Note what the result is divided by; a sum of 0 means that the row saw no key.

        Not done in the store: between the two TVM sees a need for a barrier, and otherwise takes
        the barriers of the key loop for enough, which does not run where no key is visible.
        """
        with self._named("row_end", i=self.shape.rows) as (i,):
            empty = self.row_sum[i] == _zero()
            divisor = tirx.Select(empty, tirx.const(1, FLOAT), self.row_sum[i])
            T.buffer_store(self.row_scale, divisor, [i])

    def _store(self) -> None:
        work = self.work
        with self._named("store", **self._own_axes(), **self._own_tile()) as (s, x, ii, ci):
            first, column, owned = self._own_place(s, x)
            row = self._row(first + ii)
            value = self.acc[s, x, ii, ci] / self.row_scale[first + ii]
            at = arrange(work.out_layout, self.batch, row, self.head, column + ci)
            with T.If(tirx.And(owned, row < self.q_len)), T.Then():
                T.buffer_store(self.operands.out, _cast(value, work.out_dtype), at)


def _cast(value: tirx.Expr, dtype: str) -> tirx.Expr:
    return value.astype(dtype)
