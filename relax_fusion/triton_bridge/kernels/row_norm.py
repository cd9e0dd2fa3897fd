"""RMSNorm and LayerNorm of rows, with an optional residual add in front.

``y = norm(x [+ residual]) * ([1 +] gamma) [+ beta]`` for x of shape ``[rows, width]``, which may be
normalised itself before the residual is added.

Regime: bytes.  Each element of x (and of the residual) is read once and each of y (and of the sum)
written once; some ten operations an element.  With few rows it is latency: one load, one reduction
and one store, a few microseconds.  It precedes a matmul that wants its operand in memory: the
copy engine of Hopper feeds the matrix units straight from there, and the result is what the
unfused graph computes, to the bit that it rounds.

Shape: a row stays in the registers of one program from the load to the store, so the second pass
of a variance costs no traffic.  `ROWS` short rows share a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import affine, inverse_rms


@triton.jit
def row_norm(
    x_ptr,
    residual_ptr,
    gamma_ptr,
    beta_ptr,
    y_ptr,
    sum_ptr,
    first_ptr,
    M,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    STORE_SUM: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    UNIT_OFFSET: tl.constexpr = False,
    FIRST_EPS: tl.constexpr = None,
    FIRST_OFFSET: tl.constexpr = False,
    EACH: tl.constexpr = None,
):
    """Normalise `ROWS` rows.  Grid: ``(ceil(M / ROWS),)``.

    Parameters
    ----------
    x_ptr, residual_ptr : [M, WIDTH], float16, bfloat16 or float32
    gamma_ptr, beta_ptr, first_ptr : [WIDTH]
        The last is gamma of the norm of x; the others are [M / EACH, WIDTH] where that is given.
    y_ptr, sum_ptr : [M, WIDTH]
        The result, and ``x + residual`` (rounded to its dtype before it is normalised, as the
        unfused graph rounds it).
    M : int32
    eps : float32
    BLOCK : power of two, at least WIDTH
    NORM : {"rms", "layer", "none"}
    PDL : bool
        Wait for a predecessor and let a dependent start, where launched with that attribute.
    EARLY : bool
        Let the dependent start at once, not at the end.  That hides its launch where rows are few;
        with many, its programs would take the room of those of this kernel that are yet to start.
    UNIT_OFFSET, FIRST_OFFSET : bool
        Multiply by ``1 + gamma``.
    FIRST_EPS : float, optional
        Normalise x by its mean square and this before the residual is added.
    """
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = (row < M)[:, None] & (column < WIDTH)[None, :]
    in_row = column < WIDTH
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    x = x.to(tl.float32)
    # Before the reductions, so that their latency is behind that of x.
    if EACH is None:
        gamma = tl.load(gamma_ptr + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    else:
        shared = (row // EACH).to(tl.int64)[:, None] * WIDTH + column[None, :]
        gamma = tl.load(gamma_ptr + shared, mask=mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        gamma += 1.0
    beta = 0.0
    if HAS_BETA and EACH is None:
        beta = tl.load(beta_ptr + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    elif HAS_BETA:
        beta = tl.load(beta_ptr + shared, mask=mask, other=0.0).to(tl.float32)
    if FIRST_EPS is not None:
        first = tl.load(first_ptr + column, mask=in_row, other=0.0).to(tl.float32)
        if FIRST_OFFSET:
            first += 1.0
        x = x * inverse_rms(tl.sum(x * x, axis=1), WIDTH, FIRST_EPS)[:, None] * first[None, :]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = x.to(y_ptr.dtype.element_ty).to(tl.float32)
    if STORE_SUM:
        tl.store(sum_ptr + offsets, x.to(sum_ptr.dtype.element_ty), mask=mask)
    if NORM == "layer":
        x = tl.where(mask, x - tl.sum(x, axis=1)[:, None] / WIDTH, 0.0)
    if NORM != "none":
        scale = inverse_rms(tl.sum(x * x, axis=1), WIDTH, eps)
        x = affine(x * scale[:, None], gamma, beta, HAS_BETA)
    if NORM != "none" or not STORE_SUM:
        tl.store(y_ptr + offsets, x.to(y_ptr.dtype.element_ty), mask=mask)
    if PDL and not EARLY:
        gdc_launch_dependents()
