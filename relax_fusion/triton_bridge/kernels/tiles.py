"""Addresses of tiles, shared by the kernel families.

A weight is ``[n, k]`` (layout ``"nk"``) or ``[k, n]`` (``"kn"``).  Either way a tile is seen as
``[n, k]`` here: the strides differ, and Triton's coalescing follows the contiguous dimension.

Where heads are rotated (rope), the two features of a pair lie half a head apart, and a tile has
both of each of its pairs: see `tile_features`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import after_step, along_of, count_of, glu, kind_of, number_of, operand_of

MOST_PAIRS = tl.constexpr(8192)
"""Pairs of features that a program turns at once: with more, their angles spill registers."""


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
def first_of_pair(pair_index, HALF: tl.constexpr):
    """Return the first feature of pairs of features `HALF` apart, heads being ``2 HALF`` wide."""
    return pair_index + pair_index // HALF * HALF


@triton.jit
def tile_features(tile_n, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Return the features ``[BLOCK_N]`` of a column tile.

    With `HALF`, it has whole heads where they fit, as they lie; else a part of one (or of more),
    the first features of half as many pairs, then the second ones.
    """
    column = tl.arange(0, BLOCK_N)
    if HALF == 0 or BLOCK_N % (2 * HALF) == 0:
        return tile_n * BLOCK_N + column
    else:
        RUN: tl.constexpr = BLOCK_N // 2
        return first_of_pair(tile_n * RUN + column % RUN, HALF) + column // RUN * HALF


@triton.constexpr_function
def column_run(N, BLOCK_N, HALF):
    """Return how many columns of a tile lie side by side in a weight ``[k, n]`` at least.

    Runs of so many begin at multiples of it, and do not go across the end.
    """
    whole = not HALF or BLOCK_N % (2 * HALF) == 0
    return min(N & -N, BLOCK_N if whole else min(BLOCK_N // 2, HALF & -HALF))


@triton.jit
def weight_rows(n_index, N: tl.constexpr, LAYOUT: tl.constexpr, RUN: tl.constexpr):
    """Return indices within the weight for the columns of a tile, any for those beyond the end.

    In ``[k, n]`` runs of columns stay runs: else each element would be a load of its own.
    """
    if LAYOUT == "kn" and RUN > 1:
        return tl.max_contiguous(tl.multiple_of(n_index % N, RUN), RUN)
    else:
        return tl.where(n_index < N, n_index, 0)


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
    return load_row(bias_ptr + half_start(UP, N, MERGED), n_index, N)


@triton.jit
def load_row(row_ptr, n_index, N: tl.constexpr):
    """Return the float32 elements ``[n]`` of those features, zero beyond the last."""
    return tl.load(row_ptr + n_index, mask=n_index < N, other=0.0).to(tl.float32)


@triton.jit
def tile_offsets(m_index, n_index, M, N: tl.constexpr):
    """Return the int64 offsets and the mask ``[m, n]`` of a tile of a compact ``[M, N]`` tensor."""
    offsets = m_index.to(tl.int64)[:, None] * N + n_index[None, :]
    return offsets, (m_index < M)[:, None] & (n_index < N)[None, :]


@triton.jit
def store_output(
    out_ptr,
    operands,
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
    STEPS: tl.constexpr,
    rope=None,
    HALF: tl.constexpr = 0,
    ROTATED: tl.constexpr = 0,
):
    """Add biases, gate, go through `STEPS`, and store ``[m, n]`` in the dtype of `out`.

    `acc` and `acc_up` are float32 ``[m, n]``; `acc_up` is ignored where not `GATED`.  With
    `HALF`, heads are rotated after the bias, and nothing else is done: see `store_rotated_tile`.
    """
    if HAS_BIAS:
        acc += load_bias(bias_ptr, n_index, False, N, MERGED)[None, :]
    if HALF > 0:
        store_rotated_tile(out_ptr, acc, m_index, M, N, rope, HALF, ROTATED)
        return
    if GATED:
        if HAS_BIAS:
            acc_up += load_bias(up_bias_ptr, n_index, True, N, MERGED)[None, :]
        acc = glu(acc, acc_up, ACTIVATION)
    offsets, mask = tile_offsets(m_index, n_index, M, N)
    for i in tl.static_range(count_of(STEPS)):
        operand = 0.0
        if along_of(STEPS, i) == "whole":
            operand = tl.load(operands[operand_of(STEPS, i)] + offsets, mask=mask, other=0.0).to(
                tl.float32
            )
        elif along_of(STEPS, i) == "row":
            operand = load_row(operands[operand_of(STEPS, i)], n_index, N)[None, :]
        acc = after_step(acc, operand, kind_of(STEPS, i), number_of(STEPS, i))
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_angles(cos_ptrs, sin_ptrs, mask):
    """Return float32 cosines and sines."""
    cos = tl.load(cos_ptrs, mask=mask, other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rotated(
    out_ptr,
    low,
    high,
    m_index,
    pair_index,
    M,
    N: tl.constexpr,
    rope,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Rotate pairs ``[m, pairs]`` by the angles of their rows, and store them.

    Features that stay are not multiplied: an infinite one would make NaN of its partner.
    """
    cos_ptr, sin_ptr, positions, _ = rope
    first = first_of_pair(pair_index, HALF)
    offsets, mask = tile_offsets(m_index, first, M, N)
    angle_row = m_index if positions is None else m_index % positions
    angles = angle_row.to(tl.int64)[:, None] * (2 * HALF) + (pair_index % HALF)[None, :]
    turns = mask & (first < ROTATED)[None, :]
    # One side after the other, so that the angles of one are in registers at a time.
    cos, sin = load_angles(cos_ptr + angles, sin_ptr + angles, turns)
    new_low = tl.where(turns, low * cos - high * sin, low)
    tl.store(out_ptr + offsets, new_low.to(out_ptr.dtype.element_ty), mask=mask)
    cos, sin = load_angles(cos_ptr + angles + HALF, sin_ptr + angles + HALF, turns)
    new_high = tl.where(turns, high * cos + low * sin, high)
    tl.store(out_ptr + offsets + HALF, new_high.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def part_of(x, part: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first or second `COLUMNS` columns of ``x [m, n]``, or all if they are as many."""
    ROWS: tl.constexpr = x.shape[0]
    if x.shape[1] == COLUMNS:
        return x
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS]), (0, 2, 1)))
        return left if part == 0 else right


