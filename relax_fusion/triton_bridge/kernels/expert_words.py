"""Weights of experts that are stored in a few bits, unpacked as they are loaded.

Words of `F.fields` numbers lie along k, ``[experts, columns, words]``, and scales with them,
``[experts, columns, groups]``.  A whole number is put into the last bits of the float32 2 ** 23,
which takes no conversion, and 2 ** 23 and the zero are taken off; one of e2m1 has its exponent and
its mantissa where a float32 has them, 126 too low.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .experts import width_of


@triton.constexpr_function
def words_of(F):
    """Return the words of a column: groups are stored whole."""
    return (F.k + F.group - 1) // F.group * (F.group // F.fields)


@triton.constexpr_function
def groups_of(F):
    """Return the scales of a column."""
    return (F.k + F.group - 1) // F.group


@triton.jit
def numbers_of(words, F: tl.constexpr):
    """Return the float32 numbers ``[n, words, fields]`` of words ``[n, words]``."""
    shift = tl.arange(0, F.fields) * F.bits
    bits = (words.to(tl.int32)[:, :, None] >> shift[None, None, :]) & ((1 << F.bits) - 1)
    if F.number == "e2m1":
        placed = ((bits & 7) << 22) | ((bits & 8) << 28)
        return placed.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + F.zero)


@triton.jit
def power_of_two(byte):
    """Return the float32 2 ** (byte - 127), NaN for 255: see `relax_fusion.compute.packed`."""
    ends = tl.where(((byte + 1) & 255) <= 1, 1 << 22, 0)
    return ((byte << 23) | ends).to(tl.float32, bitcast=True)


@triton.jit
def load_words(p, expert, columns, word, F: tl.constexpr):
    """Return words ``[n, words]`` and float32 scales alike, zero beyond the end of k."""
    WORDS: tl.constexpr = words_of(F)
    row = expert.to(tl.int64) * width_of(F, True) + columns
    inside = (word < WORDS)[None, :]
    words = tl.load(p.w + row[:, None] * WORDS + word[None, :], mask=inside, other=0)
    at = row[:, None] * groups_of(F) + (word // (F.group // F.fields))[None, :]
    scales = tl.load(p.scale + at, mask=inside, other=0)
    if F.exponents:
        return words, power_of_two(scales.to(tl.int32))
    else:
        return words, scales.to(tl.float32)


@triton.jit
def word_products(p, expert, columns, word, x, F: tl.constexpr):
    """Return float32 sums ``[n, words]`` of each word's products with ``x [words, fields]``."""
    words, scales = load_words(p, expert, columns, word, F)
    return tl.sum(numbers_of(words, F) * x[None, :, :], axis=2) * scales


@triton.jit
def unpacked_tile(p, expert, columns, start, F: tl.constexpr, C: tl.constexpr):
    """Return a tile ``[n, k]`` of an expert's weight, from k = `start` on, in the dtype of x."""
    COUNT: tl.constexpr = C.block_k // F.fields
    word = start // F.fields + tl.arange(0, COUNT)
    words, scales = load_words(p, expert, columns, word, F)
    tile = (numbers_of(words, F) * scales[:, :, None]).to(p.x.dtype.element_ty)
    return tl.reshape(tile, [C.block_n, C.block_k])
