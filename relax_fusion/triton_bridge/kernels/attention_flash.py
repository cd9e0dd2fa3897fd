"""Attention of many queries on Hopper: one warp that copies, two warp groups that compute.

``softmax(scores(q @ k^T)) @ v`` per head; what is done to the scores is in `attention_core`.

Regime: operations, ``2 q_len kv_len (head_dim + v_dim)`` a head, and an exponential a score; those
of a 128 x 128 tile take as long as both its matmuls at 64 features, half as long at 128.

Shape: each warp group has 64 queries of one head, and both share the keys and values that two rings
hold.  The schedule is FlashAttention-3's (Shah et al., 2024, https://arxiv.org/abs/2407.08608): a
warp group asks for the products of its queries with a block of keys, then for those of the last
block's weights, which stay in registers, with its values, and while the matrix units work at
these it takes the exponentials of the former.  Blocks are walked from the last one that a row sees
to the first, so that those of which a row may see a part come before and after the main loop.

Programs are persistent: `attention_walk` says which tiles they take.  The copying warp is ahead of
the others by what the rings hold, and so has the next queries there when a tile is done.

Tried on an H200 and left out (`2026-11-21-attention_flash_experiments.log`): warp groups that take
turns at the matrix units, one tile for two heads of a group, and blocks of 64 keys were no faster;
three warp groups were by 3 % at 8192 keys of 64 features, and far slower at 512; a bias that is
loaded a block ahead was by a fifth where it is float32, and slower in float16.  Copied as tiles, it
is by a fifth to a third there (`2026-11-21-attention_bias.log`); more than one slot for each warp
group gains nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .addresses import swizzled_tile
from .attention_core import (
    address,
    common_range,
    head_of,
    load_sinks,
    shift_of,
    span_of,
    visible_range,
    weigh,
)
from .attention_flash_products import (
    ask_products,
    ask_values,
    of_rows,
    part_count,
    part_start,
    part_width,
    result_layout,
    wait_next,
    wait_values,
    zeros,
)
from .attention_flash_scores import scores_of_block
from .ring import copy_tile, make_ring, wait_empty, wait_full

ROWS = gl.constexpr(128)
"""Queries of a tile: 64 for each of two warp groups."""


@gluon.jit
def tiles_of_program(BATCH, Q_LEN, C: gl.constexpr):
    """Return how many tiles this program computes."""
    tiles = BATCH * C.heads * ((Q_LEN + ROWS - 1) // ROWS)
    rounds = tiles // gl.num_programs(0)
    left = tiles % gl.num_programs(0)
    return rounds + (place_in_round(rounds) < left).to(gl.int32)


@gluon.jit
def place_in_round(count):
    """Return where this program stands in a round: first in one, it is last in the next.

    Tiles come from the longest to the shortest, and so all programs get as much to do.
    """
    x = gl.program_id(0)
    return gl.where(count % 2 == 0, x, gl.num_programs(0) - 1 - x)


@gluon.jit
def query_tile(count, BATCH, Q_LEN, C: gl.constexpr):
    """Return batch entry, head and first row of this program's tile number `count`."""
    tile = count * gl.num_programs(0) + place_in_round(count)
    tiles_m = (Q_LEN + ROWS - 1) // ROWS
    unit, turn = swizzled_tile(tile, BATCH * C.heads, tiles_m, C.section)
    return unit // C.heads, unit % C.heads, (tiles_m - 1 - turn) * ROWS


