"""Merges what programs that shared the keys of an attention found, each over its own.

``out = sum_s 2^(lse_s - lse) part_s`` with ``lse = log2(sum_s 2^lse_s)``, where a sink is one more
term of the sum under the logarithm.

Regime: latency.  It is launched while `attention_pointer` runs, and its bytes, ``4 splits v_dim`` a
row, are in L2.  Shape: a program has `C.block_n` columns of a row and asks for `C.parts` parts of
them at once, which lie side by side: it is one warp that waits for no other, and the addresses are
one and constants.  Further parts follow by the online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_core import address, inverse_of, load_sinks, weigh


@triton.jit
def attention_combine(parts_ptr, lse_ptr, sinks_ptr, out, Q_LEN, SPLITS, C: tl.constexpr):
    """Finish some columns of a row of a head.

    Grid: ``(batch * heads * Q_LEN, ceil(v_dim / block_n))``.

    Parameters
    ----------
    parts_ptr, lse_ptr : float32
        The workspaces of `attention_pointer`.
    sinks_ptr : [heads]
    out : HeadTensor
    Q_LEN, SPLITS : int32
        Queries, and how many programs shared the keys.
    C : Constants
        `block_n` and `parts` are powers of two.
    """
    KV_HEADS: tl.constexpr = C.heads // C.group
    row = tl.program_id(0)
    query = row // C.group % Q_LEN
    pair = row // C.group // Q_LEN
    head = pair % KV_HEADS * C.group + row % C.group
    columns = tl.program_id(1) * C.block_n + tl.arange(0, C.block_n)
    out_row = address(out, pair // KV_HEADS, query, head)
    first_part = row.to(tl.int64) * SPLITS
    lse_ptr += first_part
    parts_ptr += first_part * C.v_dim
    if C.pdl:
        # At once, so that a projection has time to ask for its weights: what is in front of this
        # kernel has waited, and so nothing but that is at work yet
        gdc_launch_dependents()
        gdc_wait()
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if C.sinks:
        highest = tl.zeros([1], tl.float32) + load_sinks(sinks_ptr, head)
        total += 1.0
    result = tl.zeros([C.block_n], tl.float32)
    for first in tl.range(0, SPLITS, C.parts, num_stages=1):
        split = first + tl.arange(0, C.parts)
        lse = tl.load(lse_ptr + split, mask=split < SPLITS, other=float("-inf"))
        inside = (split < SPLITS)[:, None] & (columns < C.v_dim)[None, :]
        ptrs = parts_ptr + split[:, None] * C.v_dim + columns[None, :]
        parts = tl.load(ptrs, mask=inside, other=0.0)
        weights, rescale, highest, total = weigh(lse[None, :], highest, total)
        weighed = parts * tl.reshape(weights, [C.parts])[:, None]
        result = result * rescale + tl.sum(weighed, axis=0)
    result *= inverse_of(total)
    tl.store(out_row + columns, result.to(out.ptr.dtype.element_ty), mask=columns < C.v_dim)
