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

from .attention_core import address, load_sinks, merge


@triton.jit
def attention_combine(parts_ptr, lse_ptr, sinks_ptr, out, Q_LEN, SPLITS, C: tl.constexpr):
    """Finish one row of one head.  Grid: ``(batch * heads * Q_LEN,)``.

    Parameters
    ----------
    parts_ptr, lse_ptr : float32
        The workspaces of `attention_pointer`.
    sinks_ptr : [heads]
    out : HeadTensor
    Q_LEN, SPLITS : int32
        Queries, and how many programs shared the keys.
    C : Constants
        `parts`, a power of two, is not less than `SPLITS`.
    """
    KV_HEADS: tl.constexpr = C.heads // C.group
    row = tl.program_id(0)
    rows = tl.num_programs(0).to(tl.int64)
    query = row // C.group % Q_LEN
    pair = row // C.group // Q_LEN
    head = pair % KV_HEADS * C.group + row % C.group
    splits = tl.arange(0, C.parts)
    columns = tl.arange(0, triton.next_power_of_2(C.v_dim))
    part_rows = splits * rows + row
    inside = (splits < SPLITS)[:, None] & (columns < C.v_dim)[None, :]
    out_row = address(out, pair // KV_HEADS, query, head)
    if C.pdl:
        # At once, so that a projection has time to ask for its weights: what is in front of this
        # kernel has waited, and so nothing but that is at work yet
        gdc_launch_dependents()
        gdc_wait()
    lse = tl.load(lse_ptr + part_rows, mask=splits < SPLITS, other=float("-inf"))
    parts = tl.load(
        parts_ptr + part_rows[:, None] * C.v_dim + columns[None, :], mask=inside, other=0
    )
    sinks = 0.0
    if C.sinks:
        sinks = load_sinks(sinks_ptr, head)
    shares, inverse = merge(lse, 1.0, sinks, C.sinks)
    result = tl.sum(parts * shares[:, None], axis=0) * inverse
    tl.store(out_row + columns, result.to(out.ptr.dtype.element_ty), mask=columns < C.v_dim)
