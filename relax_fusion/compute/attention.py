"""Attention as one PrimFunc: softmax by key blocks, so that the scores are never stored whole.

The algorithm is FlashAttention's (Dao et al., 2022, https://arxiv.org/abs/2205.14135, algorithm 1,
with the loop order of FlashAttention-2) on the online softmax of Milakov and Gimelshein (2018,
https://arxiv.org/abs/1805.02867).  This module has the tile loop;
:mod:`relax_fusion.compute.attention_blocks` holds what one tile does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ..errors import LoweringError
from ..estimator.tile_plan import TilePlan
from ..tvm_ir import IRBuilder, T
from ..workload import Attention
from .attention_blocks import TileEmitter
from .attention_tile import Operands, int64, tile_shape
from .reference import declare


@dataclass(frozen=True)
class Sizes:
    """Batch, query and key lengths."""

    batch: tirx.Expr
    q_len: tirx.Expr
    kv_len: tirx.Expr


def attention_prim_func(work: Attention, plan: TilePlan) -> tirx.PrimFunc:
    """Return the unscheduled PrimFunc of `work`, tiled as `plan` says.

    Parameters
    ----------
    work : Attention
        What to compute.
    plan : TilePlan
        ``block_m`` rows and ``block_n`` key positions are held at once, and ``reg_m`` rows by
        ``reg_n`` columns are summed in registers (``lanes`` columns where ``reg_n`` is not a
        multiple of them).  The query heads that share keys are rows of one tile.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are the operands of ``work.graph``; all sizes are int64.  (``relax.call_tir``
        takes scalars among the inputs, in front of the outputs.)  Rows that see no key are zero.

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
                lengths=(sizes.q_len, sizes.kv_len),
            )
            emitter.emit()
