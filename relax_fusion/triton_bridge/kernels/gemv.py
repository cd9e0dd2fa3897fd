"""A row or two times a weight, normalised on the way: ``norm(x) @ W^T`` and its gated form.

Regime: weight bytes.  ``2 n k`` bytes of a 16-bit weight are read once (gated: twice that) and
everything else is smaller by a factor of n or k; four operations a weight.  The time is that of
streaming the weight, so all that matters is how many bytes are in flight.

Shape: `block_n` weight rows a program, `block_k` elements of each at a time, 16 bytes a lane.
Splitting k over the lanes and warps of a program gives more parallelism than any n in use needs, so
there is no split over programs.  Each lane adds up what it loads together, in float32, and keeps
that sum, not one for each of its elements: in the registers that this saves, more programs fit a
multiprocessor, each with weights in flight.  Lanes and warps are added once, at the end, all sums
together.  (With an accumulator an element and sums one after the other, norm -> qkv of k = 8192
took 54.7 us on an H200 instead of 43.4, and lost to a norm kernel in front.)

Every program computes the statistics of the row again, from L2: that is ``2 k`` bytes beside
``2 k block_n``, and it saves a launch.  With ``block_k >= k`` the weights are requested before
anything else and the statistics are computed while they come.

Of weights of few bits a lane unpacks eight numbers of a column at a time, those of which it has the
elements of x, so that neither changes lanes; `block_m` rows of x share what is unpacked.  Unpacking
takes more instructions than multiplying, so large weights are left to tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import affine, inverse_rms
from .addresses import (
    half_pointer,
    half_start,
    load_in_range,
    store_output,
    tile_features,
    weight_offsets,
    weight_rows,
)
from .products import of_product
from .words import in_units, load_words, numbers_of


@triton.jit
def load_row(x_row_ptr, k_index, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Return the float32 elements of a row at those positions, zero beyond its end."""
    if EVEN_K:
        return tl.load(x_row_ptr + k_index).to(tl.float32)
    else:
        return tl.load(x_row_ptr + k_index, mask=k_index < K, other=0.0).to(tl.float32)


