"""Tiles of the matmul kernel in CUDA C++ that are tried, and the plans that they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from ...limits import SYSTEM_SMEM_BYTES
from .dtypes import lines_violations
from .tiles import FAMILY, MOST_STAGES, CudaPlan, block_k, other_bytes, stage_bytes

LINES = (*range(8, 65, 8), *range(80, 257, 16))
"""Lines of the wide operand that are tried: all that there are up to 64, and every other one."""


class Kind(NamedTuple):
    """Tiles that differ in the lines of their wide operand alone."""

    tall: int
    groups_tall: int  # warp groups along the tall operand, and along the wide one
    groups_wide: int
    swapped: int
    least: int  # lines of the wide operand
    most: int
    blocks: int = 1
    cluster_m: int = 1
    split_k: int = 1
    turns: int = 1


KINDS = {
    1: (
        Kind(64, 1, 1, 0, 8, 256),
        Kind(64, 1, 1, 0, 80, 128, cluster_m=2),
        Kind(64, 1, 1, 0, 8, 32, blocks=2),
        Kind(64, 1, 1, 0, 8, 64, split_k=2),
        Kind(64, 1, 1, 0, 8, 64, split_k=4),
        Kind(64, 1, 1, 0, 8, 32, split_k=8),
        Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=2),
        Kind(64, 1, 1, 0, 8, 64, blocks=2, split_k=4),
        Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=8),
        Kind(128, 2, 1, 0, 8, 256),
        Kind(128, 2, 1, 0, 96, 128, cluster_m=2),
        Kind(192, 3, 1, 0, 80, 192),
        Kind(192, 1, 2, 0, 208, 224),
        Kind(256, 2, 1, 0, 80, 176),
        Kind(256, 2, 1, 0, 112, 128, cluster_m=2),
        Kind(64, 1, 1, 1, 16, 128),
        Kind(64, 1, 1, 1, 40, 64, split_k=2),
        Kind(64, 1, 1, 1, 56, 96, split_k=4),
        Kind(128, 2, 1, 1, 80, 256),
        Kind(128, 2, 1, 1, 80, 256, cluster_m=2),
        Kind(128, 2, 1, 1, 48, 112, split_k=2),
        Kind(192, 1, 2, 1, 80, 224),
        Kind(256, 2, 1, 1, 80, 176),
        Kind(128, 1, 1, 0, 96, 160, turns=2),
        Kind(128, 1, 1, 1, 96, 128, turns=2),
        *(Kind(64, 1, 1, swapped, 128, 256, turns=2) for swapped in (0, 1)),
        Kind(192, 1, 1, 0, 80, 96, turns=2),
        Kind(192, 1, 1, 1, 80, 80, turns=2),
    ),
    2: (
        Kind(64, 1, 1, 0, 8, 128),
        Kind(64, 1, 1, 0, 8, 32, cluster_m=2),
        Kind(64, 1, 1, 0, 96, 128, cluster_m=2),
        Kind(64, 1, 1, 0, 8, 32, blocks=2),
        Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=2),
        Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=4),
        Kind(64, 1, 2, 0, 16, 256),
        Kind(128, 2, 1, 0, 8, 176),
        Kind(64, 1, 1, 1, 16, 176),
        Kind(64, 1, 1, 1, 16, 64, blocks=2),
        Kind(64, 1, 2, 1, 64, 176),
        Kind(128, 2, 1, 1, 80, 176),
        Kind(128, 2, 1, 1, 96, 176, cluster_m=2),
        Kind(192, 1, 2, 1, 80, 112),
        Kind(256, 2, 1, 1, 72, 88),
        Kind(64, 1, 1, 0, 96, 160, turns=2),
        Kind(64, 1, 1, 1, 64, 128, turns=2),
        Kind(128, 1, 1, 1, 56, 64, turns=2),
    ),
}
"""Tiles that are tried, by weights, 2 of a gated pair: kinds and lines that came within 2 % of the
fastest plan in some of 739 shapes that were timed
(`docs/experiments/2026-11-24-cuda_matmul.md` says what was left out, and why)."""

NARROW_COLUMNS = 128
NARROW = (
    Kind(64, 1, 1, 1, 8, 8),
    Kind(64, 1, 1, 1, 8, 32, split_k=2),
    Kind(64, 1, 1, 1, 8, 48, split_k=4),
    Kind(64, 1, 1, 1, 8, 64, split_k=8),
)
"""Tiles that are tried as well for weights of so few features, as those of adapters: with rows as
the tall operand nothing is multiplied in vain, and parts of k fill the chip.  Timed for adapters
alone (`2026-11-24-cuda_matmul-adapters.log`).  Tiles of fewer features than there are, up to 64,
would read x again and are not tried."""

LEAST_RUN = 32
"""Lines of a half of a head that a copy brings, where there are as many: copies of 8 lines, which
tiles of 24, 40 and 56 would need, made matmuls with a rope take up to twice as long."""


def run_violations(plan: CudaPlan, apart: int) -> Iterator[str]:
    """Yield why copies of halves of heads, whose pairs are so far apart, would be too small."""
    run, least = gcd(plan.box_n, apart), min(plan.box_n, apart, LEAST_RUN)
    if run < least:
        yield f"{run} lines of a half of a head are copied at once, must be at least {least}"


@lru_cache(maxsize=8)
def plans_of(
    kinds: tuple[Kind, ...], weights: int, apart: bool, smem_bytes: tuple[int, int], dtype: str
) -> tuple[CudaPlan, ...]:
    """Return the plans for one weight, or for two of a tile, with as many stages as fit.

    `smem_bytes` are of a multiprocessor and of a block; `apart` is that of `other_bytes`.
    """
    (of_sm, of_block), found = smem_bytes, list[CudaPlan]()
    for kind in kinds:
        smem = min(of_sm // kind.blocks - SYSTEM_SMEM_BYTES, of_block)
        for wide in LINES:
            if kind.least <= wide <= kind.most and wide % (8 * kind.groups_wide) == 0:
                plan = _plan(kind, wide, block_k(dtype))
                if next(lines_violations(plan, dtype), None):
                    continue
                room = smem - other_bytes(plan, apart) - 2 * 8 * MOST_STAGES
                stages = min(MOST_STAGES, room // stage_bytes(plan, weights))
                found.append(replace(plan, num_stages=stages))
    return tuple(found)


def _plan(kind: Kind, wide: int, step: int) -> CudaPlan:
    """Return the plan of one stage with so many lines of the wide operand."""
    rows, features = (kind.tall, wide) if kind.swapped else (wide, kind.tall)
    groups = kind.groups_tall, kind.groups_wide
    groups_m, groups_n = groups if kind.swapped else groups[::-1]
    return CudaPlan(
        *(rows, features, step),
        split_k=kind.split_k,
        num_stages=1,
        num_warps=4 * (groups_m * groups_n * kind.turns + 1),
        family=FAMILY,
        swapped=kind.swapped,
        groups_m=groups_m,
        groups_n=groups_n,
        cluster_m=kind.cluster_m,
        turns=kind.turns,
        blocks=kind.blocks,
    )
