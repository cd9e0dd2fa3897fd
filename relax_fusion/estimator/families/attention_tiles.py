"""Sizes of attention tiles, and the key tiles that a mask leaves to a query tile."""

from __future__ import annotations

from collections.abc import Iterator

from ...workload import Attention
from ..prediction import ceil_div, next_power
from ..shape import AttentionSize
from ..tile_plan import TilePlan

FEW_ROWS = 16
"""Rows up to which an attention tile of a CPU adds up each score by itself and reads keys and
values where they lie.  Measured on Zen 4 with 1024 keys of 128 features: 1 row takes 0.25 of the
time that it takes with staged keys and values, 8 rows take 0.55, 16 rows 0.8 and 32 rows 1.1."""

ROW_VECTORS = 4
"""Numbers per query row of an online softmax: maximum, new maximum, sum, scale."""


def attention_width(plan: TilePlan) -> int:
    """Return the columns of an attention's register tile: whole vectors."""
    return plan.reg_n if plan.reg_n % plan.lanes == 0 else plan.lanes


def head_extents(work: Attention) -> dict[str, int]:
    """Return the sizes along which queries, keys and values lie."""
    return {"head_dim": work.head_dim, "v_dim": work.v_dim}


def holds_features(plan: TilePlan, work: Attention) -> Iterator[str]:
    """Yield that a tile has all features of a head."""
    if plan.block_k != work.head_dim:
        yield f"block_k is {plan.block_k}, attention holds all {work.head_dim} of head_dim"


def most_q(work: Attention, limit: int) -> int:
    """Return the most rows of a tile; those of query heads that share keys share it, too."""
    if not isinstance(work.q_len, int):
        return limit
    return min(limit, next_power(work.q_len * work.q_heads // work.kv_heads))


def most_kv(work: Attention, limit: int) -> int:
    """Return the most keys of a tile."""
    return max(16, min(limit, next_power(work.kv_len))) if isinstance(work.kv_len, int) else limit


def visible_blocks(
    work: Attention, plan: TilePlan, size: AttentionSize, rows: int | None = None
) -> tuple[float, int]:
    """Return the key tiles that a query tile goes through, on average and at most.

    A tile of queries sees what its last query sees, and with a window what its first one sees.  The
    average is that of the exact positions, plus half a tile for a first or last one that is partly
    visible.

    `rows`: query positions of a tile, where they are not the plan's `block_m`.
    """
    every = ceil_div(size.kv_len, plan.block_n)
    if work.causal == "none" and work.window is None:
        return float(every), every
    rows = rows or plan.block_m
    tiles = ceil_div(size.q_len, rows)
    first, last, shift = _reach(work, size)
    most = ceil_div(last, plan.block_n) - max(0, min(first, last - 1)) // plan.block_n
    if tiles == 1:
        return float(most), most
    end, edges = float(last), 0.0
    if work.causal != "none":
        end, edges = _mean_clamped(tiles, rows, rows + shift, (1, last)), edges + 0.5
    begin = 0.0
    if work.window is not None:
        begin, edges = _mean_clamped(tiles, rows, first, (0, last)), edges + 0.5
        if work.causal != "none":
            seen = rows + work.window - 1
            most = min(ceil_div(last, plan.block_n), ceil_div(seen, plan.block_n) + 1)
    return min(max(0.0, end - begin) / plan.block_n + edges, float(most)), most


def visible_keys(work: Attention, size: AttentionSize) -> int:
    """Return how many keys any query sees."""
    first, last, _ = _reach(work, size)
    return last - max(0, min(first, last - 1))


def _reach(work: Attention, size: AttentionSize) -> tuple[int, int, int]:
    """Return the first query's first key, the last query's end of keys, and the first's position.

    The first key may be negative.
    """
    shift = size.kv_len - size.q_len if work.causal == "bottom_right" else 0
    last = size.kv_len
    if work.causal != "none":
        last = max(1, min(size.q_len + shift, size.kv_len))
    first = 0 if work.window is None else shift - work.window + 1
    return first, last, shift


def _mean_clamped(tiles: int, step: int, offset: int, limits: tuple[int, int]) -> float:
    """Return the mean over t of ``t * step + offset``, kept within `limits`."""
    least, most = limits
    below = min(tiles, max(0, ceil_div(least - offset, step)))
    inside = min(tiles, max(below, (most - offset) // step + 1))
    rising = (inside - below) * (below + inside - 1) * step / 2 + (inside - below) * offset
    return (below * least + rising + (tiles - inside) * most) / tiles
