"""Attention of many queries on Hopper: one warp that copies, two or three warp groups that compute.

``softmax(scores(q @ k^T)) @ v`` per head; what may be done to the scores is in `attention_scores`.

Regime: operations, ``2 q_len kv_len (head_dim + v_dim)`` a head, and as many exponentials as scores;
a multiprocessor takes as long for 128 x 64 scores of 64 features as for their exponentials.

Shape: a tile of queries is 64 rows for each warp group, which share keys and values in two rings
of shared memory.  The schedule is FlashAttention-3's (Shah et al., 2024,
https://arxiv.org/abs/2407.08608): while the matrix units multiply the weights of one block of keys
with its values, which they read from registers, a warp group asks for the products of the next
block with the queries and takes their exponentials.  Blocks are walked from the last that a row
sees to the first, so that those at the ends, where some rows see a part only, are outside of the
main loop.

The tiles of a causal mask differ in work.  The longest come first, and for `SECTION` heads at a
time, whose keys and values stay in L2 meanwhile.
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

from .attention_scores import (
    LOG2_E,
    biased,
    common_range,
    is_visible,
    position_of,
    scaled_scores,
    visible_range,
    with_slopes,
)
from .epilogue import row_layout
from .ring import copy_tile, make_barriers, wait_empty, wait_full
from .tiles import swizzled_tile


@gluon.jit
def query_tile(
    tile, BATCH, Q_LEN,
    HEADS: gl.constexpr, PACK: gl.constexpr, ROWS: gl.constexpr, SECTION: gl.constexpr,
):  # fmt: skip
    """Return batch entry, first head and first row of a tile: `PACK` heads, `ROWS` rows of each."""
    UNITS: gl.constexpr = HEADS // PACK
    tiles_m = (Q_LEN + ROWS - 1) // ROWS
    unit, turn = swizzled_tile(tile, BATCH * UNITS, tiles_m, SECTION)
    return unit // UNITS, unit % UNITS * PACK, (tiles_m - 1 - turn) * ROWS


@gluon.jit
def key_blocks(
    m_start, Q_LEN, KV_LEN,
    ROWS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return ``(begin, low, high, end)``: the blocks of keys that a tile sees, and all its rows.

    There is one at least, which may lie outside, and some row may see a part only of the last.
    """
    first = position_of(m_start, Q_LEN, KV_LEN, CAUSAL)
    last = position_of(gl.minimum(m_start + ROWS, Q_LEN) - 1, Q_LEN, KV_LEN, CAUSAL)
    begin_key, end_key = visible_range(first, last, KV_LEN, CAUSAL, WINDOW)
    low_key, high_key = common_range(first, last, KV_LEN, CAUSAL, WINDOW)
    begin = begin_key // BLOCK_N
    end = gl.maximum((end_key + BLOCK_N - 1) // BLOCK_N, begin + 1)
    high = gl.minimum(gl.maximum(high_key // BLOCK_N, begin), end - 1)
    low = gl.minimum((low_key + BLOCK_N - 1) // BLOCK_N, high)
    return begin, low, high, end


@gluon.jit
def request_tiles(
    maps,
    ring,
    sizes,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PACK: gl.constexpr,
    SECTION: gl.constexpr,
    PDL: gl.constexpr,
):
    """Fill the rings for every tile of this program, in the order in which they are drained."""
    q, k, v = maps
    q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    BATCH, Q_LEN, KV_LEN, tiles = sizes
    ROWS: gl.constexpr = 64 * CONSUMERS // PACK
    Q_BYTES: gl.constexpr = 64 * q.block_shape[3] * 2
    K_BYTES: gl.constexpr = BLOCK_N * k.block_shape[3] * 2
    V_BYTES: gl.constexpr = BLOCK_N * v.block_shape[3] * 2
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    turn = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, m_start = query_tile(tile, BATCH, Q_LEN, HEADS, PACK, ROWS, SECTION)
        begin, _, _, end = key_blocks(m_start, Q_LEN, KV_LEN, ROWS, CAUSAL, WINDOW, BLOCK_N)
        kv_head = head // GROUP
        for i in range(0, end - begin):
            block = end - 1 - i
            slot = wait_empty(k_empty, turn + i, STAGES)
            mbarrier.expect(k_full.index(slot), K_BYTES)
            copy_tile(
                k, [batch, kv_head, block * BLOCK_N, 0], k_full.index(slot), k_tiles.index(slot)
            )
            if i == 0:
                for c in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(c), (count & 1) ^ 1)
                    mbarrier.expect(q_full.index(c), Q_BYTES)
                    row = m_start + (0 if PACK > 1 else c * 64)
                    copy_tile(
                        q, [batch, head + (c if PACK > 1 else 0), row, 0],
                        q_full.index(c), q_tiles.index(c),
                    )  # fmt: skip
            else:
                slot = wait_empty(v_empty, turn + i - 1, STAGES)
                mbarrier.expect(v_full.index(slot), V_BYTES)
                copy_tile(
                    v, [batch, kv_head, (block + 1) * BLOCK_N, 0],
                    v_full.index(slot), v_tiles.index(slot),
                )  # fmt: skip
        turn += end - begin
        slot = wait_empty(v_empty, turn - 1, STAGES)
        mbarrier.expect(v_full.index(slot), V_BYTES)
        copy_tile(v, [batch, kv_head, begin * BLOCK_N, 0], v_full.index(slot), v_tiles.index(slot))
        count += 1


@gluon.jit
def load_per_score(
    pointer,
    rows,
    row_stride,
    key_start,
    columns,
    KV_LEN,
    FULL_KEYS: gl.constexpr,
    ENDS: gl.constexpr,
):
    """Return what a bias or mask holds for ``[rows, keys]``; zero for keys beyond the last."""
    pointers = (pointer + rows.to(gl.int64) * row_stride)[:, None]
    if FULL_KEYS:
        pointers = (pointers + key_start) + columns[None, :]
        if ENDS:
            return gl.load(pointers, mask=(key_start + columns < KV_LEN)[None, :], other=0)
        else:
            return gl.load(pointers)
    else:
        return gl.load(pointers)


@gluon.jit
def modified_scores(
    s,
    extras,
    rows,
    block,
    Q_LEN,
    KV_LEN,
    SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BIAS: gl.constexpr,
    BIAS_KEYS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    MASK_KEYS: gl.constexpr,
    ALIBI: gl.constexpr,
    ENDS: gl.constexpr,
):
    """Return the scores of a block of keys; with `ENDS`, some may be invisible by position."""
    bias, bias_stride, mask, mask_stride, slope = extras
    L: gl.constexpr = s.type.layout
    columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, L))
    keys = block * s.shape[1] + columns
    positions = position_of(rows, Q_LEN, KV_LEN, CAUSAL)
    if not is_plain(SCALE, SOFTCAP, BIAS, ALIBI):
        s = scaled_scores(s, SCALE, SOFTCAP)
    real_rows = gl.minimum(rows, Q_LEN - 1)
    if BIAS != "none":
        b = load_per_score(
            bias, real_rows, bias_stride, block * s.shape[1], columns, KV_LEN, BIAS_KEYS, ENDS
        )
        s = biased(s, b, BIAS)
    if ALIBI:
        s = with_slopes(s, slope, positions[:, None], keys[None, :])
    if HAS_MASK:
        visible = load_per_score(
            mask, real_rows, mask_stride, block * s.shape[1], columns, KV_LEN, MASK_KEYS, ENDS
        )
        s = gl.where(visible, s, float("-inf"))
    if ENDS:
        visible = is_visible(positions[:, None], keys[None, :], KV_LEN, CAUSAL, WINDOW)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.constexpr_function
def is_plain(scale, softcap, bias, alibi):
    """Tell whether scores are scaled products, so that the scale can wait for the exponential."""
    return softcap == 0.0 and bias == "none" and not alibi and scale > 0.0


@gluon.constexpr_function
def score_unit(scale, softcap, bias, alibi):
    """Return by what `modified_scores` are multiplied to be base-2 scores."""
    return scale * LOG2_E.value if is_plain(scale, softcap, bias, alibi) else 1.0


@gluon.jit
def weigh(s, highest, total, UNIT: gl.constexpr):
    """Return weights of scores, by what to multiply what went before, highest score, and sum.

    A row that has seen no key has -inf for its highest score, and weights of zero.
    """
    new = gl.maximum(highest, gl.max(s, axis=1))
    shift = gl.where(new == float("-inf"), 0.0, new) * UNIT
    weights = gl.exp2(s * UNIT - shift[:, None])
    rescale = gl.exp2(highest * UNIT - shift)
    return weights, rescale, new, total * rescale + gl.sum(weights, axis=1)


@gluon.jit
def named_barrier(index, ARRIVE: gl.constexpr):
    """Wait at barrier ``8 + index`` of both warp groups, or with `ARRIVE` only count as there."""
    one = gl.full([128], 8 + index, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    if ARRIVE:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [one], gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [one], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def consume(
    ring,
    pointers,
    sizes,
    strides,
    HEADS: gl.constexpr,
    V_DIM: gl.constexpr,
    SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BIAS: gl.constexpr,
    BIAS_KEYS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    MASK_KEYS: gl.constexpr,
    ALIBI: gl.constexpr,
    SINKS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PACK: gl.constexpr,
    SECTION: gl.constexpr,
    PDL: gl.constexpr,
    PINGPONG: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Compute and store 64 rows of every tile of this program: those of warp group `INDEX`."""
    q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    bias_ptr, mask_ptr, slopes_ptr, sinks_ptr, out_ptr = pointers
    BATCH, Q_LEN, KV_LEN, tiles = sizes
    (
        out_stride_b, out_stride_s, out_stride_n, bias_stride_b, bias_stride_n, bias_stride_q,
        mask_stride_b, mask_stride_n, mask_stride_q,
    ) = strides  # fmt: skip
    V_PAD: gl.constexpr = v_tiles.shape[4]
    ROWS: gl.constexpr = 64 * CONSUMERS // PACK
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_PAD, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    UNIT: gl.constexpr = score_unit(SCALE, SOFTCAP, BIAS, ALIBI)
    if PDL:
        gdc_wait()
    if PINGPONG and INDEX == 1:
        named_barrier(0, True)
    q_tile = q_tiles.index(INDEX).reshape([64, q_tiles.shape[4]])
    turn = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, m_start = query_tile(tile, BATCH, Q_LEN, HEADS, PACK, ROWS, SECTION)
        begin, low, high, end = key_blocks(m_start, Q_LEN, KV_LEN, ROWS, CAUSAL, WINDOW, BLOCK_N)
        if PACK > 1:
            head += INDEX
        else:
            m_start += INDEX * 64
        batch64 = batch.to(gl.int64)
        head64 = head.to(gl.int64)
        rows = m_start + gl.arange(0, 64, gl.SliceLayout(1, S))
        slope = 0.0
        if ALIBI:
            slope = gl.load(slopes_ptr + head)
        extras = (
            bias_ptr + batch64 * bias_stride_b + head64 * bias_stride_n, bias_stride_q,
            mask_ptr + batch64 * mask_stride_b + head64 * mask_stride_n, mask_stride_q,
            slope,
        )  # fmt: skip

        mbarrier.wait(q_full.index(INDEX), count & 1)
        slot = wait_full(k_full, turn, STAGES)
        k_tile = k_tiles.index(slot).reshape([BLOCK_N, k_tiles.shape[4]]).permute((1, 0))
        zero = gl.zeros([64, BLOCK_N], gl.float32, S)
        s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(slot), count=1)
        s = modified_scores(
            s, extras, rows, end - 1, Q_LEN, KV_LEN, SCALE, CAUSAL, WINDOW, SOFTCAP,
            BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, True,
        )  # fmt: skip
        highest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
        weights, rescale, highest, total = weigh(s, highest, total, UNIT)
        acc = gl.zeros([64, V_PAD], gl.float32, O)
        last_turn = turn + end - begin - 1
        mbarrier.wait(
            k_full.index((turn + 1) % STAGES), ((turn + 1) // STAGES) & 1, pred=turn < last_turn
        )
        for part in gl.static_range(3):
            if (part == 0 and CAUSAL != "none") or part == 1 or (part == 2 and WINDOW > 0):
                if part == 0:
                    first, stop = high, end - 1
                elif part == 1:
                    first, stop = low, high
                else:
                    first, stop = begin, low
                for i in range(0, stop - first):
                    block = stop - 1 - i
                    turn += 1
                    slot = turn % STAGES
                    k_tile = k_tiles.index(slot).reshape([BLOCK_N, k_tiles.shape[4]])
                    k_tile = k_tile.permute((1, 0))
                    if PINGPONG:
                        named_barrier(INDEX, False)
                    zero = gl.zeros([64, BLOCK_N], gl.float32, S)
                    s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
                    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O))[:, None]
                    p = gl.convert_layout(weights.to(k_tiles.dtype), P)
                    v_slot = wait_full(v_full, turn - 1, STAGES)
                    v_tile = v_tiles.index(v_slot).reshape([BLOCK_N, V_PAD])
                    acc = warpgroup_mma(p, v_tile, acc, is_async=True)
                    if PINGPONG:
                        named_barrier(1 - INDEX, True)
                    s = warpgroup_mma_wait(1, deps=[s])
                    mbarrier.arrive(k_empty.index(slot), count=1)
                    s = modified_scores(
                        s, extras, rows, block, Q_LEN, KV_LEN, SCALE, CAUSAL, WINDOW, SOFTCAP,
                        BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, part != 1,
                    )  # fmt: skip
                    weights, rescale, highest, total = weigh(s, highest, total, UNIT)
                    mbarrier.wait(
                        k_full.index((turn + 1) % STAGES), ((turn + 1) // STAGES) & 1,
                        pred=turn < last_turn,
                    )  # fmt: skip
                    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                    mbarrier.arrive(v_empty.index(v_slot), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O))[:, None]
        p = gl.convert_layout(weights.to(k_tiles.dtype), P)
        mbarrier.arrive(q_empty.index(INDEX), count=1)
        v_slot = wait_full(v_full, turn, STAGES)
        acc = warpgroup_mma(p, v_tiles.index(v_slot).reshape([BLOCK_N, V_PAD]), acc, is_async=True)
        if SINKS:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
            shift = gl.where(highest == float("-inf"), 0.0, highest) * UNIT
            total += gl.exp2(sink - shift)
        inverse = gl.where(total == 0.0, 0.0, 1.0 / total)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O))[:, None]
        turn += 1
        count += 1
        OUT: gl.constexpr = row_layout(V_PAD)
        y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
        m_out = m_start + gl.arange(0, 64, gl.SliceLayout(1, OUT))
        features = gl.arange(0, V_PAD, gl.SliceLayout(0, OUT))
        mask = (m_out < Q_LEN)[:, None]
        if V_DIM < V_PAD:
            mask = mask & (features < V_DIM)[None, :]
        base = out_ptr + batch64 * out_stride_b + head64 * out_stride_n
        offsets = m_out.to(gl.int64)[:, None] * out_stride_s + features[None, :]
        gl.store(base + offsets, y, mask=mask)


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
    HAS_MASK: gl.constexpr,
    MASK_KEYS: gl.constexpr,
    ALIBI: gl.constexpr,
    SINKS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PACK: gl.constexpr,
    SECTION: gl.constexpr,
    PDL: gl.constexpr,
    PINGPONG: gl.constexpr = False,
):
    """Compute every ``num_programs``-th tile of ``64 CONSUMERS`` rows.

    Parameters
    ----------
    q, k, v : tensor maps ``[batch, heads, rows, features]``
        Blocks ``[1, 1, 64, d]``, ``[1, 1, BLOCK_N, d]`` and ``[1, 1, BLOCK_N, dv]``.
    """
    ROWS: gl.constexpr = 64 * CONSUMERS // PACK
    tiles = BATCH * (HEADS // PACK) * ((Q_LEN + ROWS - 1) // ROWS)
    D: gl.constexpr = q.block_shape[3]
    DV: gl.constexpr = v.block_shape[3]
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, 64, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DV], v.layout)
    q_full, q_empty = make_barriers(CONSUMERS, 1)
    k_full, k_empty = make_barriers(STAGES, CONSUMERS)
    v_full, v_empty = make_barriers(STAGES, CONSUMERS)
    ring = (q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    pointers = (bias_ptr, mask_ptr, slopes_ptr, sinks_ptr, out_ptr)
    sizes = (BATCH, Q_LEN, KV_LEN, tiles)
    strides = (
        out_stride_b, out_stride_s, out_stride_n, bias_stride_b, bias_stride_n, bias_stride_q,
        mask_stride_b, mask_stride_n, mask_stride_q,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (
                    ring, pointers, sizes, strides, HEADS, V_DIM, SCALE, CAUSAL, WINDOW, SOFTCAP,
                    BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, SINKS, BLOCK_N, STAGES, CONSUMERS,
                    PACK, SECTION, PDL, PINGPONG, 0,
                )),
                (consume, (
                    ring, pointers, sizes, strides, HEADS, V_DIM, SCALE, CAUSAL, WINDOW, SOFTCAP,
                    BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, SINKS, BLOCK_N, STAGES, CONSUMERS,
                    PACK, SECTION, PDL, PINGPONG, 1,
                )),
                (request_tiles, (
                    (q, k, v), ring, sizes, HEADS, GROUP, CAUSAL, WINDOW, BLOCK_N, STAGES,
                    CONSUMERS, PACK, SECTION, PDL,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    ring, pointers, sizes, strides, HEADS, V_DIM, SCALE, CAUSAL, WINDOW, SOFTCAP,
                    BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, SINKS, BLOCK_N, STAGES, CONSUMERS,
                    PACK, SECTION, PDL, PINGPONG, 0,
                )),
                (consume, (
                    ring, pointers, sizes, strides, HEADS, V_DIM, SCALE, CAUSAL, WINDOW, SOFTCAP,
                    BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, SINKS, BLOCK_N, STAGES, CONSUMERS,
                    PACK, SECTION, PDL, PINGPONG, 1,
                )),
                (consume, (
                    ring, pointers, sizes, strides, HEADS, V_DIM, SCALE, CAUSAL, WINDOW, SOFTCAP,
                    BIAS, BIAS_KEYS, HAS_MASK, MASK_KEYS, ALIBI, SINKS, BLOCK_N, STAGES, CONSUMERS,
                    PACK, SECTION, PDL, PINGPONG, 2,
                )),
                (request_tiles, (
                    (q, k, v), ring, sizes, HEADS, GROUP, CAUSAL, WINDOW, BLOCK_N, STAGES,
                    CONSUMERS, PACK, SECTION, PDL,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
