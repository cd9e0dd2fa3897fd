"""Adds the results of the pairs of a token, in their order, and the residual.

Regime: bytes, ``(chosen + 1 or 2) * 2 n`` a token.  Shape: `BLOCK` columns of one token a program,
all pairs requested at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def expert_sum(
    parts_ptr, residual_ptr, out_ptr,
    CHOSEN: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the pairs of a token.  Grid: ``(tokens, ceil(N / BLOCK))``.

    Parameters
    ----------
    parts_ptr : [tokens, CHOSEN, N]
    residual_ptr : [tokens, N], or None
    out_ptr : [tokens, N]
    CHOSEN, N, BLOCK : int
    PDL : bool
        Whether it is launched while the kernel in front may still run.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        part_ptr = parts_ptr + (token * CHOSEN + place) * N
        total += tl.load(part_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * N + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + column, total.to(out_ptr.dtype.element_ty), mask=mask)
