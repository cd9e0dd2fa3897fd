"""From products of queries and keys to weights, where matrix instructions of Hopper leave them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .attention_scores import LOG2_E, biased, is_visible, position_of, scaled_scores, with_slopes
from .ring import wait_full


@gluon.jit
def load_per_score(
    pointer,
    row_stride,
    rows,
    block,
    KV_LEN,
    KEYS: gl.constexpr,
    ENDS: gl.constexpr,
    C: gl.constexpr,
):
    """Return what a bias or mask holds for rows and a block of keys, as it is in memory.

    Without `KEYS`, it holds one value for all keys.  With `ENDS`, there may be keys beyond the last
    one, and zeros are returned for them.
    """
    pointers = (pointer + rows.to(gl.int64) * row_stride)[:, None]
    if KEYS:
        columns = gl.arange(0, C.block_n, gl.SliceLayout(0, rows.type.layout.parent))
        pointers = pointers + block * C.block_n + columns[None, :]
        if ENDS:
            return gl.load(pointers, (block * C.block_n + columns < KV_LEN)[None, :], other=0)
        else:
            return gl.load(pointers)
    else:
        return gl.load(pointers)


@gluon.jit
def take_bias(ring, turn, s):
    """Return the tile of a turn, laid out as the scores `s` are, and give its slot back."""
    S: gl.constexpr = s.type.layout
    tiles, full, empty = ring
    slot = wait_full(full, turn, 2)
    tile = tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]]).load(S)
    fence_async_shared()  # the next copy must not overtake these reads
    mbarrier.arrive(empty.index(slot), count=1)
    return tile


@gluon.jit
def scores_of(s, operands, rows, block, turn, lengths, ENDS: gl.constexpr, C: gl.constexpr):
    """Return the scores of products; with `ENDS`, keys may be invisible by their position.

    The bias is in memory, or in turn `turn` of a ring.
    """
    bias_ptr, bias_stride, mask_ptr, mask_stride, slope = operands
    Q_LEN, KV_LEN = lengths
    held = gl.minimum(rows, Q_LEN - 1)  # Rows beyond the last have no bias in memory
    columns = gl.arange(0, C.block_n, gl.SliceLayout(0, s.type.layout))
    keys = (block * C.block_n + columns)[None, :]
    positions = position_of(rows, Q_LEN, KV_LEN, C.causal)[:, None]
    if C.softcap > 0.0:
        s = scaled_scores(s, C.scale, C.softcap)
    elif C.scored != 1.0:
        s = s * C.scored
    if C.bias_tiles:
        s = biased(s, take_bias(bias_ptr, turn, s), C.bias, LOG2_E / C.unit)
    elif C.bias != "none":
        bias = load_per_score(bias_ptr, bias_stride, held, block, KV_LEN, C.bias_keys, ENDS, C)
        s = biased(s, bias, C.bias, LOG2_E / C.unit)
    if C.alibi:
        s = with_slopes(s, slope, positions, keys)
    if C.has_mask:
        mask = load_per_score(mask_ptr, mask_stride, held, block, KV_LEN, C.mask_keys, ENDS, C)
        s = gl.where(mask, s, float("-inf"))
    if ENDS:
        visible = is_visible(positions, keys, KV_LEN, C.causal, C.window)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def shift_of(highest, UNIT: gl.constexpr):
    """Return what is taken off the scores of rows to the base of 2: 0 where all are -inf there.

    A score of the least float32 is one of those.
    """
    shift = highest * UNIT
    return gl.where(shift == float("-inf"), 0.0, shift)


@gluon.jit
def weigh(s, highest, total, UNIT: gl.constexpr):
    """Return weights of scores, what rescales those before, the highest score, and the sum.

    A row that has seen no key has -inf for its highest score, and weights of zero.
    """
    new = gl.maximum(highest, gl.max(s, axis=1))
    shift = shift_of(new, UNIT)
    weights = gl.exp2(s * UNIT - shift[:, None])
    rescale = gl.exp2(highest * UNIT - shift)
    return weights, rescale, new, total * rescale + gl.sum(weights, axis=1)
