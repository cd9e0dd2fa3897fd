"""Attention of many queries on Hopper: one warp that copies, two warp groups that compute.

``softmax(scores(q @ k^T)) @ v`` per head; what is done to the scores is in `attention_scores`.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_scores import LOG2_E
from .attention_walk import constants, key_blocks, query_tile, tiles_of_program
from .attention_weights import scores_of, shift_of, weigh
from .epilogue import row_layout
from .ring import copy_tile, make_barriers, wait_empty, wait_full


@gluon.jit
def request_tiles(maps, ring, bias_ring, bias_strides, sizes, C: gl.constexpr):
    """Fill the rings for every tile of this program, in the order in which they are drained."""
    q, k, v, bias = maps
    q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
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
            request(k, k_tiles, k_full, k_empty, turn + i, [batch, kv_head, row, 0], C.stages)
            if i == 0:
                turn_q = count * 2
                where = [batch, head, m_start, 0]
                request(q, q_tiles, q_full, q_empty, turn_q, where, 2 * C.q_stages)
                where = [batch, head, m_start + 64, 0]
                request(q, q_tiles, q_full, q_empty, turn_q + 1, where, 2 * C.q_stages)
            else:
                where = [batch, kv_head, row + C.block_n, 0]
                request(v, v_tiles, v_full, v_empty, turn + i - 1, where, C.stages)
            if C.bias_tiles:
                b_tiles, b_full, b_empty = bias_ring
                for w in gl.static_range(2):
                    where = bias_place(batch, head, m_start + 64 * w, row, bias_strides)
                    turn_b = (turn + i) * 2 + w
                    request(bias, b_tiles, b_full, b_empty, turn_b, where, 2)
        turn += counts[3]
        where = [batch, kv_head, (end - counts[3]) * C.block_n, 0]
        request(v, v_tiles, v_full, v_empty, turn - 1, where, C.stages)


@gluon.jit
def bias_place(batch, head, row, key, strides):
    """Return where a tile of the bias begins: at 0 along a dimension in which it broadcasts."""
    return [gl.where(strides[0] == 0, 0, batch), gl.where(strides[1] == 0, 0, head), row, key]


@gluon.jit
def request(desc, tiles, full, empty, turn, where, STAGES: gl.constexpr):
    """Ask for the tile of a turn, once its slot is free."""
    slot = wait_empty(empty, turn, STAGES)
    mbarrier.expect(full.index(slot), desc.block_shape[2] * desc.block_shape[3] * 2)
    copy_tile(desc, where, full.index(slot), tiles.index(slot))


@gluon.jit
def ask_products(q_tile, k_tiles, turn, C: gl.constexpr):
    """Ask for the products of queries and the keys of a turn."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    k_tile = k_tiles.index(turn % C.stages).reshape([C.block_n, q_tile.shape[1]])
    zero = gl.full([64, C.block_n], 0.0, gl.float32, S)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def ask_values(v_tiles, v_full, turn, weights, rescale, acc, C: gl.constexpr):
    """Rescale the sums, and ask for the weighted values of a turn on top; return the weights too.

    Both happens here, behind `ask_products`, because the matrix units are busy meanwhile.
    """
    ACC: gl.constexpr = acc.type.layout
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, ACC))[:, None]
    p = gl.convert_layout(weights.to(v_tiles.dtype), P)
    slot = wait_full(v_full, turn, C.stages)
    v_tile = v_tiles.index(slot).reshape([C.block_n, acc.shape[1]])
    return warpgroup_mma(p, v_tile, acc, is_async=True), p


