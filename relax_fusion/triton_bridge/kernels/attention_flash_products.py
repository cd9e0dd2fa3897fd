"""Products of `attention_flash`: which parts of tiles are multiplied, and who waits for them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .ring import wait_full


@gluon.constexpr_function
def part_widths(features):
    """Return the widths in which a tile's features are multiplied, powers of two.

    80 are 64 and 16, where the tile has 128.  A second part begins where 128 bytes of a row do, as
    those are what rows are swizzled by.
    """
    low = 1 << features.bit_length() - 1
    whole = max(16, 1 << (features - 1).bit_length())
    rest = max(16, 1 << (features - low - 1).bit_length())
    return (low, rest) if low >= 64 and low + rest < whole else (whole,)


@gluon.constexpr_function
def part_count(features):
    """Return how many parts there are."""
    return len(part_widths(features))


@gluon.constexpr_function
def part_width(features, index):
    """Return the width of a part."""
    return part_widths(features)[index]


@gluon.constexpr_function
def part_start(features, index):
    """Return the first feature of a part."""
    return sum(part_widths(features)[:index])


@gluon.constexpr_function
def result_layout(columns):
    """Return how a warp group's products of 64 rows lie in its registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    """Return sums of 64 rows of which there are none yet."""
    return gl.full([64, COLUMNS], 0.0, gl.float32, result_layout(COLUMNS))


@gluon.jit
def of_rows(values, sums):
    """Return a value for each row, as sums have their rows."""
    return gl.convert_layout(values, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def left_operand(values, sums):
    """Return values as the left operand of a product that is added to sums."""
    return gl.convert_layout(values, gl.DotOperandLayout(0, sums.type.layout, 2))


@gluon.jit
def part(tile, FEATURES: gl.constexpr, INDEX: gl.constexpr):
    """Return a part of a tile: matrix units have no work with what pads its features."""
    return tile.slice(part_start(FEATURES, INDEX), part_width(FEATURES, INDEX), 1)


@gluon.jit
def ask_products(q_tile, k_ring, turn, C: gl.constexpr):
    """Ask for the products of queries and the keys of a turn."""
    k_tile = k_ring.tiles.index(turn % C.stages).reshape([C.block_n, q_tile.shape[1]])
    s = zeros(C.block_n)
    for i in gl.static_range(part_count(C.head_dim)):
        keys = part(k_tile, C.head_dim, i).permute((1, 0))
        s = warpgroup_mma(part(q_tile, C.head_dim, i), keys, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def ask_values(v_ring, turn, weights, rescale, sums, C: gl.constexpr):
    """Rescale the sums, and ask for the weighted values of a turn on top; return the weights too.

    Both happens here, behind `ask_products`, because the matrix units are busy meanwhile.
    """
    scaled, operands = (), ()
    for i in gl.static_range(part_count(C.v_dim)):
        scaled += (sums[i] * of_rows(rescale, sums[i]),)  # type: ignore[assignment]
        operands += (left_operand(weights.to(v_ring.tiles.dtype), sums[i]),)  # type: ignore[assignment]
    slot = wait_full(v_ring.full, turn, C.stages)
    v_tile = v_ring.tiles.index(slot).reshape([C.block_n, v_ring.tiles.shape[4]])
    asked = ()
    for i in gl.static_range(part_count(C.v_dim)):
        values = part(v_tile, C.v_dim, i)
        asked += (warpgroup_mma(operands[i], values, scaled[i], is_async=True),)  # type: ignore[assignment]
    return asked, operands


@gluon.jit
def wait_values(asked, operands):
    """Wait for what `ask_values` asked for, and return the sums."""
    found = warpgroup_mma_wait(0, deps=asked + operands)
    sums = ()
    for i in gl.static_range(len(asked)):
        sums += (found[i],)  # type: ignore[assignment]
    return sums


@gluon.jit
def wait_next(k_full, turn, wanted, C: gl.constexpr):
    """Wait for the keys of a turn, if `wanted`.

    ptxas does not move exponentials past this wait.  Without it, it puts them after the wait for
    the values in front of which they stand, to idle while the matrix units work.
    """
    mbarrier.wait(k_full.index(turn % C.stages), (turn // C.stages) & 1, pred=wanted)
