"""Adds the parts of a matmul that was split over k, and finishes it.

``out = epilogue(scale * sum_s parts[s])`` for the parts that `matmul_pointer` writes, of each
product of a launch.

Regime: bytes, mostly from L2: ``4 split (1 + gated) rows n`` read, ``2 rows n`` written.  The parts
are added in the order of s by one lane, so the result does not depend on which part was done first.

Shape: a program takes `block_m` x `block_n` outputs and requests all parts of them at once, since
the loop over s is unrolled and its loads do not depend on one another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import inverse_rms
from .addresses import store_output, tile_features, tile_offsets
from .products import of_product


@triton.jit
def reduce_tile(args, p, tile_n, F: tl.constexpr, C: tl.constexpr):
    """Finish one tile of a product."""
    M, eps = args
    m_index = tl.program_id(0) * C.block_m + tl.arange(0, C.block_m)
    n_index = tile_features(tile_n, C.block_n, F.half)
    offsets, mask = tile_offsets(m_index, n_index, M, F.n)
    size = tl.full([], F.n, tl.int64) * M
    parts: tl.constexpr = 2 if F.gated else 1
    acc = tl.zeros([C.block_m, C.block_n], tl.float32)
    acc_up = tl.zeros([C.block_m, C.block_n], tl.float32)
    squares = tl.zeros([C.block_m], tl.float32)
    for split in tl.static_range(C.split_k):
        part_ptr = p.parts + size * (split * parts)
        acc += tl.load(part_ptr + offsets, mask=mask, other=0.0)
        if F.gated:
            acc_up += tl.load(part_ptr + size + offsets, mask=mask, other=0.0)
        if C.norm == "rms":
            sums_ptr = p.parts + size * (C.split_k * parts) + split * M
            squares += tl.load(sums_ptr + m_index, mask=m_index < M, other=1.0)
    if C.norm == "rms":
        scale = inverse_rms(squares, C.k, eps)[:, None]
        acc *= scale
        acc_up *= scale
    store_output(p, acc, acc_up, m_index, n_index, tile_n, M, F)


@triton.jit
def split_reduce(
    M, eps, p0, F0: tl.constexpr, C: tl.constexpr,
    p1=None, F1: tl.constexpr = None, p2=None, F2: tl.constexpr = None,
):  # fmt: skip
    """Finish one tile.  Grid: ``(ceil(M / block_m), column tiles)``.

    Parameters
    ----------
    M : int32
        Rows.
    eps : float32
        Of an RMSNorm that `matmul_pointer` computed on the way (``C.norm``).
    p0, p1, p2 : Tensors
        With their parts.
    """
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    of_product(reduce_tile, tl.program_id(1), (M, eps), (p0, p1, p2), F0, F1, F2, C)
