"""Merges what programs that shared the keys of an attention found, each over its own.

``out = sum_s 2^(lse_s - lse) part_s`` with ``lse = log2(sum_s 2^lse_s)``, where a sink is one more
term of the sum under the logarithm.

Regime: latency.  It is launched while `attention_pointer` runs, and its bytes, ``4 splits v_dim`` a
row, are in L2.  Shape: a program a row, which asks for all parts of it at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_scores import LOG2_E


@triton.jit
def attention_combine(
    parts_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    Q_LEN,
    SPLITS,
    out_stride_b,
    out_stride_s,
    out_stride_n,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finish one row of one head.  Grid: ``(batch * HEADS * Q_LEN,)``.

    Parameters
    ----------
    parts_ptr, lse_ptr : float32
        The workspaces of `attention_pointer`.
    sinks_ptr : [HEADS]
    out_ptr
        Strides of batch, sequence and head (b, s, n) in elements; that of the features is 1.
    Q_LEN, SPLITS : int32
        Queries, and how many programs shared the keys: at most `BLOCK_S`, a power of two.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row = tl.program_id(0)
    rows = tl.num_programs(0).to(tl.int64)
    query = row // GROUP % Q_LEN
    pair = row // GROUP // Q_LEN
    head = pair % KV_HEADS * GROUP + row % GROUP
    splits = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, triton.next_power_of_2(V_DIM))
    part_rows = splits * rows + row
    inside = (splits < SPLITS)[:, None] & (columns < V_DIM)[None, :]
    out_ptr += (pair // KV_HEADS).to(tl.int64) * out_stride_b
    out_ptr += query.to(tl.int64) * out_stride_s + head.to(tl.int64) * out_stride_n
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lse = tl.load(lse_ptr + part_rows, mask=splits < SPLITS, other=float("-inf"))
    parts = tl.load(parts_ptr + part_rows[:, None] * V_DIM + columns[None, :], mask=inside, other=0)
    most = tl.max(lse, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        most = tl.maximum(most, sink)
    base = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp2(lse - base)
    total = tl.sum(weights, axis=0)
    if SINKS:
        total += tl.exp2(sink - base)
    result = tl.sum(parts * weights[:, None], axis=0) * (1.0 / tl.where(total == 0.0, 1.0, total))
    tl.store(out_ptr + columns, result.to(out_ptr.dtype.element_ty), mask=columns < V_DIM)