@triton.jit
def store_rotated_tile(
    out_ptr, acc, m_index, M, N: tl.constexpr, rope, HALF: tl.constexpr, ROTATED: tl.constexpr
):
    """Rotate the pairs of a float32 tile ``[m, n]`` of `tile_features`, and store them.

    `rope` is ``(cos_ptr, sin_ptr, positions, tile_n)``: row i takes row ``i % positions`` of the
    cosines and sines ``[positions, 2 HALF]``, row i where that is None.  The first `ROTATED`
    features are rotated, the others stored as they are.
    """
    ROWS: tl.constexpr = acc.shape[0]
    PAIRS: tl.constexpr = acc.shape[1] // 2
    RUN: tl.constexpr = HALF if PAIRS % HALF == 0 else PAIRS
    low, high = tl.split(tl.permute(tl.reshape(acc, [ROWS, PAIRS // RUN, 2, RUN]), (0, 1, 3, 2)))
    low = tl.reshape(low, [ROWS, PAIRS])
    high = tl.reshape(high, [ROWS, PAIRS])
    PART: tl.constexpr = PAIRS // 2 if ROWS * PAIRS > MOST_PAIRS else PAIRS
    for part in tl.static_range(PAIRS // PART):
        pair_index = rope[3] * PAIRS + part * PART + tl.arange(0, PART)
        left, right = part_of(low, part, PART), part_of(high, part, PART)
        store_rotated(out_ptr, left, right, m_index, pair_index, M, N, rope, HALF, ROTATED)
