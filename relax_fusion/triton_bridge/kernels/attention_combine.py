"""Merges what programs that shared the keys of an attention found, each over its own.

``out = sum_s 2^(lse_s - lse) part_s`` with ``lse = log2(sum_s 2^lse_s)``, where a sink is one more
term of the sum under the logarithm.

Regime: latency.  It is launched while `attention_pointer` runs, and its bytes, ``4 splits v_dim`` a
row, are in L2.  Shape: few programs, a warp of which takes a row and asks for all of its parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_pointer import int64
from .attention_scores import LOG2_E


@triton.jit
def attention_combine(
    parts_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    Q_LEN,
    ROWS,
    SPLITS,
    out_stride_b,
    out_stride_s,
    out_stride_n,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finish `BLOCK_R` rows.  Grid: ``(ceil(ROWS / BLOCK_R),)``; best as many warps as rows.

    Parameters
    ----------
    parts_ptr, lse_ptr : float32
        The workspaces of `attention_pointer`.
    sinks_ptr : [HEADS]
    out_ptr
        Strides of batch, sequence and head (b, s, n) in elements; that of the features is 1.
    Q_LEN, ROWS, SPLITS : int32
        Queries, ``batch * HEADS * Q_LEN``, and how many programs shared the keys.
    BLOCK_S, AT_ONCE : powers of two
        The most that `SPLITS` can be, and of how many of them parts are in registers at one time.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < ROWS
    pair = row // GROUP // Q_LEN
    head = pair % (HEADS // GROUP) * GROUP + row % GROUP
    columns = tl.arange(0, triton.next_power_of_2(V_DIM))
    in_width = (columns < V_DIM)[None, :]
    out_rows = (pair // (HEADS // GROUP)).to(tl.int64) * out_stride_b
    out_rows += (row // GROUP % Q_LEN).to(tl.int64) * out_stride_s
    out_rows += head.to(tl.int64) * out_stride_n
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    most = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, columns.shape[0]], tl.float32)
    if SINKS:
        most = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    for start in tl.static_range(0, BLOCK_S, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        inside = (split < SPLITS)[:, None] & in_rows[None, :]
        part_rows = split[:, None] * int64(ROWS) + row[None, :]
        lse = tl.load(lse_ptr + part_rows, mask=inside, other=float("-inf"))
        part_ptrs = parts_ptr + part_rows[:, :, None] * V_DIM + columns[None, None, :]
        parts = tl.load(part_ptrs, mask=inside[:, :, None] & in_width[None, :, :], other=0.0)
        new_most = tl.maximum(most, tl.max(lse, axis=0))
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(lse - base[None, :])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        most = new_most
    result = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    out_mask = in_rows[:, None] & in_width
    tl.store(out_ptr + out_rows[:, None] + columns[None, :], result, mask=out_mask)
