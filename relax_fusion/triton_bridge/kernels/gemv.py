"""One row times a weight, normalised on the way: ``norm(x) @ W^T`` and its gated form.

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
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import affine, inverse_rms
from .addresses import half_pointer, load_in_range, store_output, tile_features, weight_offsets
from .products import of_product


@triton.jit
def load_row(x_row_ptr, k_index, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Return the float32 elements of a row at those positions, zero beyond its end."""
    if EVEN_K:
        return tl.load(x_row_ptr + k_index).to(tl.float32)
    else:
        return tl.load(x_row_ptr + k_index, mask=k_index < K, other=0.0).to(tl.float32)


@triton.jit
def layer_statistics(x_row_ptr, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return mean and inverse deviation of a row, the squares summed about the mean."""
    total = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        total += load_row(x_row_ptr, start + tl.arange(0, BLOCK_K), K, K % BLOCK_K == 0)
    mean = tl.sum(total, axis=0) / K
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k_index = start + tl.arange(0, BLOCK_K)
        x = load_row(x_row_ptr, k_index, K, K % BLOCK_K == 0)
        centred = tl.where(k_index < K, x - mean, 0.0)
        squares += centred * centred
    return mean, inverse_rms(tl.sum(squares, axis=0), K, eps)


@triton.jit
def sum_runs(products, RUN: tl.constexpr):
    """Return the sums ``[n, k / RUN]`` of `RUN` neighbours each, which one lane has loaded."""
    ROWS: tl.constexpr = products.shape[0]
    RUNS: tl.constexpr = products.shape[1] // RUN
    return tl.sum(tl.reshape(products, [ROWS, RUNS, RUN]), axis=2)


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Add three sums at a time."""
    return a + d, b + e, c + f


@triton.jit
def dot_products(args, p, tile_n, F: tl.constexpr, C: tl.constexpr):
    """Compute `block_n` outputs of one row."""
    x_ptr, gamma_ptr, beta_ptr, M, eps, normed_ptr = args
    EVEN_N: tl.constexpr = F.n % C.block_n == 0
    EVEN_K: tl.constexpr = C.k % C.block_k == 0
    w_ptr = half_pointer(p.w, False, F.n, C.k, F.layout, F.merged)
    row = tl.program_id(1)
    n_index = tile_features(tile_n, C.block_n, F.half)
    x_row_ptr = x_ptr + row.to(tl.int64) * C.k
    mean, scale = 0.0, 1.0
    if C.norm == "layer":
        mean, scale = layer_statistics(x_row_ptr, eps, C.k, C.block_k)
    RUN: tl.constexpr = 8 if F.layout == "nk" else 1
    acc = tl.zeros([C.block_n, C.block_k // RUN], tl.float32)
    acc_up = tl.zeros([C.block_n, C.block_k // RUN], tl.float32)
    squares = tl.zeros([C.block_n, C.block_k // RUN], tl.float32)
    for start in tl.static_range(0, C.k, C.block_k):
        k_index = start + tl.arange(0, C.block_k)
        w_offsets = weight_offsets(n_index, k_index, F.n, C.k, F.layout, F.merged)
        # A weight is read once: it should not push x out of the caches.
        ptrs = w_ptr + w_offsets
        w = load_in_range(ptrs, n_index, k_index, F.n, C.k, EVEN_N, EVEN_K, "evict_first")
        if F.gated:
            ptrs = half_pointer(p.up, True, F.n, C.k, F.layout, F.merged) + w_offsets
            up = load_in_range(ptrs, n_index, k_index, F.n, C.k, EVEN_N, EVEN_K, "evict_first")
        if C.pdl and start == 0:
            # The first weights are then under way; what else is read may come from a predecessor.
            gdc_wait()
            gdc_launch_dependents()
        x = load_row(x_row_ptr, k_index, C.k, EVEN_K)
        if C.norm != "none":
            gamma = load_row(gamma_ptr, k_index, C.k, EVEN_K)
            if C.unit_offset:
                gamma += 1.0
            beta = load_row(beta_ptr, k_index, C.k, EVEN_K) if C.has_beta else 0.0
            # As wide as the other sums, to lie as they do: the rows of it are the same registers
            wide = tl.broadcast_to((x * x)[None, :], [C.block_n, C.block_k])
            squares += sum_runs(wide, RUN)
            x = affine((x - mean) * scale, gamma, beta, C.has_beta)
        acc += sum_runs(w.to(tl.float32) * x[None, :], RUN)
        if F.gated:
            acc_up += sum_runs(up.to(tl.float32) * x[None, :], RUN)
    if F.gated or C.norm == "rms":
        # All at a time: what costs is that warps wait for one another
        total, total_up, squares = tl.reduce((acc, acc_up, squares), 1, add_triples)
    else:
        total = tl.sum(acc, axis=1)
        total_up = total
    if C.norm == "rms":
        # One number for the row, so it waits until after the sum
        scale = inverse_rms(squares, C.k, eps)
        total *= scale
        total_up *= scale
        scale = tl.max(scale, axis=0)
    if normed_ptr is not None and tl.program_id(0) == 0:
        tl.static_assert(C.norm == "rms" and C.k <= C.block_k, "the row is no longer there")
        normed = (x * scale).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row.to(tl.int64) * C.k + k_index, normed, mask=k_index < C.k)
    rows = row + tl.arange(0, 1)
    store_output(p, total[None, :], total_up[None, :], rows, n_index, tile_n, M, F)


@triton.jit
def gemv(
    x_ptr, gamma_ptr, beta_ptr, M, eps, p0, F0: tl.constexpr, C: tl.constexpr,
    p1=None, F1: tl.constexpr = None, p2=None, F2: tl.constexpr = None, normed_ptr=None,
):  # fmt: skip
    """Compute `block_n` outputs of one row.  Grid: ``(column tiles, M)``.

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
