"""Plans of the matmul kernel in CUDA C++, and what a thread block of one holds.

``wgmma`` multiplies 64 lines of one operand, the tall one, by a multiple of 8 lines of the other,
the wide one.  Weights are tall, so that a tile has a multiple of 64 features and of 8 rows; where
operands are swapped, rows are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

import pydantic

from ....validation import Count
from ....workload import GatedFFN, NormMatmul, Packed
from ...tile_plan import TilePlan
from ..triton_matmul.tiles import launches

FAMILY = "cuda"

LINE_BYTES, LINE_K = 128, 64
"""The widest swizzle of shared memory, and how many elements of k it holds."""

BLOCK_K = 64
"""Elements of k of a stage where weights are not packed: one line."""

MOST_STAGES = 12

STORED_LINES = 32
"""Lines of the wide operand that a warp group stores at once."""

STORE_BYTES = STORED_LINES * 64 * 2
"""What a warp group carries through shared memory at once, on its way out."""

PART = 64
"""Lines of the tall operand of an accumulator."""

CLUSTERED_PART = 10 / 11
"""Part of the multiprocessors that clusters of 4 and 8 fill: they lie within one of the device's
groups of multiprocessors, whose numbers 4 and 8 do not divide.  Measured on an H200: 15 clusters of
8 run at once, and 30 of 4; where 16 or 32 are launched, the last ones wait for the others."""


@dataclass(frozen=True)
class CudaPlan(TilePlan):
    """A plan of the matmul kernel in CUDA C++.

    `block_m` and `block_n` are rows and features of a tile; with `split_k`, a cluster of as many
    thread blocks shares the sum over k of one tile.

    Parameters
    ----------
    swapped : int
        1: rows are the tall operand; 0: weights are.
    groups_m, groups_n : int
        Warp groups that multiply, side by side along the rows and the features of a tile; one more
        copies.
    cluster_m, cluster_n : int
        Thread blocks of a cluster along the rows and the features: those along the rows share the
        copies of weights, those along the features the copies of rows.
    turns : int
        2: as many warp groups take turns at tiles, so that one stores while the other multiplies.
    blocks : int
        Thread blocks that a multiprocessor holds at once.
    copied : int
        1: packed weights are unpacked to a copy, by a launch in front.
    """

    swapped: Annotated[int, pydantic.Field(ge=0, le=1)] = 0
    groups_m: Count = 1
    groups_n: Count = 1
    cluster_m: Count = 1
    cluster_n: Count = 1
    turns: Count = 1
    blocks: Count = 1
    copied: Annotated[int, pydantic.Field(ge=0, le=1)] = 0

    @property
    def groups(self) -> int:
        """Warp groups that share a tile."""
        return self.groups_m * self.groups_n

    @property
    def multiplying(self) -> int:
        """Warp groups that multiply."""
        return self.groups * self.turns

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.split_k

    @property
    def tall(self) -> int:
        """Lines of the tall operand of a tile (of each weight)."""
        return self.block_m if self.swapped else self.block_n

    @property
    def wide(self) -> int:
        """Lines of the wide operand of a tile (of each weight)."""
        return self.block_n if self.swapped else self.block_m

    @property
    def groups_tall(self) -> int:
        """Warp groups along the tall operand."""
        return self.groups_m if self.swapped else self.groups_n

    @property
    def groups_wide(self) -> int:
        """Warp groups along the wide operand."""
        return self.groups_n if self.swapped else self.groups_m

    @property
    def box_m(self) -> int:
        """Rows that one copy brings."""
        return (PART * self.groups_m if self.swapped else self.block_m) // self.cluster_n

    @property
    def box_n(self) -> int:
        """Lines of a weight that one copy brings."""
        return (self.block_n if self.swapped else PART * self.groups_n) // self.cluster_m

    @property
    def text(self) -> str:
        """The tile for people to read."""
        parts = f", {self.split_k} parts" if self.split_k > 1 else ""
        shared = f", {self.cluster} blocks share" if self.cluster > self.split_k else ""
        tall = ", rows tall" if self.swapped else ""
        turns = ", in turns" if self.turns > 1 else ""
        two = f", {self.blocks} a multiprocessor" if self.blocks > 1 else ""
        copied = ", of a copy" if self.copied else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.family} {tile}{parts}{shared}{tall}{turns}{two}{copied}"


def line_bytes(plan: CudaPlan, packed: Packed | None) -> int:
    """Return the bytes of one feature of a weight in a stage."""
    return plan.block_k * (packed.bits if packed else 16) // 8


def stage_bytes(plan: CudaPlan, weights: int, packed: Packed | None = None) -> int:
    """Return the shared memory of one step along k; `weights` are 2 of a gated pair."""
    rows = plan.block_m * line_bytes(plan, None)
    return rows + weights * plan.block_n * line_bytes(plan, packed)


def other_bytes(plan: CudaPlan) -> int:
    """Return the shared memory beside the stages: a tile on its way out, and barriers."""
    return plan.multiplying * STORE_BYTES + 2 * 8 * plan.num_stages


def smem_bytes(plan: CudaPlan, weights: int, packed: Packed | None = None) -> int:
    """Return the shared memory of a thread block."""
    return plan.num_stages * stage_bytes(plan, weights, packed) + other_bytes(plan)


def accumulators(plan: CudaPlan, weights: int) -> int:
    """Return the float32 accumulators of a thread that multiplies."""
    return weights * (plan.tall // (PART * plan.groups_tall)) * (plan.wide // plan.groups_wide) // 2


def clusters_at_once(plan: CudaPlan, sm_count: int) -> int:
    """Return how many clusters run at once on so many multiprocessors."""
    multiprocessors = sm_count if plan.cluster <= 2 else int(sm_count * CLUSTERED_PART)
    return max(1, multiprocessors * plan.blocks // plan.cluster)


def together(work: NormMatmul | GatedFFN) -> list[list[int]]:
    """Return the numbers of the projections of each launch: those that differ in features alone."""
    if isinstance(work, GatedFFN):
        return launches(work)
    outputs = work.outputs
    return [
        list(alike)
        for some in launches(work)
        for _, alike in groupby(some, lambda i: replace(outputs[i], n=0))
    ]
