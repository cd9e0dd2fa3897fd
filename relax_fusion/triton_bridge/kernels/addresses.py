"""Addresses of tiles, shared by the kernel families.

A weight is ``[n, k]`` (layout ``"nk"``) or ``[k, n]`` (``"kn"``).  Either way a tile is seen as
``[n, k]`` here: the strides differ, and Triton's coalescing follows the contiguous dimension.

Where heads are rotated (rope), all features come in pairs `HALF` apart: half of what is rotated of
a head, or 1.  A tile has both of each of its pairs, see `tile_features`; `ROTATED` says which pairs
turn, see `turned_pairs`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import after_step, glu
from .products import along_of, count_of, kind_of, number_of, operand_of, rows_of

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
    """Return the first feature of pairs of features `HALF` apart, in groups of ``2 HALF``."""
    return pair_index + pair_index // HALF * HALF


@triton.jit
def tile_features(tile_n, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Return the features ``[BLOCK_N]`` of a column tile.

    With `HALF`, it has whole groups of ``2 HALF`` where they fit, as they lie; else a part of one
    (or of more), the first features of half as many pairs, then the second ones.
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
def weight_rows(n_index, N, LAYOUT: tl.constexpr, RUN: tl.constexpr):
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
    n_index, k_index, N, K: tl.constexpr, LAYOUT: tl.constexpr, MERGED: tl.constexpr
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
def store_output(p, acc, acc_up, m_index, n_index, tile_n, M, F: tl.constexpr):
    """Add biases, gate, go through ``F.steps``, and store ``[m, n]`` in the dtype of ``p.out``.

    `acc` and `acc_up` are float32 ``[m, n]``; `acc_up` is ignored where not ``F.gated``.  With
    ``F.half``, heads are rotated after the bias, and nothing else is done: see
    `store_rotated_tile`.
    """
    if F.has_bias:
        acc += load_bias(p.bias, n_index, False, F.n, F.merged)[None, :]
    if F.half > 0:
        store_rotated_tile(p, acc, m_index, tile_n, M, F)
        return
    if F.gated:
        if F.has_bias:
            acc_up += load_bias(p.up_bias, n_index, True, F.n, F.merged)[None, :]
        acc = glu(acc, acc_up, F.activation)
    offsets, mask = tile_offsets(m_index, n_index, M, F.n)
    for i in tl.static_range(count_of(F.steps)):
        operand = 0.0
        if along_of(F.steps, i) == "whole":
            whole = tl.load(p.operands[operand_of(F.steps, i)] + offsets, mask=mask, other=0.0)
            operand = whole.to(tl.float32)
        elif along_of(F.steps, i) == "each" or along_of(F.steps, i) == "period":
            row = m_index % rows_of(F.steps, i)
            if along_of(F.steps, i) == "each":
                row = m_index // rows_of(F.steps, i)
            some, _ = tile_offsets(row, n_index, M, F.n)
            read = tl.load(p.operands[operand_of(F.steps, i)] + some, mask=mask, other=0.0)
            operand = read.to(tl.float32)
        elif along_of(F.steps, i) == "row":
            operand = load_row(p.operands[operand_of(F.steps, i)], n_index, F.n)[None, :]
        acc = after_step(acc, operand, kind_of(F.steps, i), number_of(F.steps, i))
    tl.store(p.out + offsets, acc.to(p.out.dtype.element_ty), mask=mask)


@triton.jit
def load_angles(cos_ptrs, sin_ptrs, mask):
    """Return float32 cosines and sines."""
    cos = tl.load(cos_ptrs, mask=mask, other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def turned_pairs(pair_index, HALF: tl.constexpr, ROTATED: tl.constexpr):
    """Tell which pairs are rotated.

    `ROTATED` is ``(features, period, head_dim, width, columns)``: in each `period` of features, or
    once if that is 0, the first `features` are heads of `head_dim`, of which the first `width`
    features turn by angles in rows of `columns`.
    """
    if ROTATED[1] == 0:
        turns = first_of_pair(pair_index, HALF) < ROTATED[0]
    else:
        turns = pair_index % (ROTATED[1] // 2) < ROTATED[0] // 2
    if ROTATED[3] < ROTATED[2]:
        turns &= pair_index % (ROTATED[2] // 2) < ROTATED[3] // 2
    return turns


@triton.jit
def angle_column(pair_index, HALF: tl.constexpr, ROTATED: tl.constexpr):
    """Return the column of the angle of the first feature of a pair, any for one that stays."""
    PAIRS: tl.constexpr = ROTATED[3] // 2
    if ROTATED[2] % ROTATED[3] != 0:
        pair_index = pair_index % (ROTATED[2] // 2)
    if HALF < PAIRS and ROTATED[4] == ROTATED[3]:
        return pair_index % PAIRS * 2
    else:
        return pair_index % PAIRS


@triton.jit
def store_rotated(p, low, high, m_index, pair_index, M, F: tl.constexpr):
    """Rotate pairs ``[m, pairs]`` by the angles of their rows, and store them.

    Features that stay are not multiplied: an infinite one would make NaN of its partner.
    """
    offsets, mask = tile_offsets(m_index, first_of_pair(pair_index, F.half), M, F.n)
    new_low, new_high = low, high
    if F.rotated is not None:
        angle_row = m_index if p.positions is None else m_index % p.positions
        columns = angle_column(pair_index, F.half, F.rotated)
        angles = angle_row.to(tl.int64)[:, None] * F.rotated[4] + columns[None, :]
        turns = mask & turned_pairs(pair_index, F.half, F.rotated)[None, :]
        # One side after the other, so that the angles of one are in registers at a time.
        cos, sin = load_angles(p.cos + angles, p.sin + angles, turns)
        new_low = tl.where(turns, low * cos - high * sin, low)
    new_low = new_low.to(p.out.dtype.element_ty)
    if F.half > 1:
        tl.store(p.out + offsets, new_low, mask=mask)
    if F.rotated is not None:
        if F.rotated[4] == F.rotated[3]:
            cos, sin = load_angles(p.cos + angles + F.half, p.sin + angles + F.half, turns)
        new_high = tl.where(turns, high * cos + low * sin, high)
    new_high = new_high.to(p.out.dtype.element_ty)
    if F.half > 1:
        tl.store(p.out + offsets + F.half, new_high, mask=mask)
    else:
        both = tl.join(offsets, offsets + 1)
        tl.store(p.out + both, tl.join(new_low, new_high), mask=tl.join(mask, mask))


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
def store_rotated_tile(p, acc, m_index, tile_n, M, F: tl.constexpr):
    """Rotate the pairs of a float32 tile ``[m, n]`` of `tile_features`, and store them.

    Row i takes row ``i % p.positions`` of the cosines and sines, row i where that is None.  The
    pairs of `turned_pairs` are rotated, the others stored as they are.
    """
    ROWS: tl.constexpr = acc.shape[0]
    PAIRS: tl.constexpr = acc.shape[1] // 2
    RUN: tl.constexpr = F.half if PAIRS % F.half == 0 else PAIRS
    low, high = tl.split(tl.permute(tl.reshape(acc, [ROWS, PAIRS // RUN, 2, RUN]), (0, 1, 3, 2)))
    low = tl.reshape(low, [ROWS, PAIRS])
    high = tl.reshape(high, [ROWS, PAIRS])
    PART: tl.constexpr = PAIRS // 2 if ROWS * PAIRS > MOST_PAIRS else PAIRS
    for part in tl.static_range(PAIRS // PART):
        pair_index = tile_n * PAIRS + part * PART + tl.arange(0, PART)
        left, right = part_of(low, part, PART), part_of(high, part, PART)
        store_rotated(p, left, right, m_index, pair_index, M, F)
