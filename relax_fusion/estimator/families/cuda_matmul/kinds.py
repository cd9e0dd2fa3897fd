"""Tiles of the matmul kernel in CUDA C++ that are tried, and the plans that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from ....workload import Packed
from ...limits import SYSTEM_SMEM_BYTES
from .tiles import (
    FAMILY,
    MOST_STAGES,
    CudaPlan,
    block_k,
    lines_violations,
    other_bytes,
    stage_bytes,
)

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


class PackedKind(NamedTuple):
    """Tiles that differ in their rows alone, and in how k is split."""

    tall: int  # lines of all weights
    groups: int  # warp groups, side by side along the features
    steps: tuple[int, ...]  # elements of k of a stage
    rows: Iterable[int]
    splits: tuple[int, ...] = (1,)
    turns: int = 1
    cluster_m: int = 1
    sets: tuple[int, ...] = (1,)  # of warp groups, each with a part of k


FEWEST, FEW, MANY = (*range(8, 33, 8),), (*range(8, 65, 8),), (*range(80, 257, 16),)
PACKED_KINDS = (
    PackedKind(64, 1, (128, 256), FEW, (1, 2), sets=(1, 2, 3)),
    PackedKind(64, 1, (128, 256), FEW, (4, 8)),
    PackedKind(128, 2, (128, 256), FEW, (1, 2, 4, 8)),
    PackedKind(192, 3, (128,), FEW, (1, 2, 4)),
    PackedKind(256, 2, (256,), FEWEST),
    PackedKind(128, 2, (64,), MANY, (1, 2)),
    PackedKind(128, 2, (64,), (96, 112, 128), cluster_m=2),
    PackedKind(192, 3, (64,), (*range(80, 177, 16),)),
    PackedKind(256, 2, (64,), (80, 96, 112, 128)),
    PackedKind(64, 1, (64,), MANY),
    PackedKind(64, 1, (64,), (*range(128, 257, 16),), turns=2),
    PackedKind(128, 1, (64,), (96, 112, 128), turns=2),
)
"""Which plans are offered.  Timed for q4f16_1 alone (`2026-11-24-cuda_matmul-packed.log`,
`-packed_sets.log`, `2026-11-30-cuda_matmul-pipes.log`)."""


@lru_cache(maxsize=16)
def packed_plans(weights: int, form: Packed, sm_smem: int, block_smem: int) -> tuple[CudaPlan, ...]:
    """Return the plans for packed weights, with as many stages as fit."""
    found = []
    for kind in PACKED_KINDS:
        steps = {min(step, 128 * 8 // form.bits) for step in kind.steps}
        for step, rows, sets in product(sorted(steps), kind.rows, kind.sets):
            plan = CudaPlan(
                *(rows, kind.tall // weights, step),
                num_stages=1,
                num_warps=4 * (kind.groups * kind.turns * sets + 1),
                family=FAMILY,
                groups_n=kind.groups,
                groups_k=sets,
                cluster_m=kind.cluster_m,
                turns=kind.turns,
            )
            smem = min(sm_smem - SYSTEM_SMEM_BYTES, block_smem)
            room = smem - other_bytes(plan) - 2 * 8 * MOST_STAGES
            stages = min(MOST_STAGES, room // stage_bytes(plan, weights, form)) // sets * sets
            plan = replace(plan, num_stages=max(sets, stages))
            found += [replace(plan, split_k=split) for split in kind.splits]
    return tuple(dict.fromkeys(found))
