"""A few rows times the weights of their experts, one pair of token and expert after the other.

Regime: weight bytes.  Each pair reads ``k`` elements of every column of its expert once; two pairs
of one expert run side by side, and the second reads from L2.

Shape: as `gemv`, `block_n` columns a program and `block_k` elements of each at a time.  Where the
results of a token's pairs are added, a program has all of them side by side, ``[n, pairs, k]``:
lanes, warps and pairs are added once, at the end, no launch follows, and the result is always the
same.  The first weights of all pairs are asked for together, before anything else is read, and
where the numbers of experts are known by then (`ExpertTile.early`), before the kernel in front has
ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .experts import apart, behind_product, expert_at, read_columns, width_of
from .gemv import lane_run, load_row, sums_of
from .words import load_words


@triton.constexpr_function
def pairs_of(F, summed):
    """Return how many pairs a program has, filled up to a power of two."""
    return triton.next_power_of_2(int(F.chosen)) if summed else 1


@triton.jit
def add_pairs(a, b, c, d):
    """Add two sums at a time."""
    return a + c, b + d


@triton.jit
def weights_at(p, expert, columns, start, F: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr):
    """Return weights ``[n, pairs, k]`` from k = `start` on, or words of them, and scales."""
    WIDTH: tl.constexpr = width_of(F, True)
    first = expert.to(tl.int64)[None, :, None] * WIDTH
    across = columns[:, None, None]
    if F.bits:
        return load_words(p.w, p.scale, first, across, start, F.k, F, C.block_k, RUN)
    else:
        k_index = start + tl.arange(0, C.block_k)[None, None, :]
        within = across * F.k + k_index if F.layout == "nk" else across + k_index * WIDTH
        ptrs = p.w + first * F.k + within
        if F.k % C.block_k == 0:
            return tl.load(ptrs, eviction_policy="evict_first"), 1.0
        else:
            mask = k_index < F.k
            return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first"), 1.0


@triton.jit
def rows_at(p, row, start, F: tl.constexpr, C: tl.constexpr):
    """Return float32 elements ``[pairs, k]`` of rows from k = `start` on, zero beyond its end."""
    x_ptrs = p.x + row.to(tl.int64)[:, None] * F.k
    k_index = start + tl.arange(0, C.block_k)[None, :]
    return load_row(x_ptrs, k_index, F.k, F.k % C.block_k == 0)


@triton.jit
def in_a_line(sums):
    """Return sums ``[n, pairs, lanes]`` as ``[n, pairs * lanes]``."""
    return tl.reshape(sums, [sums.shape[0], sums.shape[1] * sums.shape[2]])


@triton.jit
def biases_of(p, expert, columns, F: tl.constexpr):
    """Return float32 biases ``[n, pairs]``."""
    first = expert.to(tl.int64)[None, :] * width_of(F, True)
    return tl.load(p.bias + first + columns[:, None]).to(tl.float32)


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
    if C.pdl and not C.early:
        gdc_wait()
        gdc_launch_dependents()
    SUMMED: tl.constexpr = p.share is not None
    tl.static_assert(not SUMMED or (F.gate == "none" and F.activation == "none"))
    RUN: tl.constexpr = lane_run(F)
    HALVES: tl.constexpr = F.gate == "halves"
    COUNT: tl.constexpr = F.chosen if SUMMED else 1
    index, tile_n = tl.program_id(0), tl.program_id(1)
    columns = read_columns(tile_n, F, C)
    # Those that fill up read the last pair again; their shares are 0
    place = tl.arange(0, pairs_of(F, SUMMED))
    pair = index * COUNT + tl.minimum(place, COUNT - 1)
    expert = expert_at(p.ids, pair, place < COUNT, F.experts)
    weights, scales = weights_at(p, expert, columns, 0, F, C, RUN)
    if HALVES:
        others, other_scales = weights_at(p, expert, columns + F.n, 0, F, C, RUN)
    if C.pdl and C.early:
        gdc_wait()
        gdc_launch_dependents()
    row = pair if F.each else pair // F.chosen
    x = rows_at(p, row, 0, F, C)
    acc = sums_of(weights, scales, x, F, RUN)
    other = sums_of(others, other_scales, x, F, RUN) if HALVES else acc
    for start in tl.range(
        C.block_k, F.k, C.block_k, num_stages=C.stages, loop_unroll_factor=C.unroll
    ):  # fmt: skip
        weights, scales = weights_at(p, expert, columns, start, F, C, RUN)
        if HALVES:
            others, other_scales = weights_at(p, expert, columns + F.n, start, F, C, RUN)
        x = rows_at(p, row, start, F, C)
        acc += sums_of(weights, scales, x, F, RUN)
        if HALVES:
            other += sums_of(others, other_scales, x, F, RUN)
    if SUMMED:
        share = tl.load(p.share + pair, mask=place < COUNT, other=0.0).to(tl.float32)
        acc *= share[None, :, None]
    if HALVES:
        total, total_other = tl.reduce((in_a_line(acc), in_a_line(other)), 1, add_pairs)
    else:
        total = tl.sum(in_a_line(acc), axis=1)
        total_other = total
    if p.bias is not None:
        bias = biases_of(p, expert, columns, F)
        total += tl.sum(bias * share[None, :] if SUMMED else bias, axis=1)
        if HALVES:
            total_other += tl.sum(biases_of(p, expert, columns + F.n, F), axis=1)
    total, total_other = total[None, :], total_other[None, :]
    if F.gate == "pairs":
        total, total_other = apart(total)
    result = behind_product(total, total_other, F)
    OWN: tl.constexpr = result.shape[1]
    column = tile_n * OWN + tl.arange(0, OWN)[None, :]
    at = index.to(tl.int64) * F.n + column
    if p.residual is not None:
        result += tl.load(p.residual + at, mask=column < F.n, other=0.0).to(tl.float32)
    tl.store(p.out + at, result.to(p.out.dtype.element_ty), mask=column < F.n)
