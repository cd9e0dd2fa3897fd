"""Attention as one PrimFunc: softmax by key blocks, so that the scores are never stored whole.

The algorithm is FlashAttention's (Dao et al., 2022, https://arxiv.org/abs/2205.14135, algorithm 1,
with the loop order of FlashAttention-2) on the online softmax of Milakov and Gimelshein (2018,
https://arxiv.org/abs/1805.02867).  This module fixes the signature, the ranges of the query length
and the tile loop; :mod:`relax_fusion.compute.attention_blocks` holds what one tile does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..errors import LoweringError
from ..tile_plan import PLAN_ATTR, PlanTable, TilePlan
from ..workload import Attention, Dim, MaskDims
from ..workload.json import WORKLOAD_ATTR, to_json
from .attention_blocks import TileEmitter
from .attention_tile import Operands, arrange, int64, tile_shape

CAPACITY = "kv_capacity"
"""Name of the position dimension of preallocated key and value buffers."""


class _Dims:
    """The sizes of a workload as int64 expressions, one variable for each name."""

    def __init__(self) -> None:
        self._vars: dict[str, tirx.Var] = {}

    def __call__(self, dim: Dim) -> tirx.Expr:
        """Return `dim` as a constant, or as the variable that bears its name."""
        return int64(dim) if isinstance(dim, int) else self.named(dim.name)

    def named(self, name: str) -> tirx.Var:
        """Return the variable called `name`, the same one every time."""
        return self._vars.setdefault(name, tirx.Var(name, "int64"))


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
        Parameters ``q, k, v, [bias], [mask], [slopes], [sinks], [kv_len], out``: four-dimensional
        buffers in the layouts of `work`, bias and boolean mask
        ``[batch or 1, q_heads or 1, q_len or 1, kv_len or 1]``, slopes and sinks ``[q_heads]`` and,
        for a workload with `kv_prefix`, the int64 number of positions to read of the
        ``kv_capacity`` that the key and value buffers hold.  (``relax.call_tir`` takes scalars
        among the inputs, in front of the outputs.)  All sizes are int64.  Rows that see no key are
        zero.  Attributes: ``op_pattern`` 8 (opaque), ``tirx.noalias``, the plan table and
        `WORKLOAD_ATTR`; the caller sets ``global_symbol``.

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
        sizes, operands = _parameters(work)
        _ranges(work, table, sizes, operands)
    return builder.get()


def operands_of(func: tirx.PrimFunc, work: Attention) -> tuple[Sizes, Operands]:
    """Return the sizes and the buffers of a function that `attention_prim_func` made of `work`."""
    params = iter(func.params)
    q, k, v = (next(params) for _ in range(3))
    optional = (work.bias_dims, work.mask_dims, work.alibi, work.sinks)
    bias, mask, slopes, sinks = (None if given is None else next(params) for given in optional)
    capacity = k.ty.shape[work.kv_layout.index("s")]
    kv_len = next(params) if work.kv_prefix else capacity
    batch, q_len = (q.ty.shape[work.q_layout.index(axis)] for axis in "bs")
    operands = Operands(q, k, v, bias, mask, slopes, sinks, next(params))
    return Sizes(batch, q_len, kv_len, capacity), operands


def range_suffix(index: int) -> str:
    """Return what the names of the blocks of entry number `index` of the plan table end in."""
    return f"_r{index}"


def _parameters(work: Attention) -> tuple[Sizes, Operands]:
    """Declare the parameters in their order."""
    dims = _Dims()
    kv_len = (
        dims.named("kv_len")
        if work.kv_prefix and isinstance(work.kv_len, int)
        else dims(work.kv_len)
    )
    sizes = Sizes(
        dims(work.batch),
        dims(work.q_len),
        kv_len,
        dims.named(CAPACITY) if work.kv_prefix else kv_len,
    )

    def tensor(name: str, shape: list[tirx.Expr], dtype: str) -> tirx.Var:
        return T.arg(name, T.buffer(shape, dtype))

    q_heads, kv_heads = int64(work.q_heads), int64(work.kv_heads)
    b, s, c = sizes.batch, sizes.q_len, sizes.kv_capacity
    head_dim, v_dim = int64(work.head_dim), int64(work.v_dim)
    q = tensor("q", arrange(work.q_layout, b, s, q_heads, head_dim), work.dtype)
    k = tensor("k", arrange(work.kv_layout, b, c, kv_heads, head_dim), work.dtype)
    v = tensor("v", arrange(work.kv_layout, b, c, kv_heads, v_dim), work.dtype)
    bias = _per_score("bias", work.bias_dims, work.bias_dtype, work, sizes)
    mask = _per_score("mask", work.mask_dims, "bool", work, sizes)
    slopes = tensor("slopes", [q_heads], work.alibi) if work.alibi else None
    sinks = tensor("sinks", [q_heads], work.sinks) if work.sinks else None
    if work.kv_prefix:
        T.arg(kv_len.name, kv_len)
    out = tensor("out", arrange(work.out_layout, b, s, q_heads, v_dim), work.out_dtype)
    return sizes, Operands(q, k, v, bias, mask, slopes, sinks, out)


def _per_score(
    name: str, dims: MaskDims | None, dtype: str, work: Attention, sizes: Sizes
) -> tirx.Var | None:
    """Declare a tensor with an element for each score, of size 1 where it broadcasts."""
    if dims is None:
        return None
    full = (sizes.batch, int64(work.q_heads), sizes.q_len, sizes.kv_len)
    shape = [size if has else int64(1) for size, has in zip(full, dims, strict=True)]
    return T.arg(name, T.buffer(shape, dtype))


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
