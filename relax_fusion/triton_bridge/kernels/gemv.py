"""One row times a weight, normalised on the way: ``norm(x) @ W^T`` and its gated form.

Regime: weight bytes.  ``2 n k`` bytes of a 16-bit weight are read once (gated: twice that) and
everything else is smaller by a factor of n or k; four operations a weight.  The time is that of
streaming the weight, so all that matters is how many bytes are in flight.

Shape: `BLOCK_N` weight rows a program, `BLOCK_K` elements of each at a time, 16 bytes a lane.
Splitting k over the lanes and warps of a program gives more parallelism than any n in use needs, so
there is no split over programs.  Each lane adds up what it loads together, in float32, and keeps
that sum, not one for each of its elements: in the registers that this saves, more programs fit a
multiprocessor, each with weights in flight.  Lanes and warps are added once, at the end, all sums
together.  (With an accumulator an element and sums one after the other, norm -> qkv of k = 8192
took 54.7 us on an H200 instead of 43.4, and lost to a norm kernel in front.)

Every program computes the statistics of the row again, from L2: that is ``2 k`` bytes beside
``2 k BLOCK_N``, and it saves a launch.  With ``BLOCK_K >= K`` the weights are requested before
anything else and the statistics are computed while they come.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..math import affine, inverse_rms
from .tiles import (
    half_pointer,
    load_in_range,
    store_output,
    tile_features,
    weight_offsets,
)


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
def gemv(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    w_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    operands,
    out_ptr,
    M,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BETA: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr = False,
    MERGED: tl.constexpr = "no",
    cos_ptr=None,
    sin_ptr=None,
    positions=None,
    HALF: tl.constexpr = 0,
    ROTATED: tl.constexpr = 0,
    UNIT_OFFSET: tl.constexpr = False,
):
    """Compute `BLOCK_N` outputs of one row.  Grid: ``(ceil(N / BLOCK_N), M)``.

    Parameters
    ----------
    x_ptr : [M, K];  gamma_ptr, beta_ptr : [K]
    w_ptr, up_ptr : [N, K] or [K, N]
        The weight, or the gate's; the up projection's where `GATED`.
    bias_ptr, up_bias_ptr : [N];  out_ptr : [M, N];  operands : pointers, as `STEPS` say
    M : int32;  eps : float32
    NORM : {"none", "rms", "layer"};  LAYOUT : {"nk", "kn"}
    GATED : bool
        ``activation(gate) * up`` (plus the residual, if ``"after"``).
    MERGED : {"no", "gate_first", "up_first"}
        Whether both weights (and biases) lie in one tensor, which both pointers then point to.
    cos_ptr, sin_ptr : [positions, 2 HALF], any float dtype
        With `HALF`: of the angles by which pairs of features `HALF` apart are turned.
    positions : int32
        Row i takes row ``i % positions`` of them; None for row i.
    HALF, ROTATED : int
        Half the width of a head, and how many features are rotated; 0 for no rotation.
    UNIT_OFFSET : bool
        Multiply by ``1 + gamma``.
    """
    if PDL and (NORM == "layer" or not EARLY):
        gdc_wait()
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    w_ptr = half_pointer(w_ptr, False, N, K, LAYOUT, MERGED)
    up_ptr = half_pointer(up_ptr, True, N, K, LAYOUT, MERGED)
    row = tl.program_id(1)
    n_index = tile_features(tl.program_id(0), BLOCK_N, HALF)
    x_row_ptr = x_ptr + row.to(tl.int64) * K
    mean, scale = 0.0, 1.0
    if NORM == "layer":
        mean, scale = layer_statistics(x_row_ptr, eps, K, BLOCK_K)
    RUN: tl.constexpr = 8 if LAYOUT == "nk" else 1
    acc = tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32)
    squares = tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k_index = start + tl.arange(0, BLOCK_K)
        w_offsets = weight_offsets(n_index, k_index, N, K, LAYOUT, MERGED)
        # A weight is read once: it should not push x out of the caches.
        w = load_in_range(w_ptr + w_offsets, n_index, k_index, N, K, EVEN_N, EVEN_K, "evict_first")
        if GATED:
            up = load_in_range(
                up_ptr + w_offsets, n_index, k_index, N, K, EVEN_N, EVEN_K, "evict_first"
            )
        if PDL and start == 0:
            # The first weights are then under way; what else is read may come from a predecessor.
            gdc_wait()
            gdc_launch_dependents()
        x = load_row(x_row_ptr, k_index, K, EVEN_K)
        if NORM != "none":
            gamma = load_row(gamma_ptr, k_index, K, EVEN_K)
            if UNIT_OFFSET:
                gamma += 1.0
            beta = load_row(beta_ptr, k_index, K, EVEN_K) if HAS_BETA else 0.0
            # As wide as the other sums, to lie as they do: the rows of it are the same registers
            squares += sum_runs(tl.broadcast_to((x * x)[None, :], [BLOCK_N, BLOCK_K]), RUN)
            x = affine((x - mean) * scale, gamma, beta, HAS_BETA)
        acc += sum_runs(w.to(tl.float32) * x[None, :], RUN)
        if GATED:
            acc_up += sum_runs(up.to(tl.float32) * x[None, :], RUN)
    if GATED or NORM == "rms":
        # All at a time: what costs is that warps wait for one another
        total, total_up, squares = tl.reduce((acc, acc_up, squares), 1, add_triples)
    else:
        total = tl.sum(acc, axis=1)
        total_up = total
    if NORM == "rms":
        # One number for the row, so it waits until after the sum
        scale = inverse_rms(squares, K, eps)
        total *= scale
        total_up *= scale
    store_output(
        out_ptr, operands, bias_ptr, up_bias_ptr,
        total[None, :], total_up[None, :], row + tl.arange(0, 1), n_index, M,
        N, GATED, MERGED, HAS_BIAS, ACTIVATION, STEPS,
        (cos_ptr, sin_ptr, positions, tl.program_id(0)), HALF, ROTATED,
    )  # fmt: skip
