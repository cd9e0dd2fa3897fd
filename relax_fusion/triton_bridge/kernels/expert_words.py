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
    """Return the float32 numbers ``[..., fields]`` of words, each times 1 / `units_of`.

    All numbers of a word are made where the word is: a reshape keeps its place, unlike a new axis.
    """
    wide = words.to(tl.uint32)
    if F.number == "e2m1":
        each = tl.reshape(wide, words.shape + [1])
        field = tl.arange(0, F.fields) * F.bits
        placed = each << tl.maximum(22 - field, 0).to(tl.uint32)
        placed >>= tl.maximum(field - 22, 0).to(tl.uint32)
        placed = (placed & (7 << 22)) | ((placed << 6) & (1 << 31))
        return placed.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        HALF: tl.constexpr = F.fields // 2
        halves = tl.join(wide, wide >> (HALF * F.bits))
        place = (tl.arange(0, HALF) * F.bits).to(tl.uint32)
        # A number that the compiler does not know, so that `&` and `|` are one instruction
        exponent = tl.num_programs(2).to(tl.uint32) * 0x4B000000
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
def load_words(p, row, word, F: tl.constexpr):
    """Return words ``[..., words]`` of rows ``[..., 1]`` of all experts, and float32 scales alike.

    They are zero beyond the end of k.
    """
    WORDS: tl.constexpr = words_of(F)
    w_ptr = p.w.to(tl.pointer_type(tl.uint32)) if F.bits * F.fields == 32 else p.w
    words = tl.load(w_ptr + row * WORDS + word, mask=word < WORDS, other=0)
    at = row * groups_of(F) + word // (F.group // F.fields)
    scales = tl.load(p.scale + at, mask=word < WORDS, other=0)
    if F.exponents:
        return words, power_of_two(scales.to(tl.int32))
    else:
        return words, scales.to(tl.float32)


@triton.jit
def unpacked_tile(p, expert, columns, start, F: tl.constexpr, C: tl.constexpr):
    """Return a tile ``[n, k]`` of an expert's weight, from k = `start` on, in the dtype of x."""
    word = start // F.fields + tl.arange(0, C.block_k // F.fields)
    row = expert.to(tl.int64) * width_of(F, True) + columns
    words, scales = load_words(p, row[:, None], word, F)
    factors = scales[:, :, None] * units_of(F)[None, None, :]
    tile = (numbers_of(words, F) * factors).to(p.x.dtype.element_ty)
    return tl.reshape(tile, [C.block_n, C.block_k])
