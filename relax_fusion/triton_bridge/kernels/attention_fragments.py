"""Operands of `mma.sync` straight from memory to registers, and results back, 16 bytes at a time.

A product allows any order of what it sums, if it is the same on both sides, and any order of rows
and columns, if it is undone in the result.  So a lane holds 8 neighbouring features of queries,
keys and values, where the matrix units' own order would have it load 2.

Tensors have a dimension in front for groups of keys, each of which belongs to warps of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_core import address, head_of, load_sinks, merge, unpacked


@gluon.constexpr_function
def tile_widths(width):
    """Return the widths of the tiles that hold so many features: powers of two from 16 on.

    80 features are 64 and 16, where one tile would have 128.
    """
    sixteenths = (width + 15) // 16
    return [16 << bit for bit in reversed(range(8)) if sixteenths >> bit & 1]


@gluon.constexpr_function
def tile_width(width, index):
    """Return the features of one of the tiles."""
    return tile_widths(width)[index]


@gluon.constexpr_function
def tile_start(width, index):
    """Return the first feature of one of the tiles."""
    return sum(tile_widths(width)[:index])


@gluon.constexpr_function
def tile_count(width):
    """Return how many tiles there are."""
    return len(tile_widths(width))


@gluon.constexpr_function
def run_of(features):
    """Return how many neighbouring features of a tile a lane holds, at most 16 bytes."""
    return min(8, features // 8)


@gluon.constexpr_function
def doubled(begin, end):
    """Return ``begin, 2 begin, 4 begin ...`` below `end`."""
    out = []
    while begin < end:
        out.append(begin)
        begin *= 2
    return out


@gluon.constexpr_function
def value_layout(groups, keys, features):
    """Return the layout ``[group, key, feature]`` in which values are loaded.

    It is that of a right operand of `mma.sync`, where 8 lanes hold a row, but that the features of
    lane i are ``i * run`` and following, not ``i, i + 8, ...``.
    """
    run = run_of(features)
    registers = [[0, 0, d] for d in doubled(1, run)] + [[0, 1, 0], [0, 8, 0]]
    registers += [[0, 0, d] for d in doubled(8 * run, features)]
    registers += [[0, n, 0] for n in doubled(16, keys)]
    lanes = [[0, 2, 0], [0, 4, 0], *[[0, 0, d] for d in doubled(run, 8 * run)]]
    warps = [[g, 0, 0] for g in doubled(1, groups)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, keys, features])


@gluon.constexpr_function
def exchange_layout(groups, rows, features):
    """Return the layout of float32 results in shared memory, free of bank conflicts both ways.

    A lane writes 16 features of a row, reads up to 8.  Of the 16-byte chunks of 64 features, those
    behind the first half are swapped with neighbours, and so are those of odd rows.
    """
    chunks = [4, 8, 16, 44][: len(doubled(4, min(features, 64)))]
    offsets = [[0, 0, 1], [0, 0, 2], *[[0, 0, d] for d in chunks]]
    offsets += [[0, 0, d] for d in doubled(64, features)]
    offsets += [[0, m, 4 if m == 1 and features > 16 else 0] for m in doubled(1, rows)]
    offsets += [[g, 0, 0] for g in doubled(1, groups)]
    return gl.SharedLinearLayout(offsets)


@gluon.jit
def load_where(ptrs, inside, feature, WIDTH: gl.constexpr, EVEN: gl.constexpr):
    """Load elements, zeros from feature `WIDTH` on and, unless `EVEN`, where not `inside`."""
    if EVEN and WIDTH % 16 == 0:
        return gl.load(ptrs)
    else:
        mask = feature < WIDTH
        if not EVEN:
            mask = mask & inside
        return gl.load(ptrs, mask=mask, other=0.0)


@gluon.jit
def load_tiles(load: gl.constexpr, tensor, head, part, WIDTH: gl.constexpr, L, C: gl.constexpr):
    """Return the tiles of a tensor of `WIDTH` features, as a product of layout `L` takes them.

    Parameters
    ----------
    load : function
        One of the next three.
    head : tuple
        Batch entry and head of keys and values.
    part : tuple
        Of queries: tile of packed rows and number of queries; with `C.even_rows`, all are there.
        Of keys and values: the first and the end of those to load, zeros for others; with
        `C.even_keys`, all are loaded.
    """
    out = ()
    for i in gl.static_range(tile_count(WIDTH)):
        out += (load(tensor, head, part, L, C, i),)  # type: ignore[assignment]
    return out


@gluon.jit
def load_query_tile(q, head, part, L: gl.constexpr, C: gl.constexpr, INDEX: gl.constexpr):
    """Return a tile ``[group, row, feature]`` of queries, which all groups have."""
    batch, kv_head = head
    tile, Q_LEN = part
    D: gl.constexpr = tile_width(C.head_dim, INDEX)
    A: gl.constexpr = gl.DotOperandLayout(0, L, run_of(D))
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, A))
    g = gl.arange(0, L.warps_per_cta[0], gl.SliceLayout(1, gl.SliceLayout(2, A)))
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    d = tile_start(C.head_dim, INDEX) + d + g[:, None, None] * 0
    if C.group == 1:
        # One base, and offsets that are constants
        row = gl.arange(0, C.block_m, rows)
        inside = tile * C.block_m + row < Q_LEN
        base = address(q, batch, tile * C.block_m, kv_head)
        ptrs = base + ((row * q.s)[None, :, None] + d)
    else:
        row = tile * C.block_m + gl.arange(0, C.block_m, rows)
        query, q_head, inside = unpacked(row, kv_head, Q_LEN, C.group)
        ptrs = address(q, batch, query, q_head)[None, :, None] + d
    return load_where(ptrs, inside[None, :, None], d, C.head_dim, C.even_rows)


@gluon.jit
def load_key_tile(k, head, part, L: gl.constexpr, C: gl.constexpr, INDEX: gl.constexpr):
    """Return a tile ``[group, feature, key]`` of keys."""
    begin, end = part
    D: gl.constexpr = tile_width(C.head_dim, INDEX)
    B: gl.constexpr = gl.DotOperandLayout(1, L, run_of(D))
    g = gl.arange(0, L.warps_per_cta[0], gl.SliceLayout(1, gl.SliceLayout(2, B)))
    n = gl.arange(0, C.block_n, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    d += tile_start(C.head_dim, INDEX)
    key = g[:, None, None] * C.block_n + n[None, None, :]
    inside = (key >= begin) & (key < end)
    ptrs = head_of(k, head[0], head[1]) + (key * k.s + d)
    return load_where(ptrs, inside, d, C.head_dim, C.even_keys)


@gluon.jit
def load_value_tile(v, head, part, L: gl.constexpr, C: gl.constexpr, INDEX: gl.constexpr):
    """Return a tile ``[group, key, feature]`` of values.

    Feature ``a * run + b`` of it is at ``b * 8 + a``; `in_order` undoes that.
    """
    begin, end = part
    G: gl.constexpr = L.warps_per_cta[0]
    N: gl.constexpr = C.block_n
    D: gl.constexpr = tile_width(C.v_dim, INDEX)
    RUN: gl.constexpr = run_of(D)
    V: gl.constexpr = value_layout(G, N, D)
    g = gl.arange(0, G, gl.SliceLayout(1, gl.SliceLayout(2, V)))
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, V)))
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, V)))[None, None, :]
    d += tile_start(C.v_dim, INDEX)
    key = g[:, None, None] * N + n[None, :, None]
    inside = (key >= begin) & (key < end)
    ptrs = head_of(v, head[0], head[1]) + (key * v.s + d)
    out = load_where(ptrs, inside, d, C.v_dim, C.even_keys)
    out = out.reshape([G, N, D // (8 * RUN), 8, RUN]).permute((0, 1, 2, 4, 3)).reshape([G, N, D])
    return gl.convert_layout(out, gl.DotOperandLayout(1, L, 2))


@gluon.jit
def in_order(o):
    """Return results ``[group, row, feature]`` in the order of memory."""
    G: gl.constexpr = o.shape[0]
    M: gl.constexpr = o.shape[1]
    D: gl.constexpr = o.shape[2]
    RUN: gl.constexpr = run_of(D)
    return o.reshape([G, M, D // (8 * RUN), RUN, 8]).permute((0, 1, 2, 4, 3)).reshape([G, M, D])


@gluon.constexpr_function
def merged_layout(groups, warps, rows, features):
    """Return the layout ``[group, row, feature]`` in which a lane adds up what all groups found."""
    run = min(8, max(1, rows * features // (32 * warps)))
    across = min(32, features // run)
    return gl.BlockedLayout([groups, 1, run], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.jit
def store_merged(
    found, exchange, out, sinks_ptr, place, Q_LEN,
    GROUP: gl.constexpr, START: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Add up the results of all parts, each by its share, and store them from feature `START` on.

    Parameters
    ----------
    found : tuple
        The highest scores and the sums of the weights ``[part, row]`` of a tile of packed rows.
    exchange : [part, row, feature]
        The weighted sums, like those two in shared memory.
    place : tuple
        Batch entry, head of keys and values (or head, with a `GROUP` of 1) and tile.
    """
    highest_of, sums_of = found
    batch, kv_head, tile = place
    G: gl.constexpr = exchange.shape[0]
    M: gl.constexpr = exchange.shape[1]
    D: gl.constexpr = exchange.shape[2]
    MERGED: gl.constexpr = merged_layout(G, gl.num_warps(), M, D)
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MERGED))
    sinks = 0.0
    if C.sinks:
        _, head, _ = unpacked(tile * M + gl.arange(0, M, rows), kv_head, Q_LEN, GROUP)
        sinks = load_sinks(sinks_ptr, head)
    highest = highest_of.load(gl.SliceLayout(2, MERGED))
    shares, inverse = merge(highest, sums_of.load(gl.SliceLayout(2, MERGED)), sinks, C.sinks)
    result = gl.sum(exchange.load(MERGED) * shares[:, :, None], 0)
    result = result * gl.convert_layout(inverse, gl.SliceLayout(1, result.type.layout))[:, None]
    rows_out: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, MERGED))
    row = tile * M + gl.arange(0, M, rows_out)
    query, head, is_row = unpacked(row, kv_head, Q_LEN, GROUP)
    d = START + gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, MERGED)))[None, :]
    mask = is_row[:, None]
    if START + D > C.v_dim:
        mask = mask & (d < C.v_dim)
    ptrs = address(out, batch, query, head)[:, None] + d
    gl.store(ptrs, result.to(out.ptr.dtype.element_ty), mask=mask)
