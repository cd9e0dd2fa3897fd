"""Attention as one PrimFunc: softmax by key blocks, so that the scores are never stored whole.

The algorithm is FlashAttention's (Dao et al., 2022, https://arxiv.org/abs/2205.14135, algorithm 1,
with the loop order of FlashAttention-2) on the online softmax of Milakov and Gimelshein (2018,
https://arxiv.org/abs/1805.02867).  This module fixes the signature, the ranges of the query length
and the tile loop; :mod:`relax_fusion.compute.attention_blocks` holds what one tile does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..errors import LoweringError
from ..estimator.tile_plan import PLAN_ATTR, PlanTable, TilePlan
from ..workload import Attention, Dim, DynamicDim, Operand
from ..workload.json import WORKLOAD_ATTR, to_json
from .attention_blocks import TileEmitter
from .attention_tile import Operands, int64, tile_shape


@dataclass(frozen=True)
class Sizes:
    """Batch, query and key lengths, and the position dimension of the key and value buffers."""

    batch: tirx.Expr
    q_len: tirx.Expr
    kv_len: tirx.Expr
    kv_capacity: tirx.Expr


def attention_prim_func(work: Attention, table: PlanTable) -> tirx.PrimFunc:
    """Return the unscheduled PrimFunc of `work`, tiled as `table` says.

    Parameters
    ----------
    work : Attention
        What to compute.
    table : PlanTable
        Tiles by ranges of `work.q_len`: ``block_m`` rows and ``block_n`` key positions are held at
        once, and ``reg_m`` rows by ``reg_n`` columns are summed in registers (``lanes`` columns
        where ``reg_n`` is not a multiple of them).  The query heads that share keys are rows of one
        tile.  Where the query length is dynamic and there are several ranges, the function branches
        on its value.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are the operands of ``work.graph``; all sizes are int64.  (``relax.call_tir``
        takes scalars among the inputs, in front of the outputs.)  Rows that see no key are zero.
        Attributes: ``op_pattern`` 8 (opaque), ``tirx.noalias``, the plan table and `WORKLOAD_ATTR`;
        the caller sets ``global_symbol``.

    Raises
    ------
    LoweringError
        If the key/value heads do not divide the query heads.
    """
    if work.q_heads % work.kv_heads:
        raise LoweringError(
            f"attention: {work.kv_heads} key/value heads do not divide {work.q_heads} query heads"
        )
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr(
            {
                "op_pattern": 8,
                "tirx.noalias": True,
                WORKLOAD_ATTR: to_json(work),
                PLAN_ATTR: table.to_attr(),
            }
        )
        sizes, operands = _assigned(work, _parameters(work))
        _ranges(work, table, sizes, operands)
    return builder.get()


def operands_of(func: tirx.PrimFunc, work: Attention) -> tuple[Sizes, Operands]:
    """Return the sizes and the buffers of a function that `attention_prim_func` made of `work`."""
    return _assigned(work, func.params)


def _assigned(work: Attention, params: Sequence[tirx.Var]) -> tuple[Sizes, Operands]:
    """Return what the parameters of the graph's operands are."""
    operands = (*work.graph.inputs, *work.graph.outputs)
    named = {o.name: param for o, param in zip(operands, params, strict=True)}
    batch, q_len = (named["q"].ty.shape[work.q_layout.index(axis)] for axis in "bs")
    capacity = named["k"].ty.shape[work.kv_layout.index("s")]
    kv_len = named.pop("kv_len", capacity)
    return Sizes(batch, q_len, kv_len, capacity), Operands(**named)


def range_suffix(index: int) -> str:
    """Return what the names of the blocks of entry number `index` of the plan table end in."""
    return f"_r{index}"


def _parameters(work: Attention) -> list[tirx.Var]:
    """Declare the operands of the graph."""
    sizes = {name: tirx.Var(name, "int64") for name in work.graph.dims}
    told = {slot.name: slot.dim for slot in work.graph.slots if slot.role == "scalar"}

    def size(dim: Dim) -> tirx.Expr:
        return int64(dim) if isinstance(dim, int) else sizes[dim.name]

    def declared(operand: Operand) -> tirx.Var:
        if operand.shape is not None:
            shape = [size(dim) for dim in operand.shape]
            return T.arg(operand.name, T.buffer(shape, operand.dtype))
        dim = told[operand.name]
        number = sizes[dim.name] if isinstance(dim, DynamicDim) else tirx.Var(operand.name, "int64")
        T.arg(number.name, number)
        return number

    return [declared(o) for o in (*work.graph.inputs, *work.graph.outputs)]


def _ranges(
    work: Attention, table: PlanTable, sizes: Sizes, operands: Operands, index: int = 0
) -> None:
    """Emit a body for each range from number `index` on, chosen by the query length.

    A static query length meets one range only, and the others are left out.
    """
    upper, plan = table.entries[index]
    if isinstance(work.q_len, int) and upper is not None and work.q_len > upper:
        _ranges(work, table, sizes, operands, index + 1)
    elif isinstance(work.q_len, int) or upper is None:
        _tiles(work, plan, sizes, operands, range_suffix(index))
    else:
        # All threads of a kernel go the same way, which lets TVM put barriers inside.
        with T.If(tirx.op.tvm_thread_invariant(sizes.q_len <= int64(upper))):
            with T.Then():
                _tiles(work, plan, sizes, operands, range_suffix(index))
            with T.Else():
                _ranges(work, table, sizes, operands, index + 1)


def _tiles(work: Attention, plan: TilePlan, sizes: Sizes, operands: Operands, suffix: str) -> None:
    """Emit the loops over batch, key heads and row tiles, and the tile inside."""
    shape = tile_shape(work, plan)
    rows = sizes.q_len * int64(work.q_heads // work.kv_heads)
    tiles = (rows + int64(shape.rows - 1)) // int64(shape.rows)
    with T.grid(sizes.batch, int64(work.kv_heads), tiles) as loops:
        IRBuilder.name_many(["b", "h", "t"], list(loops))
        with T.sblock("tile" + suffix):
            batch, head, tile = T.axis.remap("SSS", list(loops))
            IRBuilder.name_many(["vb", "vh", "vt"], [batch, head, tile])
            emitter = TileEmitter(
                work,
                shape,
                operands,
                place=(batch, head, tile),
                lengths=(sizes.q_len, sizes.kv_len),
                suffix=suffix,
            )
            emitter.emit()