@gluon.jit
def key_blocks(m_start, Q_LEN, KV_LEN, C: gl.constexpr):
    """Return ``(end, counts)``: a tile's blocks of keys are the ``counts[3]`` in front of `end`.

    They are walked backwards.  The first may reach beyond the last key (and be the only one, of
    which no row sees a key); of those before ``counts[1]`` and from ``counts[2]`` on, a row may see
    a part.
    """
    first, last = span_of(m_start, ROWS, Q_LEN, KV_LEN, 1, C)
    begin_key, end_key = visible_range(first, last, KV_LEN, C)
    low_key, high_key = common_range(first, last, KV_LEN, C)
    begin = begin_key // C.block_n
    end = gl.maximum((end_key + C.block_n - 1) // C.block_n, begin + 1)
    high = gl.minimum(gl.maximum(high_key // C.block_n, begin), end - 1)
    low = gl.minimum((low_key + C.block_n - 1) // C.block_n, high)
    return end, (1, end - high, end - low, end - begin)


@gluon.constexpr_function
def row_layout(columns):
    """Return a warp group's layout of so many columns in which each thread has 16 bytes of a row.

    So results of 2 bytes are stored; a matrix instruction leaves a thread pairs of columns.
    """
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def request_tiles(maps, rings, bias_ring, sizes, C: gl.constexpr):
    """Fill the rings for every tile of this program, in the order in which they are drained."""
    q, k, v, bias = maps
    q_ring, k_ring, v_ring = rings
    BATCH, Q_LEN, KV_LEN = sizes
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    turn = 0
    for count in range(tiles_of_program(BATCH, Q_LEN, C)):
        batch, head, m_start = query_tile(count, BATCH, Q_LEN, C)
        end, counts = key_blocks(m_start, Q_LEN, KV_LEN, C)
        kv_head = head // C.group
        for i in range(counts[3]):
            row = (end - 1 - i) * C.block_n
            request(k, k_ring, turn + i, [batch, kv_head, row, 0])
            if i == 0:
                for w in gl.static_range(2):
                    request(q, q_ring, count * 2 + w, [batch, head, m_start + 64 * w, 0])
            else:
                request(v, v_ring, turn + i - 1, [batch, kv_head, row + C.block_n, 0])
            if C.bias_tiles:
                for w in gl.static_range(2):
                    where = bias_place(bias, batch, head, m_start + 64 * w, row)
                    request(bias.ptr, bias_ring, (turn + i) * 2 + w, where)
        turn += counts[3]
        request(v, v_ring, turn - 1, [batch, kv_head, (end - counts[3]) * C.block_n, 0])


@gluon.jit
def bias_place(bias, batch, head, row, key):
    """Return where a tile of the bias begins: at 0 along a dimension in which it broadcasts."""
    return [gl.where(bias.b == 0, 0, batch), gl.where(bias.n == 0, 0, head), row, key]


@gluon.jit
def request(desc, ring, turn, where):
    """Ask for the tile of a turn, once its slot is free."""
    slot = wait_empty(ring.empty, turn, ring.tiles.shape[0])
    full = ring.full.index(slot)
    mbarrier.expect(full, desc.block_shape[2] * desc.block_shape[3] * 2)
    copy_tile(desc, where, full, ring.tiles.index(slot))


@gluon.jit
def attend(rings, modifiers, sinks, lengths, blocks, rows, first, q_turn, C: gl.constexpr):
    """Return the result ``[64, features]`` of rows, from keys and values of turn `first` on."""
    q_ring, k_ring, v_ring = rings
    end, counts = blocks
    q_slot = wait_full(q_ring.full, q_turn, 2 * C.q_stages)
    q_tile = q_ring.tiles.index(q_slot).reshape([64, q_ring.tiles.shape[4]])
    k_slot = wait_full(k_ring.full, first, C.stages)
    s = ask_products(q_tile, k_ring, first, C)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_ring.empty.index(k_slot), count=1)
    warp_group = q_turn % 2
    s = scores_of_block(s, modifiers, rows, end - 1, first * 2 + warp_group, lengths, True, C)
    highest = gl.full([64], float("-inf"), gl.float32, rows.type.layout)
    total = gl.full([64], 0.0, gl.float32, rows.type.layout)
    sums = ()
    for i in gl.static_range(part_count(C.v_dim)):
        sums += (zeros(part_width(C.v_dim, i)),)  # type: ignore[assignment]
    weights, rescale, highest, total = weigh(s, highest, total, C.unit)
    wait_next(k_ring.full, first + 1, counts[3] > 1, C)
    for part in gl.static_range(3):
        if part == 1 or (part == 0 and C.causal != "none") or (part == 2 and C.window > 0):
            for i in range(counts[part], counts[part + 1]):
                turn = first + i
                s = ask_products(q_tile, k_ring, turn, C)
                asked, operands = ask_values(v_ring, turn - 1, weights, rescale, sums, C)
                s = warpgroup_mma_wait(part_count(C.v_dim), deps=[s])
                mbarrier.arrive(k_ring.empty.index(turn % C.stages), count=1)
                bias_turn = turn * 2 + warp_group
                ENDS: gl.constexpr = part != 1
                s = scores_of_block(s, modifiers, rows, end - 1 - i, bias_turn, lengths, ENDS, C)
                weights, rescale, highest, total = weigh(s, highest, total, C.unit)
                wait_next(k_ring.full, turn + 1, i + 1 < counts[3], C)
                sums = wait_values(asked, operands)
                mbarrier.arrive(v_ring.empty.index((turn - 1) % C.stages), count=1)
    mbarrier.arrive(q_ring.empty.index(q_slot), count=1)
    turn = first + counts[3] - 1
    asked, operands = ask_values(v_ring, turn, weights, rescale, sums, C)
    nothing = total == 0.0
    if C.sinks:
        total += gl.exp2(sinks - shift_of(highest, C.unit))
    inverse = 1.0 / total
    sums = wait_values(asked, operands)
    mbarrier.arrive(v_ring.empty.index(turn % C.stages), count=1)
    results = ()
    for i in gl.static_range(part_count(C.v_dim)):
        shares = sums[i] * of_rows(inverse, sums[i])
        results += (gl.where(of_rows(nothing, sums[i]), 0.0, shares),)  # type: ignore[assignment]
    return results


@gluon.jit
def consume(rings, bias_ring, tensors, sizes, C: gl.constexpr, INDEX: gl.constexpr):
    """Compute and store 64 rows of every tile of this program: those of warp group `INDEX`."""
    bias, mask, slopes_ptr, sinks_ptr, out = tensors
    BATCH, Q_LEN, KV_LEN = sizes
    S: gl.constexpr = result_layout(C.block_n)
    if C.pdl:
        gdc_wait()
    turn = 0
    for count in range(tiles_of_program(BATCH, Q_LEN, C)):
        batch, head, m_start = query_tile(count, BATCH, Q_LEN, C)
        blocks = key_blocks(m_start, Q_LEN, KV_LEN, C)
        m_start += INDEX * 64
        slope, sinks = 0.0, 0.0
        if C.alibi:
            slope = gl.load(slopes_ptr + head)
        if C.sinks:
            sinks = load_sinks(sinks_ptr, head)
        bias_rows = bias_ring
        if not C.bias_tiles:
            bias_rows = (head_of(bias, batch, head), bias.s)
        modifiers = (bias_rows, (head_of(mask, batch, head), mask.s), slope)
        rows = m_start + gl.arange(0, 64, gl.SliceLayout(1, S))
        lengths = (Q_LEN, KV_LEN)
        found = attend(rings, modifiers, sinks, lengths, blocks, rows, turn, count * 2 + INDEX, C)
        for i in gl.static_range(part_count(C.v_dim)):
            store_rows(out, batch, head, found[i], m_start, Q_LEN, part_start(C.v_dim, i), C)
        turn += blocks[1][3]


@gluon.jit
def store_rows(out, batch, head, acc, m_start, Q_LEN, FIRST: gl.constexpr, C: gl.constexpr):
    """Store a warp group's result, features from `FIRST` on."""
    OUT: gl.constexpr = row_layout(acc.shape[1])
    y = gl.convert_layout(acc.to(out.ptr.dtype.element_ty), OUT)
    rows = m_start + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    features = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, OUT))
    mask = (rows < Q_LEN)[:, None] & (features < C.v_dim)[None, :]
    gl.store(address(out, batch, rows, head)[:, None] + features[None, :], y, mask=mask)


@gluon.jit
def attention_flash(
    q, k, v, bias, mask, slopes_ptr, sinks_ptr, out, BATCH, Q_LEN, KV_LEN, C: gl.constexpr
):
    """Compute this program's tiles of 128 queries.  Grid: ``(min(tiles, SMs),)``, or any smaller.

    There are ``BATCH * heads * ceil(Q_LEN / 128)`` tiles.

    Parameters
    ----------
    q, k, v : tensor maps of ``[batch, heads, rows, features]``
        Blocks ``[1, 1, 64, d]``, ``[1, 1, block_n, d]`` and ``[1, 1, block_n, dv]``; d and dv are
        powers of two, not less than the features of a key and of a value.
    bias, mask, out : HeadTensor
        With `C.bias_tiles`, the pointer of the bias is a tensor map with blocks
        ``[1, 1, 64, block_n]``, of two bytes an element.
    slopes_ptr, sinks_ptr : ``[heads]``
    BATCH, Q_LEN, KV_LEN : int32
    C : Constants
        `stages`, `q_stages`: slots of the rings of keys and of values; tiles of queries that may be
        there at once.  `section`: heads whose tiles are walked from the longest to the shortest
        before those of more heads.
    """
    q_ring, k_ring = make_ring(q, 2 * C.q_stages, 1), make_ring(k, C.stages, 2)
    rings = (q_ring, k_ring, make_ring(v, C.stages, 2))
    bias_ring = ()
    if C.bias_tiles:
        bias_ring = make_ring(bias.ptr, 2, 1)
    tensors = (bias, mask, slopes_ptr, sinks_ptr, out)
    sizes = (BATCH, Q_LEN, KV_LEN)
    gl.warp_specialize(
        [
            (consume, (rings, bias_ring, tensors, sizes, C, 0)),
            (consume, (rings, bias_ring, tensors, sizes, C, 1)),
            (request_tiles, ((q, k, v, bias), rings, bias_ring, sizes, C)),
        ],
        [4, 1],
        [240, 24],
    )