@triton.jit
def layer_statistics(x_ptrs, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return mean and inverse deviation of rows ``[m, 1]``, the squares summed about the mean."""
    total = tl.zeros([x_ptrs.shape[0], BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        total += load_row(x_ptrs, start + tl.arange(0, BLOCK_K)[None, :], K, K % BLOCK_K == 0)
    mean = tl.sum(total, axis=1, keep_dims=True) / K
    squares = tl.zeros([x_ptrs.shape[0], BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k_index = start + tl.arange(0, BLOCK_K)[None, :]
        x = load_row(x_ptrs, k_index, K, K % BLOCK_K == 0)
        centred = tl.where(k_index < K, x - mean, 0.0)
        squares += centred * centred
    return mean, inverse_rms(tl.sum(squares, axis=1, keep_dims=True), K, eps)


@triton.constexpr_function
def lane_run(F):
    """Return how many neighbours along k a lane adds up: 16 bytes of a row, of one scale."""
    if F.layout != "nk":
        return 1
    return 8 if F.bits == 0 or F.group < 0 or F.group % 8 == 0 else F.fields


@triton.jit
def sum_runs(products, RUN: tl.constexpr):
    """Return the sums ``[n, m, k / RUN]`` of `RUN` neighbours each, which one lane has loaded."""
    N: tl.constexpr = products.shape[0]
    ROWS: tl.constexpr = products.shape[1]
    RUNS: tl.constexpr = products.shape[2] // RUN
    return tl.sum(tl.reshape(products, [N, ROWS, RUNS, RUN]), axis=3)


@triton.jit
def for_columns(x):
    """Return rows ``[m, k]`` as ``[1, m, k]``, where they are: a new axis may move them."""
    return tl.reshape(x, [1, x.shape[0], x.shape[1]])


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Add three sums at a time."""
    return a + d, b + e, c + f


@triton.jit
def sums_of(weights, scales, x, F: tl.constexpr, RUN: tl.constexpr):
    """Return float32 sums ``[n, m, runs]`` of products of rows ``[m, k]`` with their weights.

    Those are ``[n, m, k]``, or words of runs with a scale for each; for one m, of all rows.
    """
    if F.bits:
        shape: tl.constexpr = [weights.shape[0], weights.shape[1], x.shape[1]]
        numbers = tl.reshape(numbers_of(weights, F), shape)
        return sum_runs(numbers * for_columns(in_units(x, F)), RUN) * scales
    else:
        return sum_runs(weights.to(tl.float32) * for_columns(x), RUN)


@triton.jit
def load_weights(
    p, n_index, tile_n, start, UP: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Return weights ``[n, 1, k]`` from k = `start` on, or words of them, and scales.

    A weight is read once: it should not push x out of the caches.
    """
    if F.bits:
        row = weight_rows(n_index, F.n, F.layout, 1)
        first = tl.full([], half_start(UP, F.n, F.merged), tl.int64)
        if F.n % C.block_n == 0 and F.half == 0:
            # From the first one on, they are apart by numbers that the compiler knows
            row, first = tl.arange(0, C.block_n), first + tile_n * C.block_n
        w = p.up if UP else p.w
        scale = p.up_scale if UP and F.merged == "no" else p.scale
        row = row[:, None, None]
        return load_words(w, scale, first, row, start, C.k, F, C.block_k, RUN)
    else:
        k_index = start + tl.arange(0, C.block_k)
        w_ptr = half_pointer(p.up if UP else p.w, UP, F.n, C.k, F.layout, F.merged)
        ptrs = w_ptr + weight_offsets(n_index, k_index, F.n, C.k, F.layout, F.merged)
        EVEN_N: tl.constexpr = F.n % C.block_n == 0
        EVEN_K: tl.constexpr = C.k % C.block_k == 0
        w = load_in_range(ptrs, n_index, k_index, F.n, C.k, EVEN_N, EVEN_K, "evict_first")
        return tl.reshape(w, [w.shape[0], 1, w.shape[1]]), 1.0


@triton.jit
def dot_products(args, p, tile_n, F: tl.constexpr, C: tl.constexpr):
    """Compute `block_n` outputs of `block_m` rows."""
    x_ptr, gamma_ptr, beta_ptr, M, eps, normed_ptr = args
    EVEN_K: tl.constexpr = C.k % C.block_k == 0
    rows = tl.program_id(1) * C.block_m + tl.arange(0, C.block_m)
    n_index = tile_features(tile_n, C.block_n, F.half)
    inside = rows if C.block_m == 1 else tl.minimum(rows, M - 1)
    x_ptrs = x_ptr + inside.to(tl.int64)[:, None] * C.k
    mean, scale = 0.0, 1.0
    if C.norm == "layer":
        mean, scale = layer_statistics(x_ptrs, eps, C.k, C.block_k)
    RUN: tl.constexpr = lane_run(F)
    acc = tl.zeros([C.block_n, C.block_m, C.block_k // RUN], tl.float32)
    acc_up = tl.zeros([C.block_n, C.block_m, C.block_k // RUN], tl.float32)
    squares = tl.zeros([1, C.block_m, C.block_k // RUN], tl.float32)
    for start in tl.static_range(0, C.k, C.block_k):
        w, w_scales = load_weights(p, n_index, tile_n, start, False, F, C, RUN)
        if F.gated:
            up, up_scales = load_weights(p, n_index, tile_n, start, True, F, C, RUN)
        if C.pdl and start == 0:
            # The first weights are then under way; what else is read may come from a predecessor.
            gdc_wait()
            gdc_launch_dependents()
        k_index = start + tl.arange(0, C.block_k)[None, :]
        x = load_row(x_ptrs, k_index, C.k, EVEN_K)
        if C.norm != "none":
            gamma = load_row(gamma_ptr, k_index, C.k, EVEN_K)
            if C.unit_offset:
                gamma += 1.0
            beta = load_row(beta_ptr, k_index, C.k, EVEN_K) if C.has_beta else 0.0
            squares += sum_runs(for_columns(x * x), RUN)
            x = affine((x - mean) * scale, gamma, beta, C.has_beta)
        acc += sums_of(w, w_scales, x, F, RUN)
        if F.gated:
            acc_up += sums_of(up, up_scales, x, F, RUN)
    if F.gated or C.norm == "rms":
        # All at a time: what costs is that warps wait for one another.  The squares are as wide as
        # the other sums, to lie as they do: all columns of them are the same registers
        squares = tl.broadcast_to(squares, acc.shape)
        total, total_up, squares = tl.reduce((acc, acc_up, squares), 2, add_triples)
    else:
        total = tl.sum(acc, axis=2)
        total_up = total
    if C.norm == "rms":
        # One number for the row, so it waits until after the sum; all columns have the same one
        scale = inverse_rms(tl.max(squares, axis=0), C.k, eps)
        total *= scale[None, :]
        total_up *= scale[None, :]
        scale = scale[:, None]
    if normed_ptr is not None and tl.program_id(0) == 0:
        tl.static_assert(C.norm == "rms" and C.k <= C.block_k, "the row is no longer there")
        normed = (x * scale).to(normed_ptr.dtype.element_ty)
        mask = (rows < M)[:, None] & (k_index < C.k)
        tl.store(normed_ptr + rows.to(tl.int64)[:, None] * C.k + k_index, normed, mask=mask)
    store_output(p, tl.trans(total), tl.trans(total_up), rows, n_index, tile_n, M, F)


@triton.jit
def gemv(
    x_ptr, gamma_ptr, beta_ptr, M, eps, p0, F0: tl.constexpr, C: tl.constexpr,
    p1=None, F1: tl.constexpr = None, p2=None, F2: tl.constexpr = None, normed_ptr=None,
):  # fmt: skip
    """Compute `block_n` outputs of `block_m` rows.  Grid: ``(column tiles, row tiles)``.

    Parameters
    ----------
    x_ptr : [M, k];  gamma_ptr, beta_ptr : [k]
        The latter two may be None where there is no norm, or no shift.
    M : int32;  eps : float32
    p0, p1, p2 : Tensors
        With weights that are pointers.
    C : Constants
        `norm` is ``"none"``, ``"rms"`` or ``"layer"``.
    normed_ptr : [M, k]
        Gets the row behind an RMSNorm, of which a block of k is the whole; or None.
    """
    if C.pdl and (C.norm == "layer" or not C.early):
        gdc_wait()
    args = (x_ptr, gamma_ptr, beta_ptr, M, eps, normed_ptr)
    of_product(dot_products, tl.program_id(0), args, (p0, p1, p2), F0, F1, F2, C)
