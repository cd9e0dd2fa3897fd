"""Sizes of attention tiles that families, their prices and their kernels agree on."""

from __future__ import annotations

from collections.abc import Iterator

from ...workload import Attention
from ..prediction import next_power
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
