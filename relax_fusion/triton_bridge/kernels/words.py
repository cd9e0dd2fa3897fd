"""Weights that are stored in a few bits, unpacked as they are loaded.

`F` is the form of a product, or of one by experts.  Words of ``F.fields`` numbers lie along k,
``[columns, words]``, and scales with them, ``[columns, groups]``.  A whole number is put into the
last bits of the float32 2 ** 23, which takes no conversion, and 2 ** 23 and the zero are taken off:
of signed bytes, 128 more.  One of e2m1 has its exponent and its mantissa where a float32 has them,
126 too low.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def group_of(K, F):
    """Return how many of `K` numbers of a column share a scale."""
    return K if F.group < 0 else F.group


@triton.constexpr_function
def groups_of(K, F):
    """Return the scales of a column of `K` numbers."""
    return 1 if F.group < 0 else (K + F.group - 1) // F.group


@triton.constexpr_function
def words_of(K, F):
    """Return the words of a column of `K` numbers: groups are stored whole."""
    whole = K if F.group < 0 else (K + F.group - 1) // F.group * F.group
    return whole // F.fields


@triton.jit
def numbers_of(words, F: tl.constexpr):
    """Return the float32 numbers ``[..., fields]`` of words, each times 1 / `units_of`.

    All numbers of a word are made where the word is: a reshape keeps its place, unlike a new axis.
    """
    wide = words.to(tl.uint32)
    if F.number == "int8":
        wide ^= 0x80808080
    if F.number == "e2m1":
        each = tl.reshape(wide, words.shape + [1])
        field = tl.arange(0, F.fields) * F.bits
        placed = each << tl.maximum(22 - field, 0).to(tl.uint32)
        placed >>= tl.maximum(field - 22, 0).to(tl.uint32)
        placed = (placed & (7 << 22)) | ((placed << 6) & (1 << 31))
        return placed.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        HALF: tl.constexpr = F.fields // 2
        # Numbers that the compiler does not know: then it shifts once, and `&` and `|` are one
        # instruction
        one = tl.num_programs(2).to(tl.uint32)
        halves = tl.join(wide, wide >> (one * (HALF * F.bits)))
        place = (tl.arange(0, HALF) * F.bits).to(tl.uint32)
        exponent = one * 0x4B000000
        placed = (
            tl.reshape(halves, words.shape + [2, 1]) & (((1 << F.bits) - 1) << place)
        ) | exponent
        zero = ((F.zero << place) | 0x4B000000).to(tl.float32, bitcast=True)
        return tl.reshape(placed.to(tl.float32, bitcast=True) - zero, words.shape + [F.fields])


@triton.jit
def power_of_two(byte):
    """Return the float32 2 ** (byte - 127), NaN for 255: see `relax_fusion.compute.packed`."""
    ends = tl.where(((byte + 1) & 255) <= 1, 1 << 22, 0)
    return ((byte << 23) | ends).to(tl.float32, bitcast=True)


@triton.jit
def units_of(F: tl.constexpr):
    """Return what the numbers of each field are to be multiplied by, ``[fields]``."""
    if F.number == "e2m1":
        return tl.full([F.fields], 1.0, tl.float32)
    else:
        place = tl.arange(0, F.fields) % (F.fields // 2) * F.bits
        return ((127 - place) << 23).to(tl.float32, bitcast=True)


@triton.jit
def in_units(x, F: tl.constexpr):
    """Return float32 numbers ``[..., k]`` in units of the fields that they are multiplied with."""
    parts = tl.reshape(x, x.shape[:-1] + [x.shape[-1] // F.fields, F.fields])
    return tl.reshape(parts * units_of(F), x.shape)


@triton.jit
def load_words(
    w_ptr, scale_ptr, first, row, start, K: tl.constexpr, F: tl.constexpr, BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Return words ``[n, m, words]`` of rows ``first + row``, and scales of runs.

    A lane has runs of `RUN` numbers, which share a scale.  They begin at k = `start`, and are zero
    beyond the end of k.
    """
    PER: tl.constexpr = RUN // F.fields
    if F.bits * F.fields == 32:
        w_ptr = w_ptr.to(tl.pointer_type(tl.uint32))
    word = start // F.fields + tl.arange(0, BLOCK_K // F.fields)
    # A lane that loaded more than a run would have other numbers than it has of x
    ptrs = w_ptr + first * words_of(K, F) + tl.multiple_of(row * words_of(K, F) + word, [1, 1, PER])
    run = start // RUN + tl.arange(0, BLOCK_K // RUN)
    scale_ptrs = scale_ptr + first * groups_of(K, F)
    scale_ptrs += row * groups_of(K, F) + run // (group_of(K, F) // RUN)
    # In a line, neighbours of which are those of lanes, as runs are
    line = tl.reshape(scale_ptrs, [scale_ptrs.numel])
    if K % BLOCK_K == 0:
        words = tl.load(ptrs, eviction_policy="evict_first")
        scales = tl.load(line)
    else:
        words = tl.load(ptrs, mask=word < words_of(K, F), other=0, eviction_policy="evict_first")
        inside = tl.broadcast_to((run * RUN < K)[None, None, :], scale_ptrs.shape)
        scales = tl.load(line, mask=tl.reshape(inside, [scale_ptrs.numel]), other=0)
    scales = tl.reshape(scales, scale_ptrs.shape)
    if F.exponents:
        return words, power_of_two(scales.to(tl.int32))
    else:
        return words, scales.to(tl.float32)
