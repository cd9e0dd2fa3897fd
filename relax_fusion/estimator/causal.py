"""How many key tiles a causal mask leaves to a query tile."""

from __future__ import annotations

from ..tile_plan import TilePlan
from ..workload import Attention
from .prediction import ceil_div
from .shape import AttentionSize


def visible_blocks(work: Attention, plan: TilePlan, size: AttentionSize) -> tuple[float, int]:
    """Return the key tiles that a query tile goes through, on average and at most.

    A tile of queries sees what its last query sees.  The average is that of the exact positions,
    plus half a tile for the last, partly visible one.
    """
    every = ceil_div(size.kv_len, plan.block_n)
    if work.causal == "none":
        return float(every), every
    shift = size.kv_len - size.q_len if work.causal == "bottom_right" else 0
    tiles = ceil_div(size.q_len, plan.block_m)
    last = _clamp(size.q_len + shift, size.kv_len)
    most = ceil_div(last, plan.block_n)
    if tiles == 1:
        return float(most), most
    mean = _mean_end(tiles, plan.block_m, shift, last)
    return min(mean / plan.block_n + 0.5, float(most)), most


def _clamp(end: int, upper: int) -> int:
    return max(1, min(end, upper))


def _mean_end(tiles: int, block_m: int, shift: int, last: int) -> float:
    """Return the mean over t of ``clamp((t + 1) * block_m + shift, 1, last)``."""
    below = min(tiles, max(0, -shift // block_m))  # ends that are not positive count as 1
    inside = min(tiles, max(below, (last - shift) // block_m))  # and those past `last` as `last`
    first_end = (below + 1) * block_m + shift
    last_end = inside * block_m + shift
    rising = (inside - below) * (first_end + last_end) / 2
    return (below + rising + (tiles - inside) * last) / tiles
