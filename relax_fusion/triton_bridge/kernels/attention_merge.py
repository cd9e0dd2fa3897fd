"""Merges what warps of a program that shared the keys found, through shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_core import address, load_sinks, merge, unpacked


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
