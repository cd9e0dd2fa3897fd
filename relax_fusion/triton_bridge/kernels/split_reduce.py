"""Adds the parts of a matmul that was split over k, and finishes it.

``out = epilogue(scale * sum_s parts[s])`` for the workspace that `matmul_pointer` writes.

Regime: bytes, mostly from L2: ``4 split (1 + gated) rows n`` read, ``2 rows n`` written.  The parts
are added in the order of s by one lane, so the result does not depend on which part was done first.

Shape: a program takes `BLOCK_M` x `BLOCK_N` outputs and requests all parts of them at once, since
the loop over s is unrolled and its loads do not depend on one another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import inverse_rms
from .tiles import store_output, tile_features, tile_offsets


@triton.jit
def split_reduce(
    workspace_ptr,
    bias_ptr,
    up_bias_ptr,
    operands,
    out_ptr,
    M,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    MERGED: tl.constexpr = "no",
    cos_ptr=None,
    sin_ptr=None,
    positions=None,
    HALF: tl.constexpr = 0,
    ROTATED: tl.constexpr = 0,
):
    """Finish one tile.  Grid: ``(ceil(M / BLOCK_M), ceil(N / BLOCK_N))``.

    Parameters
    ----------
    workspace_ptr : float32
        ``[SPLIT_K, 1 + GATED, M, N]``, then (NORM ``"rms"``) ``[SPLIT_K, M]`` sums of squares.
    bias_ptr, up_bias_ptr : [N];  out_ptr : [M, N];  operands : pointers, as `STEPS` say
    M : int32;  eps : float32
    cos_ptr, sin_ptr : [positions, 2 HALF], any float dtype
        With `HALF`: of the angles by which pairs of features `HALF` apart are turned.
    positions : int32
        Row i takes row ``i % positions`` of them; None for row i.
    HALF, ROTATED : int
        Half the width of a head, and how many features are rotated; 0 for no rotation.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m_index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_index = tile_features(tl.program_id(1), BLOCK_N, HALF)
    offsets, mask = tile_offsets(m_index, n_index, M, N)
    size = tl.full([], N, tl.int64) * M
    parts: tl.constexpr = 2 if GATED else 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for split in tl.static_range(SPLIT_K):
        part_ptr = workspace_ptr + size * (split * parts)
        acc += tl.load(part_ptr + offsets, mask=mask, other=0.0)
        if GATED:
            acc_up += tl.load(part_ptr + size + offsets, mask=mask, other=0.0)
        if NORM == "rms":
            sums_ptr = workspace_ptr + size * (SPLIT_K * parts) + split * M
            squares += tl.load(sums_ptr + m_index, mask=m_index < M, other=1.0)
    if NORM == "rms":
        scale = inverse_rms(squares, K, eps)[:, None]
        acc *= scale
        acc_up *= scale
    store_output(
        out_ptr,
        operands,
        bias_ptr,
        up_bias_ptr,
        acc,
        acc_up,
        m_index,
        n_index,
        M,
        N,
        GATED,
        MERGED,
        HAS_BIAS,
        ACTIVATION,
        STEPS,
        (cos_ptr, sin_ptr, positions, tl.program_id(1)),
        HALF,
        ROTATED,
    )
