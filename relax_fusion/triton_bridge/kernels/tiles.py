"""Addresses of tiles, shared by the kernel families.

A weight is ``[n, k]`` (layout ``"nk"``) or ``[k, n]`` (``"kn"``).  Either way a tile is seen as
``[n, k]`` here: the strides differ, and Triton's coalescing follows the contiguous dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import finish, glu


@triton.jit
def swizzled_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and column tile of linear index `tile`, in an order that reuses L2.

    `GROUP_M` row tiles are walked for each column tile before the next column tile, so the tiles
    in flight at one time form a near square of the output, which reads the fewest bytes.
    """
    in_group = GROUP_M * tiles_n
    first_m = tile // in_group * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % in_group
    return first_m + within % height, within // height


@triton.jit
def half_start(UP: tl.constexpr, N: tl.constexpr, MERGED: tl.constexpr):
    """Return the output feature at which the gate (or, with `UP`, the up projection) starts.

    `MERGED` is ``"no"`` where they are two weights, else ``"gate_first"`` or ``"up_first"``: then
    both pointers are those of one weight of ``2 N`` features (and of one bias).
    """
    if MERGED == "no":
        return 0
    elif (MERGED == "gate_first") == UP:
        return N
    else:
        return 0


@triton.jit
def weight_offsets(
    n_index, k_index, N: tl.constexpr, K: tl.constexpr, LAYOUT: tl.constexpr, MERGED: tl.constexpr
):
    """Return int64 element offsets ``[n, k]`` of a weight tile from its row and column indices."""
    n64 = n_index.to(tl.int64)
    k64 = k_index.to(tl.int64)
    if LAYOUT == "nk":
        return n64[:, None] * K + k64[None, :]
    else:
        return n64[:, None] + k64[None, :] * (N if MERGED == "no" else 2 * N)


@triton.jit
def half_pointer(
    ptr,
    UP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Return the pointer of the gate's or the up projection's weight."""
    if LAYOUT == "nk":
        return ptr + tl.full([], half_start(UP, N, MERGED), tl.int64) * K
    else:
        return ptr + half_start(UP, N, MERGED)


@triton.jit
def load_in_range(
    ptrs,
    row_index,
    column_index,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Load ``ptrs [row, column]``, zero outside ``[ROWS, COLUMNS]``; an even side is not tested."""
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(ptrs, eviction_policy=EVICT)
    elif EVEN_ROWS:
        mask = (column_index < COLUMNS)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICT)
    elif EVEN_COLUMNS:
        mask = (row_index < ROWS)[:, None]
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICT)
    else:
        mask = (row_index < ROWS)[:, None] & (column_index < COLUMNS)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def load_bias(bias_ptr, n_index, UP: tl.constexpr, N: tl.constexpr, MERGED: tl.constexpr):
    """Return the float32 biases ``[n]`` of those features, zero beyond the last."""
    pointers = bias_ptr + half_start(UP, N, MERGED) + n_index
    return tl.load(pointers, mask=n_index < N, other=0.0).to(tl.float32)


@triton.jit
def tile_offsets(m_index, n_index, M, N: tl.constexpr):
    """Return the int64 offsets and the mask ``[m, n]`` of a tile of a compact ``[M, N]`` tensor."""
    offsets = m_index.to(tl.int64)[:, None] * N + n_index[None, :]
    return offsets, (m_index < M)[:, None] & (n_index < N)[None, :]


@triton.jit
def store_output(
    out_ptr,
    residual_ptr,
    bias_ptr,
    up_bias_ptr,
    acc,
    acc_up,
    m_index,
    n_index,
    M,
    N: tl.constexpr,
    GATED: tl.constexpr,
    MERGED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Add biases, gate, activate, add the residual, and store ``[m, n]`` in the dtype of `out`.

    `acc` and `acc_up` are float32 ``[m, n]``; `acc_up` is ignored where not `GATED`.
    """
    if HAS_BIAS:
        acc += load_bias(bias_ptr, n_index, False, N, MERGED)[None, :]
    if GATED:
        if HAS_BIAS:
            acc_up += load_bias(up_bias_ptr, n_index, True, N, MERGED)[None, :]
        acc = glu(acc, acc_up, ACTIVATION)
    offsets, mask = tile_offsets(m_index, n_index, M, N)
    residual = 0.0
    if RESIDUAL != "none":
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    acc = finish(acc, residual, "none" if GATED else ACTIVATION, RESIDUAL)
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