@gluon.jit
def wait_next(k_full, turn, wanted, C: gl.constexpr):
    """Wait for the keys of a turn, if `wanted`.

    ptxas does not move exponentials past this wait.  Without it, it puts them after the wait for
    the values in front of which they stand, to idle while the matrix units work.
    """
    mbarrier.wait(k_full.index(turn % C.stages), (turn // C.stages) & 1, pred=wanted)


@gluon.jit
def attend(ring, operands, sink, lengths, blocks, rows, first, q_turn, C: gl.constexpr):
    """Return the result ``[64, features]`` of rows, from keys and values of turn `first` on."""
    q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    end, counts = blocks
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v_tiles.shape[4], 16])
    q_slot = wait_full(q_full, q_turn, 2 * C.q_stages)
    q_tile = q_tiles.index(q_slot).reshape([64, q_tiles.shape[4]])
    k_slot = wait_full(k_full, first, C.stages)
    s = ask_products(q_tile, k_tiles, first, C)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    warp_group = q_turn % 2
    s = scores_of(s, operands, rows, end - 1, first * 2 + warp_group, lengths, True, C)
    highest = gl.full([64], float("-inf"), gl.float32, rows.type.layout)
    total = gl.full([64], 0.0, gl.float32, rows.type.layout)
    acc = gl.full([64, v_tiles.shape[4]], 0.0, gl.float32, ACC)
    weights, rescale, highest, total = weigh(s, highest, total, C.unit)
    wait_next(k_full, first + 1, counts[3] > 1, C)
    for part in gl.static_range(3):
        if part == 1 or (part == 0 and C.causal != "none") or (part == 2 and C.window > 0):
            for i in range(counts[part], counts[part + 1]):
                turn = first + i
                s = ask_products(q_tile, k_tiles, turn, C)
                acc, p = ask_values(v_tiles, v_full, turn - 1, weights, rescale, acc, C)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(turn % C.stages), count=1)
                bias_turn = turn * 2 + warp_group
                s = scores_of(s, operands, rows, end - 1 - i, bias_turn, lengths, part != 1, C)
                weights, rescale, highest, total = weigh(s, highest, total, C.unit)
                wait_next(k_full, turn + 1, i + 1 < counts[3], C)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                mbarrier.arrive(v_empty.index((turn - 1) % C.stages), count=1)
    mbarrier.arrive(q_empty.index(q_slot), count=1)
    turn = first + counts[3] - 1
    acc, p = ask_values(v_tiles, v_full, turn, weights, rescale, acc, C)
    nothing = gl.convert_layout(total == 0.0, gl.SliceLayout(1, ACC))[:, None]
    if C.sinks:
        total += gl.exp2(sink - shift_of(highest, C.unit))
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, ACC))[:, None]
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_empty.index(turn % C.stages), count=1)
    return gl.where(nothing, 0.0, acc * inverse)


@gluon.jit
def head_of(pointer, batch, head, strides):
    """Return the pointer of a batch entry's head."""
    return pointer + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]


@gluon.jit
def consume(ring, bias_ring, pointers, sizes, strides, C: gl.constexpr, INDEX: gl.constexpr):
    """Compute and store 64 rows of every tile of this program: those of warp group `INDEX`."""
    bias_ptr, mask_ptr, slopes_ptr, sinks_ptr, out_ptr = pointers
    BATCH, Q_LEN, KV_LEN = sizes
    out_strides, bias_strides, mask_strides = strides
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    if C.pdl:
        gdc_wait()
    turn = 0
    for count in range(tiles_of_program(BATCH, Q_LEN, C)):
        batch, head, m_start = query_tile(count, BATCH, Q_LEN, C)
        blocks = key_blocks(m_start, Q_LEN, KV_LEN, C)
        m_start += INDEX * 64
        slope = 0.0
        sink = 0.0
        if C.alibi:
            slope = gl.load(slopes_ptr + head)
        if C.sinks:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        bias = bias_ring
        if not C.bias_tiles:
            bias = head_of(bias_ptr, batch, head, bias_strides)
        mask = head_of(mask_ptr, batch, head, mask_strides)
        operands = (bias, bias_strides[2], mask, mask_strides[2], slope)
        rows = m_start + gl.arange(0, 64, gl.SliceLayout(1, S))
        lengths = (Q_LEN, KV_LEN)
        acc = attend(ring, operands, sink, lengths, blocks, rows, turn, count * 2 + INDEX, C)
        out = head_of(out_ptr, batch, head, out_strides)
        store_rows(out, out_strides[2], acc, m_start, Q_LEN, C)
        turn += blocks[1][3]


@gluon.jit
def store_rows(pointer, row_stride, acc, m_start, Q_LEN, C: gl.constexpr):
    """Store a warp group's result."""
    OUT: gl.constexpr = row_layout(acc.shape[1])
    y = gl.convert_layout(acc.to(pointer.dtype.element_ty), OUT)
    rows = m_start + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    features = gl.arange(0, acc.shape[1], gl.SliceLayout(0, OUT))
    mask = (rows < Q_LEN)[:, None] & (features < C.v_dim)[None, :]
    gl.store(pointer + rows.to(gl.int64)[:, None] * row_stride + features[None, :], y, mask=mask)


