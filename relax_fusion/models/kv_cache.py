"""The PrimFunc that puts new keys and values into the cache, one call per layer.

The cache is a plain tensor ``[batch, max_seq_len, kv_heads, head_dim]`` that the caller owns and
the call updates in place. The function is one elementwise block over (batch, sequence, head,
lane), so that any elementwise schedule rule can bind it to threads as one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from tvm import tirx
from tvm.relax.frontend.nn import Tensor, op
from tvm.script import tirx as T

from ..matching.expressions import int64
from ..transforms.modules import APPEND_ATTR, OPAQUE
from .layers import slice_rows

Cache: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values, each ``[batch, max_seq_len, kv_heads, head_dim]``."""

End: TypeAlias = tirx.Var | Tensor
"""The tokens in a cache after a call, int64; or a tensor with those before it, int32 ``[1]``."""


@dataclass(frozen=True)
class Heads:
    """How the columns of a merged query, key, value projection are laid out."""

    query: int
    kv: int
    dim: int

    @property
    def merged(self) -> int:
        """Rows of the merged projection's weight."""
        return (self.query + 2 * self.kv) * self.dim


def append(qkv: Tensor, cache: Cache, end: End, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Write keys and values of a merged projection in place.

    Returns queries ``[batch, seq_len, query, dim]``, a slice that an attention reads where it lies,
    and the two caches after the update.

    `qkv`: ``[batch, seq_len, (query + 2 * kv) * dim]``.
    `cache`: of its rows those of this call's `seq_len` tokens are overwritten.
    `end`: where these are; never rows behind the last.
    `heads`: the head counts.
    """
    batch, seq_len, _ = qkv.shape
    func = kv_append(heads, cache[0].shape[1], qkv.dtype, isinstance(end, Tensor))
    keys, values = op.tensor_ir_inplace_op(
        for_sizes(func, qkv),
        "kv_append",
        args=[qkv, *cache, end],
        inplace_indices=[1, 2],
        out=list(cache),
    )
    queries = slice_rows(qkv, 2, 0, heads.query * heads.dim)
    return op.reshape(queries, (batch, seq_len, heads.query, heads.dim)), keys, values


def write(k: Tensor, v: Tensor, cache: Cache, end: End) -> Cache:
    """Write keys and values ``[batch, seq_len, kv, dim]`` in place; return the updated caches."""
    _, max_len, heads, dim = cache[0].shape
    func = kv_write(heads, (dim, cache[1].shape[3]), max_len, k.dtype, isinstance(end, Tensor))
    keys, values = op.tensor_ir_inplace_op(
        for_sizes(func, k),
        "kv_write",
        args=[k, v, *cache, end],
        inplace_indices=[2, 3],
        out=list(cache),
    )
    return keys, values


@cache
def kv_write(
    heads: int, dims: tuple[int, int], max_len: int, dtype: str, counted: bool = False
) -> tirx.PrimFunc:
    """Build the PrimFunc that appends keys and values that are tensors of their own.

    `dims`: features of a head's keys and of its values.
    `counted`: a tensor tells where, see `End`.
    """
    hkv, of_keys, of_values, max_rows = map(int64, (heads, *dims, max_len))
    wide, alike = int64(max(dims)), dims[0] == dims[1]

    @T.prim_func(private=True, s_tir=True)
    def func(
        k_handle: T.handle,
        v_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        end: T.handle if counted else T.int64,  # type: ignore[valid-type]
    ):
        T.func_attr({"op_pattern": OPAQUE, "tirx.noalias": True})
        batch, seq_len = T.int64(), T.int64()
        k = T.match_buffer(k_handle, (batch, seq_len, hkv, of_keys), dtype)
        v = T.match_buffer(v_handle, (batch, seq_len, hkv, of_values), dtype)
        keys = T.match_buffer(keys_handle, (batch, max_rows, hkv, of_keys), dtype)
        values = T.match_buffer(values_handle, (batch, max_rows, hkv, of_values), dtype)
        first = T.meta_var(first_row(end, max_rows, seq_len) if counted else end - seq_len)
        for iters in T.grid(batch, seq_len, hkv, wide):
            with T.sblock("kv_write"):
                b, s, h, d = T.axis.remap("SSSS", iters)
                if alike:  # known here, and no condition in the kernel
                    keys[b, first + s, h, d] = k[b, s, h, d]
                    values[b, first + s, h, d] = v[b, s, h, d]
                else:
                    if d < of_keys:
                        keys[b, first + s, h, d] = k[b, s, h, d]
                    if d < of_values:
                        values[b, first + s, h, d] = v[b, s, h, d]

    return func.with_attr(APPEND_ATTR, {"keys": 0, "values": 0}) if alike else func


@cache
def kv_append(heads: Heads, max_len: int, dtype: str, counted: bool = False) -> tirx.PrimFunc:
    """Build the PrimFunc that appends the keys and values of a merged projection.

    It is parsed once for all layers, as TVMScript's parser looks at every module that is loaded.
    `counted`: a tensor tells where, see `End`.
    """
    hq, hkv, dim = map(int64, (heads.query, heads.kv, heads.dim))
    merged, max_rows = int64(heads.merged), int64(max_len)

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        end: T.handle if counted else T.int64,  # type: ignore[valid-type]
    ):
        T.func_attr({"op_pattern": OPAQUE, "tirx.noalias": True})
        batch, seq_len = T.int64(), T.int64()
        qkv = T.match_buffer(qkv_handle, (batch, seq_len, merged), dtype)
        keys = T.match_buffer(keys_handle, (batch, max_rows, hkv, dim), dtype)
        values = T.match_buffer(values_handle, (batch, max_rows, hkv, dim), dtype)
        first = T.meta_var(first_row(end, max_rows, seq_len) if counted else end - seq_len)
        for iters in T.grid(batch, seq_len, hkv, dim):
            with T.sblock("kv_append"):
                b, s, h, d = T.axis.remap("SSSS", iters)
                keys[b, first + s, h, d] = qkv[b, s, (hq + h) * dim + d]
                values[b, first + s, h, d] = qkv[b, s, (hq + hkv + h) * dim + d]

    return func.with_attr(APPEND_ATTR, {"keys": heads.query, "values": heads.query + heads.kv})


def first_row(handle: tirx.Var, rows: tirx.Expr, seq_len: tirx.Expr) -> tirx.Expr:
    """Return the row at which writing begins where a tensor says how many there are."""
    return T.min(T.Cast("int64", T.match_buffer(handle, (1,), "int32")[0]), rows - seq_len)


def for_sizes(func: tirx.PrimFunc, first: Tensor) -> tirx.PrimFunc:
    """Return `func` with the sizes of its first parameter that are known."""
    symbols = func.params[0].ty.shape
    pairs = zip(first.shape, symbols, strict=True)
    sizes = [int64(n) if isinstance(n, int) else v for n, v in pairs]
    return func.specialize({func.params[0]: tirx.decl_buffer(sizes, first.dtype)})
