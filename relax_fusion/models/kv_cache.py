"""The PrimFunc that puts new keys and values into the cache, one call per layer.

The cache is a plain tensor ``[batch, max_seq_len, kv_heads, head_dim]`` that the caller owns and
the call updates in place. The function is one elementwise block over (batch, sequence, head,
lane), so that any elementwise schedule rule can bind it to threads as one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tvm import tirx
from tvm.relax.frontend.nn import Tensor, op
from tvm.script import tirx as T

INJECTIVE_OPAQUE = 8  # relax OpPatternKind.kOpaque: writes into arguments must not be fused away


@dataclass(frozen=True)
class Heads:
    """How the columns of a merged query, key, value projection are laid out.

    Parameters
    ----------
    query, kv : int
        Number of query heads and of key/value heads.
    dim : int
        Width of one head.
    """

    query: int
    kv: int
    dim: int

    @property
    def merged(self) -> int:
        """Rows of the merged projection's weight."""
        return (self.query + 2 * self.kv) * self.dim


def append(
    qkv: Tensor,
    cache: tuple[Tensor, Tensor],
    total_len: tirx.Var,
    heads: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a merged projection, and write keys and values in place.

    Parameters
    ----------
    qkv : Tensor
        ``[batch, seq_len, (query + 2 * kv) * dim]``.
    cache : tuple[Tensor, Tensor]
        Keys and values, each ``[batch, max_seq_len, kv, dim]``; rows
        ``total_len - seq_len .. total_len`` are overwritten.
    total_len : tirx.Var
        Tokens in the cache after this call, int64.
    heads : Heads
        The head counts.

    Returns
    -------
    tuple[Tensor, Tensor, Tensor]
        Queries ``[batch, seq_len, query, dim]`` and the two caches after the update.
    """
    batch, seq_len, _ = qkv.shape
    queries = Tensor.placeholder((batch, seq_len, heads.query, heads.dim), qkv.dtype)
    out = [*cache, queries]
    max_len = cache[0].shape[1]
    keys, values, copied = op.tensor_ir_inplace_op(
        _for_sizes(kv_append(heads, max_len, qkv.dtype), qkv),
        "kv_append",
        args=[qkv, *cache, total_len],
        inplace_indices=[1, 2, -1],
        out=out,
    )
    return copied, keys, values


def write(
    k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], total_len: tirx.Var
) -> tuple[Tensor, Tensor]:
    """Write keys and values ``[batch, seq_len, kv, dim]`` in place; return the updated caches."""
    _, max_len, heads, dim = cache[0].shape
    keys, values = op.tensor_ir_inplace_op(
        _for_sizes(kv_write(heads, dim, max_len, k.dtype), k),
        "kv_write",
        args=[k, v, *cache, total_len],
        inplace_indices=[2, 3],
        out=list(cache),
    )
    return keys, values


@cache
def kv_write(heads: int, dim: int, max_len: int, dtype: str) -> tirx.PrimFunc:
    """Build the PrimFunc that appends keys and values that are tensors of their own."""
    hkv, width, max_rows = map(_int64, (heads, dim, max_len))

    @T.prim_func(private=True, s_tir=True)
    def func(
        k_handle: T.handle,
        v_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        total_len: T.int64,
    ):
        T.func_attr({"op_pattern": INJECTIVE_OPAQUE, "tirx.noalias": True})
        batch = T.int64()
        seq_len = T.int64()
        k = T.match_buffer(k_handle, (batch, seq_len, hkv, width), dtype)
        v = T.match_buffer(v_handle, (batch, seq_len, hkv, width), dtype)
        keys = T.match_buffer(keys_handle, (batch, max_rows, hkv, width), dtype)
        values = T.match_buffer(values_handle, (batch, max_rows, hkv, width), dtype)
        for iters in T.grid(batch, seq_len, hkv, width):
            with T.sblock("kv_write"):
                b, s, h, d = T.axis.remap("SSSS", iters)
                keys[b, total_len - seq_len + s, h, d] = k[b, s, h, d]
                values[b, total_len - seq_len + s, h, d] = v[b, s, h, d]

    return func


@cache
def kv_append(heads: Heads, max_len: int, dtype: str) -> tirx.PrimFunc:
    """Build the PrimFunc that appends keys and values and copies the queries out.

    It is parsed once for all layers, as TVMScript's parser looks at every module that is loaded.
    """
    hq, hkv, dim = map(_int64, (heads.query, heads.kv, heads.dim))
    merged, max_rows = _int64(heads.merged), _int64(max_len)

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        total_len: T.int64,
        queries_handle: T.handle,
    ):
        T.func_attr({"op_pattern": INJECTIVE_OPAQUE, "tirx.noalias": True})
        batch = T.int64()
        seq_len = T.int64()
        qkv = T.match_buffer(qkv_handle, (batch, seq_len, merged), dtype)
        keys = T.match_buffer(keys_handle, (batch, max_rows, hkv, dim), dtype)
        values = T.match_buffer(values_handle, (batch, max_rows, hkv, dim), dtype)
        queries = T.match_buffer(queries_handle, (batch, seq_len, hq, dim), dtype)
        for iters in T.grid(batch, seq_len, hq + hkv + hkv, dim):
            with T.sblock("kv_append"):
                b, s, h, d = T.axis.remap("SSSS", iters)
                if h < hq:
                    queries[b, s, h, d] = qkv[b, s, h * dim + d]
                elif h < hq + hkv:
                    keys[b, total_len - seq_len + s, h - hq, d] = qkv[b, s, h * dim + d]
                else:
                    values[b, total_len - seq_len + s, h - hq - hkv, d] = qkv[b, s, h * dim + d]

    return func


def _for_sizes(func: tirx.PrimFunc, first: Tensor) -> tirx.PrimFunc:
    """Return `func` with the sizes of its first parameter that are known."""
    symbols = func.params[0].ty.shape
    sizes = [
        _int64(n) if isinstance(n, int) else v for n, v in zip(first.shape, symbols, strict=True)
    ]
    return func.specialize({func.params[0]: tirx.decl_buffer(sizes, first.dtype)})


def _int64(value: int) -> tirx.IntImm:
    # Relax extents are int64; a plain int would become an int32 loop and int32 shapes.
    return tirx.IntImm("int64", value)