@gluon.jit
def attention_flash(
    q,
    k,
    v,
    bias_ptr,
    mask_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    BATCH,
    Q_LEN,
    KV_LEN,
    out_stride_b,
    out_stride_s,
    out_stride_n,
    bias_stride_b,
    bias_stride_n,
    bias_stride_q,
    mask_stride_b,
    mask_stride_n,
    mask_stride_q,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    V_DIM: gl.constexpr,
    SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BIAS: gl.constexpr,
    BIAS_KEYS: gl.constexpr,
    BIAS_TILES: gl.constexpr,
    HAS_MASK: gl.constexpr,
    MASK_KEYS: gl.constexpr,
    ALIBI: gl.constexpr,
    SINKS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    SECTION: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute this program's tiles of 128 queries.  Grid: ``(min(tiles, SMs),)``, or any smaller.

    There are ``BATCH * HEADS * ceil(Q_LEN / 128)`` tiles.

    Parameters
    ----------
    q, k, v : tensor maps of ``[batch, heads, rows, features]``
        Blocks ``[1, 1, 64, d]``, ``[1, 1, BLOCK_N, d]`` and ``[1, 1, BLOCK_N, dv]``; d and dv are
        powers of two, not less than the features of a key and of a value.
    bias_ptr, mask_ptr : float and bool ``[batch, heads, Q_LEN, KV_LEN]``, or ones for any of them
        With `BIAS_TILES`, the bias is a tensor map with blocks ``[1, 1, 64, BLOCK_N]``, of two
        bytes an element.
    slopes_ptr, sinks_ptr : ``[HEADS]``
    BATCH, Q_LEN, KV_LEN : int32
    *_stride_* : int
        In elements; 0 where there is one value for all, the last stride is 1.
    BIAS_KEYS, MASK_KEYS : bool
        Whether they hold a value for each key.
    STAGES, Q_STAGES : int
        Slots of the rings of keys and of values; tiles of queries that may be there at once.
    SECTION : int
        Heads whose tiles are walked from the longest to the shortest before those of more heads.
    """
    C: gl.constexpr = constants(
        HEADS, GROUP, V_DIM, SCALE, CAUSAL, WINDOW, SOFTCAP, BIAS, BIAS_KEYS, BIAS_TILES, HAS_MASK,
        MASK_KEYS, ALIBI, SINKS, BLOCK_N, STAGES, Q_STAGES, SECTION, PDL,
    )  # fmt: skip
    D: gl.constexpr = q.block_shape[3]
    DV: gl.constexpr = v.block_shape[3]
    q_tiles = gl.allocate_shared_memory(q.dtype, [2 * Q_STAGES, 1, 1, 64, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DV], v.layout)
    q_full, q_empty = make_barriers(2 * Q_STAGES, 1)
    k_full, k_empty = make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 2)
    ring = (q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    bias_ring = ()
    if BIAS_TILES:
        b_tiles = gl.allocate_shared_memory(bias_ptr.dtype, [2, 1, 1, 64, BLOCK_N], bias_ptr.layout)
        b_full, b_empty = make_barriers(2, 1)
        bias_ring = (b_tiles, b_full, b_empty)  # type: ignore[assignment]
    pointers = (bias_ptr, mask_ptr, slopes_ptr, sinks_ptr, out_ptr)
    sizes = (BATCH, Q_LEN, KV_LEN)
    strides = (
        (out_stride_b, out_stride_n, out_stride_s),
        (bias_stride_b, bias_stride_n, bias_stride_q),
        (mask_stride_b, mask_stride_n, mask_stride_q),
    )
    gl.warp_specialize(
        [
            (consume, (ring, bias_ring, pointers, sizes, strides, C, 0)),
            (consume, (ring, bias_ring, pointers, sizes, strides, C, 1)),
            (request_tiles, ((q, k, v, bias_ptr), ring, bias_ring, strides[1], sizes, C)),
        ],
        [4, 1],
        [240, 24],
    )
