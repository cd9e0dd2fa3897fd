"""What becomes of the results of an attention kernel.

They go where they belong, or, where the keys of a row are cut into parts for several thread blocks,
into a workspace from which another kernel puts them together.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023,
https://pytorch.org/blog/flash-decoding/.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...compute.attention import Sizes
from ...compute.attention_tile import Operands, arrange, finite, minus_infinity, zero
from ...matching.expressions import ramp
from ...workload import Attention
from .attention_products import AttentionProducts
from .attention_rows import AttentionRows
from .attention_softmax import LOG2_E
from .fragments import local
from .layout import LANES, MMA_N
from .tile import int32, int64, whole

COMBINE = "mma_attention_combine"
"""Name of the block that puts parts together."""


@dataclass(frozen=True)
class Partials:
    """The results of parts of the keys.

    Parameters
    ----------
    sums : tirx.Var
        float32 ``[rows, parts, v_dim]``: values, each times its weight.
    statistics : tirx.Var
        float32 ``[rows, parts, 2]``: the highest score, times log2 e, and the sum of weights.
    """

    sums: tirx.Var
    statistics: tirx.Var

    @staticmethod
    def of(work: Attention, sizes: Sizes, parts: int) -> Partials:
        """Return a workspace for every row of `work`."""
        rows = rows_of_all(work, sizes)

        def buffer(name: str, last: int) -> tirx.Var:
            return tirx.decl_buffer([rows, int64(parts), int64(last)], "float32", name)

        return Partials(buffer("partial", work.v_dim), buffer("statistics", 2))


def rows_of_all(work: Attention, sizes: Sizes) -> tirx.Expr:
    """Return the rows of every batch entry and key head."""
    return sizes.batch * int64(work.q_heads) * sizes.q_len


def store_results(products: AttentionProducts, out: tirx.Var) -> None:
    """Emit the stores of the results: two columns of a row at a time."""
    rows = products.rows
    work = rows.work
    pair = local("pair", 2, work.out_dtype)
    for index in range(rows.count):
        query, head = rows.query_of(rows.row(index))
        with T.If(rows.exists(query)), T.Then():
            for column, sums in enumerate(products.result_pairs(index)):
                for e, total in enumerate(sums):
                    result = total * products.softmax.ratio[index]
                    T.buffer_store(pair, result.astype(work.out_dtype), [e])
                at = rows.column(column, 0)
                place = arrange(work.out_layout, rows.batch, query, head, ramp(int64(at), 2))
                _store_inside(rows, column, out, pair, place)


def store_partials(products: AttentionProducts, partials: Partials, part: tirx.Expr) -> None:
    """Emit the stores of the results of a part of the keys."""
    rows, softmax, part = products.rows, products.softmax, int64(part)
    pair = local("pair", 2, "float32")
    for index in range(rows.count):
        query, _ = rows.query_of(rows.row(index))
        line = rows.line(index)
        with T.If(rows.exists(query)), T.Then():
            for column, sums in enumerate(products.result_pairs(index)):
                for e, total in enumerate(sums):
                    T.buffer_store(pair, total, [e])
                at = ramp(int64(rows.column(column, 0)), 2)
                _store_inside(rows, column, partials.sums, pair, [line, part, at])
            with T.If(rows.lane % int32(4) == int32(0)), T.Then():
                top = softmax.top[index] * softmax.factor
                T.buffer_store(partials.statistics, top, [line, part, int64(0)])
                T.buffer_store(partials.statistics, softmax.total[index], [line, part, int64(1)])


def _store_inside(
    rows: AttentionRows, column: int, to: tirx.Var, pair: tirx.Var, place: list[tirx.Expr]
) -> None:
    """Store two columns, if there are such: in memory an operand may be wider."""
    store = tirx.BufferStore(to, pair[ramp(int32(0), 2)], place)
    if (column + 1) * MMA_N > rows.work.v_dim:
        inside = rows.column(column, 0) < int32(rows.work.v_dim)
        store = tirx.IfThenElse(inside, store, None)
    T.add_to_parent(store)


def combine_kernel(
    work: Attention, sizes: Sizes, operands: Operands, partials: Partials
) -> tirx.Stmt:
    """Return the kernel that puts parts together: a thread block for each row."""
    threads = -(-work.v_dim // LANES) * LANES
    with (
        IRBuilder() as builder,
        T.prim_func(s_tir=True),
        T.thread_binding(rows_of_all(work, sizes).astype("int32"), thread="blockIdx.x") as line,
        T.thread_binding(int32(threads), thread="threadIdx.x") as column,
        T.sblock(COMBINE),
    ):
        IRBuilder.name_many(["line", "column"], [line, column])
        sinks = [operands.sinks] if operands.sinks is not None else []
        T.reads(*(whole(b) for b in (partials.sums, partials.statistics, *sinks)))
        T.writes(whole(operands.out))
        if threads == work.v_dim:
            _combine(work, sizes, operands, partials, (line, column))
        else:
            with T.If(column < int32(work.v_dim)), T.Then():
                _combine(work, sizes, operands, partials, (line, column))
    return builder.get().body.block.body


def _combine(
    work: Attention,
    sizes: Sizes,
    operands: Operands,
    partials: Partials,
    at: tuple[tirx.Expr, tirx.Expr],
) -> None:
    """Emit one element of the result."""
    line, column = (int64(index) for index in at)
    group = int64(work.q_heads // work.kv_heads)
    place, row = line // (sizes.q_len * group), line % (sizes.q_len * group)
    head = place % int64(work.kv_heads) * group + row % group
    parts = int(partials.sums.ty.shape[1])
    top, total, result = (local(name, 1, "float32") for name in ("top", "total", "result"))
    sink: tirx.Expr = minus_infinity()
    if operands.sinks is not None:
        sink = operands.sinks[head].astype("float32") * tirx.const(LOG2_E, "float32")
    T.buffer_store(top, sink, [0])
    with T.unroll(int32(parts)) as part:
        T.buffer_store(top, tirx.max(top[0], partials.statistics[line, int64(part), 0]), [0])
    T.buffer_store(top, finite(top[0]), [0])
    T.buffer_store(total, tirx.exp2(sink - top[0]), [0])
    T.buffer_store(result, zero(), [0])
    with T.unroll(int32(parts)) as part:
        own = partials.statistics
        weight = tirx.exp2(own[line, int64(part), 0] - top[0])
        T.buffer_store(total, total[0] + weight * own[line, int64(part), 1], [0])
        part_result = partials.sums[line, int64(part), column]
        T.buffer_store(result, result[0] + weight * part_result, [0])
    divisor = tirx.Select(total[0] == zero(), tirx.const(1.0, "float32"), total[0])
    batch = place // int64(work.kv_heads)
    where = arrange(work.out_layout, batch, row // group, head, column)
    T.buffer_store(operands.out, (result[0] / divisor).astype(work.out_dtype), where)
