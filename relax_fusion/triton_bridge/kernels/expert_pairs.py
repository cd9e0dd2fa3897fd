"""A few rows times the weights of their experts, one pair of token and expert after the other.

Regime: weight bytes.  Each pair reads ``k`` elements of every column of its expert once; two pairs
of one expert run side by side, and the second reads from L2.

Shape: as `gemv`, `block_n` columns a program and `block_k` elements of each at a time.  Where the
results of a token's pairs are added, one program goes through all of them, in their order: its sum
over k is as many times as long, each part multiplied by its pair's share.  So lanes and warps are
added once, no launch follows, and the result is always the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .expert_words import word_products, words_of
from .experts import apart, behind_product, expert_at, width_of
from .gemv import load_row, sum_runs


@triton.jit
def add_pairs(a, b, c, d):
    """Add two sums at a time."""
    return a + c, b + d


@triton.jit
def weights_at(ptrs, columns, k_index, WIDTH: tl.constexpr, F: tl.constexpr, C: tl.constexpr):
    """Return float32 weights ``[n, k]``, zero outside."""
    if WIDTH % C.block_n == 0 and F.k % C.block_k == 0:
        w = tl.load(ptrs, eviction_policy="evict_first")
    else:
        mask = (columns < WIDTH)[:, None] & (k_index < F.k)[None, :]
        w = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit
def add_words(acc, other, x_row_ptr, share, p, expert, columns, F: tl.constexpr, C: tl.constexpr):
    """Do as `add_products` with weights in words; sums are ``[n, words]``."""
    COUNT: tl.constexpr = C.block_k // F.fields
    WIDTH: tl.constexpr = width_of(F, F.gate == "pairs")
    columns = tl.minimum(columns, WIDTH - 1)
    for start in tl.range(0, words_of(F), COUNT, num_stages=C.stages):
        word = start + tl.arange(0, COUNT)
        k_index = word[:, None] * F.fields + tl.arange(0, F.fields)[None, :]
        x = load_row(x_row_ptr, k_index, F.k, F.k % C.block_k == 0) * share
        if F.gate == "halves":
            other += word_products(p, expert, columns + F.n, word, x, F)
        acc += word_products(p, expert, columns, word, x, F)
    return acc, other


@triton.jit
def add_products(acc, other, x_row_ptr, share, w_ptr, columns, F: tl.constexpr, C: tl.constexpr):
    """Add products of one row, times its share, to sums ``[n, k / RUN]``, of both halves."""
    RUN: tl.constexpr = C.block_k // acc.shape[1]
    WIDTH: tl.constexpr = width_of(F, F.gate == "pairs")
    for start in tl.range(
        0, F.k, C.block_k, num_stages=C.stages, loop_unroll_factor=C.unroll
    ):  # fmt: skip
        k_index = start + tl.arange(0, C.block_k)
        if F.layout == "nk":
            ptrs = w_ptr + columns[:, None] * F.k + k_index[None, :]
        else:
            ptrs = w_ptr + columns[:, None] + k_index[None, :] * width_of(F, True)
        w = weights_at(ptrs, columns, k_index, WIDTH, F, C)
        x = load_row(x_row_ptr, k_index, F.k, F.k % C.block_k == 0) * share
        if F.gate == "halves":
            ptrs += F.n * F.k if F.layout == "nk" else F.n
            up = weights_at(ptrs, columns, k_index, WIDTH, F, C)
            other += sum_runs(up * x[None, :], RUN)
        acc += sum_runs(w * x[None, :], RUN)
    return acc, other


@triton.jit
def load_bias(p, expert, columns, F: tl.constexpr):
    """Return the float32 biases ``[n]`` of an expert's columns, and of the other half."""
    ptrs = p.bias + expert * width_of(F, True) + columns
    mask = columns < width_of(F, F.gate == "pairs")
    bias = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if F.gate == "halves":
        return bias, tl.load(ptrs + F.n, mask=mask, other=0.0).to(tl.float32)
    else:
        return bias, bias


@triton.jit
def expert_pairs(p, F: tl.constexpr, C: tl.constexpr):
    """Compute some columns of a pair, or of the sum of a token's pairs.

    Grid: ``(pairs, column tiles)``, with a share ``(tokens, column tiles)``.

    Parameters
    ----------
    p : ExpertTensors
        With a `share`, the results of a token are added, and its `residual`, if there is one; there
        is no gate and no activation then.
    C : ExpertTile
    """
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    index, tile_n = tl.program_id(0), tl.program_id(1)
    SUMMED: tl.constexpr = p.share is not None
    tl.static_assert(not SUMMED or (F.gate == "none" and F.activation == "none"))
    COUNT: tl.constexpr = F.chosen if SUMMED else 1
    RUN: tl.constexpr = F.fields if F.bits else (8 if F.layout == "nk" else 1)
    columns = tile_n * C.block_n + tl.arange(0, C.block_n)
    acc = tl.zeros([C.block_n, C.block_k // RUN], tl.float32)
    other = tl.zeros([C.block_n, C.block_k // RUN], tl.float32)
    bias = tl.zeros([C.block_n], tl.float32)
    bias_other = tl.zeros([C.block_n], tl.float32)
    for place in tl.static_range(COUNT):
        pair = index * COUNT + place
        row = pair if F.each else (index if SUMMED else index // F.chosen)
        expert = expert_at(p.ids, pair, True, F.experts).to(tl.int64)
        share = tl.load(p.share + pair).to(tl.float32) if SUMMED else 1.0
        w_ptr = p.w + expert * (width_of(F, True) * F.k)
        x_row_ptr = p.x + row.to(tl.int64) * F.k
        if F.bits:
            acc, other = add_words(acc, other, x_row_ptr, share, p, expert, columns, F, C)
        else:
            acc, other = add_products(acc, other, x_row_ptr, share, w_ptr, columns, F, C)
        if p.bias is not None:
            first, second = load_bias(p, expert, columns, F)
            bias += first * share
            bias_other += second * share
    if F.gate == "halves":
        total, total_other = tl.reduce((acc, other), 1, add_pairs)
    else:
        total = tl.sum(acc, axis=1)
        total_other = total
    total = (total + bias)[None, :]
    total_other = (total_other + bias_other)[None, :]
    if F.gate == "pairs":
        total, total_other = apart(total)
    result = behind_product(total, total_other, F)
    OWN: tl.constexpr = result.shape[1]
    column = tile_n * OWN + tl.arange(0, OWN)[None, :]
    place = index.to(tl.int64) * F.n + column
    if p.residual is not None:
        result += tl.load(p.residual + place, mask=column < F.n, other=0.0).to(tl.float32)
    tl.store(p.out + place, result.to(p.out.dtype.element_ty), mask=column < F.n)
