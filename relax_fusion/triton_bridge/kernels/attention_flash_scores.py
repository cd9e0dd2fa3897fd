"""Scores of `attention_flash`: where their bias and mask come from."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .attention_core import LOG2_E, Constants, load_modifier, position_of, scores_of
from .ring import wait_full


def late_scale(c: Constants) -> Constants:
    """Return constants under which a factor on all scores waits for the exponential.

    Its argument is a product anyway.
    """
    if c.softcap > 0 or c.alibi:
        return c
    if c.bias != "none":
        return c._replace(scored=c.scale, unit=LOG2_E.value)
    return c._replace(scored=1.0, unit=c.scored) if c.scale > 0 else c


@gluon.jit
def take_bias(ring, turn, s):
    """Return the tile of a turn, laid out as the scores `s` are, and give its slot back."""
    tiles = ring.tiles
    slot = wait_full(ring.full, turn, 2)
    tile = tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]]).load(s.type.layout)
    fence_async_shared()  # the next copy must not overtake these reads
    mbarrier.arrive(ring.empty.index(slot), count=1)
    return tile


@gluon.jit
def load_block(tensor, rows, block, inside, KEYS: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Return what a bias or mask ``(pointer, stride)`` holds for rows and a block of keys."""
    pointers = tensor[0] + rows.to(gl.int64) * tensor[1]
    if KEYS:
        pointers = pointers + block * C.block_n
    columns = gl.arange(0, C.block_n, gl.SliceLayout(0, S))[None, :]
    return load_modifier(pointers, columns, True, inside, KEYS)


@gluon.jit
def scores_of_block(
    products, modifiers, rows, block, turn, lengths, ENDS: gl.constexpr, C: gl.constexpr
):
    """Return the scores of products; with `ENDS`, keys may be invisible by their position.

    `modifiers` are a bias, a mask and a slope.  With `C.bias_tiles`, the bias is a ring, whose turn
    `turn` has it.
    """
    S: gl.constexpr = products.type.layout
    bias, mask, slope = modifiers
    Q_LEN, KV_LEN = lengths
    held = gl.minimum(rows, Q_LEN - 1)  # Rows beyond the last have no bias in memory
    keys = (block * C.block_n + gl.arange(0, C.block_n, gl.SliceLayout(0, S)))[None, :]
    positions = position_of(rows, Q_LEN, KV_LEN, C)
    inside = keys < KV_LEN if ENDS else True
    biases, seen = 0.0, 0
    if C.bias_tiles:
        biases = take_bias(bias, turn, products)
    elif C.bias != "none":
        biases = load_block(bias, held, block, inside, C.bias_keys, S, C)
    if C.has_mask:
        seen = load_block(mask, held, block, inside, C.mask_keys, S, C)
    return scores_of(products, biases, seen, slope, positions, keys, KV_LEN, ENDS, C)
