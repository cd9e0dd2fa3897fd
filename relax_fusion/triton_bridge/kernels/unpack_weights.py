"""Packed weights to a copy in the dtype of the rows, in front of a matmul of many rows.

``out = (field - zero) * scale`` for words whose fields lie in order along k.

Regime: bytes.  Each word and scale is read once and each element written once; four operations an
element.

Shape: a program has `BLOCK` words, whichever rows they are of; a thread stores the elements of a
word at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def unpack_weights(
    words_ptr,
    scales_ptr,
    out_ptr,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Unpack `BLOCK` words.  Grid: ``(ceil(COUNT / BLOCK),)``.

    Parameters
    ----------
    words_ptr : [COUNT / WORDS, WORDS], integers of ``BITS * FIELDS`` bits
    scales_ptr : [COUNT / WORDS, GROUPS]
    out_ptr : [COUNT / WORDS, K]
        Of the dtype of the scales.
    GROUP : int
        Elements along k that share a scale.
    SIGNED : bool
        Whether a field is a signed integer, of as many bits as a word.
    PDL : bool
        Wait for a predecessor and let a dependent start, where launched with that attribute.
    """
    if PDL:
        gdc_wait()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, word = place // WORDS, place % WORDS
    words = tl.load(words_ptr + place.to(tl.int64), mask=place < COUNT, other=0).to(tl.int32)
    field = tl.arange(0, FIELDS)
    numbers = words[:, None] >> (field * BITS)[None, :]
    if not SIGNED:
        numbers &= (1 << BITS) - 1
    k = word[:, None] * FIELDS + field[None, :]
    inside = (place < COUNT)[:, None] & (k < K)
    scale_at = row.to(tl.int64)[:, None] * GROUPS + k // GROUP
    scales = tl.load(scales_ptr + scale_at, mask=inside, other=0.0).to(tl.float32)
    out = (numbers - ZERO).to(tl.float32) * scales
    out_at = row.to(tl.int64)[:, None] * K + k
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
    if PDL:
        gdc_launch_dependents()
