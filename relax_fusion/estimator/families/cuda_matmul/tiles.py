"""Plans of the matmul kernel in CUDA C++, and what a thread block of one holds.

``wgmma`` multiplies 64 lines of one operand, the tall one, by a multiple of 8 lines of the other,
the wide one.  Weights are tall, so that a tile has a multiple of 64 features and of 8 rows; where
operands are swapped, rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Annotated, TypeVar

import pydantic

from ....hardware.instructions import PIECE_BYTES, SLICE_BYTES
from ....validation import Count
from ....workload import DTYPE_BYTES, INTEGER_DTYPES, GatedFFN, NormMatmul, Packed, Projection, Rope
from ...prediction import ceil_div
from ...tile_plan import TilePlan
from ..triton_matmul.tiles import launches

T = TypeVar("T")

FAMILY = "cuda"

LINE_BYTES = 128
"""A stage has 128 bytes of k for each line of an operand: the widest swizzle of shared memory."""

MOST_STAGES = 12

MOST_LINES = 256
"""A warp group has 256 lines at most: those of the widest ``wgmma``."""

SLICES = LINE_BYTES // SLICE_BYTES
"""So many instructions multiply a stage, for each accumulator."""

PART = 64
"""An accumulator has 64 lines of the tall operand."""

FEW_LINES = 32
"""A warp group has few lines of the wide operand up to so many."""

HALF_K = LINE_BYTES // 2
"""A line has so many elements of float16 or bfloat16."""

STORE_BYTES = 4096
"""A warp group carries 4096 bytes through shared memory at once, on their way out."""

CLUSTERED_PART = 10 / 11
"""Part of the multiprocessors that clusters of 4 and 8 fill: they lie within one of the device's
groups of multiprocessors, whose numbers 4 and 8 do not divide.  Measured on an H200: 15 clusters of
8 run at once, and 30 of 4; where 16 or 32 are launched, the last ones wait for the others."""


@dataclass(frozen=True)
class CudaPlan(TilePlan):
    """A plan of the matmul kernel in CUDA C++.

    `block_m` and `block_n` are rows and features of a tile; with `split_k`, a cluster of as many
    thread blocks shares the sum over k of one tile.
    """

    swapped: Annotated[int, pydantic.Field(ge=0, le=1)] = 0
    """1: rows are the tall operand; 0: weights are."""
    groups_m: Count = 1
    groups_n: Count = 1
    """Warp groups that multiply, side by side along the rows and the features of a tile; one more
    copies."""
    cluster_m: Count = 1
    cluster_n: Count = 1
    """Thread blocks of a cluster along the rows and the features: those along the rows share the
    copies of weights, those along the features the copies of rows."""
    groups_k: Count = 1
    """Sets of these warp groups that share the sum over k of a tile, each with every so many-th
    step."""
    turns: Count = 1
    """2: as many warp groups take turns at tiles, so that one stores while the other multiplies."""
    blocks: Count = 1
    """Thread blocks that a multiprocessor holds at once."""
    copied: Annotated[int, pydantic.Field(ge=0, le=1)] = 0
    """1: packed weights are unpacked to a copy, by a launch in front."""

    @property
    def groups(self) -> int:
        """Warp groups that share a tile."""
        return self.groups_m * self.groups_n

    @property
    def multiplying(self) -> int:
        """Warp groups that multiply."""
        return self.groups * self.groups_k * self.turns

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.split_k

    @property
    def parts(self) -> int:
        """Parts of the sum over k, of blocks and of warp groups."""
        return self.split_k * self.groups_k

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
        """Lines of a weight that one copy brings; of an interleaved pair, of both together."""
        return (self.block_n if self.swapped else PART * self.groups_n) // self.cluster_m

    @property
    def text(self) -> str:
        """The tile for people to read."""
        parts = f", {self.split_k} parts" if self.split_k > 1 else ""
        sets = f", {self.groups_k} sets of warp groups" if self.groups_k > 1 else ""
        shared = f", {self.cluster} blocks share" if self.cluster > self.split_k else ""
        tall = ", rows tall" if self.swapped else ""
        turns = ", in turns" if self.turns > 1 else ""
        two = f", {self.blocks} a multiprocessor" if self.blocks > 1 else ""
        copied = ", of a copy" if self.copied else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.family} {tile}{parts}{sets}{shared}{tall}{turns}{two}{copied}"


def block_k(dtype: str) -> int:
    """Return the elements of k of a stage whose weights are not packed: one line."""
    return LINE_BYTES // DTYPE_BYTES[dtype]


def stored_lines(result_bytes: int) -> int:
    """Return the lines of the wide operand that a warp group stores at once."""
    return STORE_BYTES // (PART * result_bytes)


def line_bytes(plan: CudaPlan, packed: Packed | None) -> int:
    """Return the bytes of one feature of a weight in a stage."""
    return plan.block_k * packed.bits // 8 if packed else LINE_BYTES


def sets_made(plan: CudaPlan) -> int:
    """Return how many sets of unpacked numbers a thread has, of which products read all but one.

    Each has a group of scales.  Products of few rows come back later than the next set is made;
    of many, more sets take up to 7 % longer (`2026-11-30-cuda_matmul-pipes.log`).
    """
    return 4 if plan.block_k > HALF_K and plan.wide // plan.groups_wide <= FEW_LINES else 2


def stage_bytes(plan: CudaPlan, weights: int, packed: Packed | None = None) -> int:
    """Return the shared memory of one step along k; `weights` are 2 of a gated pair."""
    rows = plan.block_m * LINE_BYTES * (plan.block_k // HALF_K if packed else 1)
    return rows + weights * plan.block_n * line_bytes(plan, packed)


def unit_bytes(features: Iterable[int], out_dtype: str) -> int:
    """Return the bytes of a row that a thread stores at once: 16, or what rows are multiples of.

    `features` are those of the products of a launch.
    """
    return gcd(PIECE_BYTES, *(n * DTYPE_BYTES[out_dtype] for n in features))


def copies_residual(plan: CudaPlan, result_bytes: int, unit: int = PIECE_BYTES) -> bool:
    """Return whether a residual comes through the ring, and is not read from memory.

    `unit` is that of `unit_bytes`: rows of a tensor map are multiples of 16 bytes.
    """
    return plan.parts == 1 and result_bytes == 2 and unit == PIECE_BYTES


def residual_steps(plan: CudaPlan, weights: int, packed: Packed | None, out_dtype: str) -> int:
    """Return the stages that the residual of a tile takes, each of 64 features or of several 64."""
    if not copies_residual(plan, DTYPE_BYTES[out_dtype]):
        return 0
    of_stage = stage_bytes(plan, weights, packed) // (plan.block_m * LINE_BYTES)
    return -(-plan.block_n // (PART * of_stage))


def other_bytes(plan: CudaPlan, apart: bool = False) -> int:
    """Return the shared memory beside the stages: a tile on its way out, and barriers.

    `apart` tells whether features turn that are not neighbours: then both of a pair are on their
    way at once.
    """
    return plan.multiplying * STORE_BYTES * (1 + apart) + 2 * 8 * plan.num_stages


def smem_bytes(
    plan: CudaPlan, weights: int, packed: Packed | None = None, apart: bool = False
) -> int:
    """Return the shared memory of a thread block."""
    return plan.num_stages * stage_bytes(plan, weights, packed) + other_bytes(plan, apart)


def accumulators(plan: CudaPlan, weights: int) -> int:
    """Return the accumulators of a thread that multiplies, 4 bytes each."""
    return weights * plan.tall // (PART * plan.groups_tall) * (plan.wide // plan.groups_wide) // 2


def is_interleaved(weights: int, packed: Packed | None) -> bool:
    """Return whether products have lines of gate and up by turns, and so half as many of each.

    So it is where registers bring them: then a thread's sums are of both.
    """
    return weights > 1 and packed is not None


def lines_copied(plan: CudaPlan, weights: int, packed: Packed | None) -> int:
    """Return the lines of a weight that one copy brings."""
    return plan.box_n // (2 if is_interleaved(weights, packed) else 1)


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
        alike
        for some in launches(work)
        for alike in split_alike(
            some,
            lambda i: (replace(outputs[i], n=0, rope=None, adapter=None), adapter_form(outputs[i])),
            lambda i: outputs[i].rope,
        )
    ]


def split_alike(
    items: Sequence[T], likeness: Callable[[T], Hashable], rope_of: Callable[[T], Rope | None]
) -> list[list[T]]:
    """Return runs of products that a launch computes: alike, and rotated alike or not at all."""
    found: list[list[T]] = []
    for item in items:
        last = found[-1] if found else []
        ropes = [rope for each in (*last, item) if (rope := rope_of(each)) is not None]
        if last and likeness(last[0]) == likeness(item) and len(set(map(angles_of, ropes))) <= 1:
            last.append(item)
        else:
            found.append([item])
    return found


def angles_of(rope: Rope) -> tuple[int, int, int, int, str]:
    """Return what a kernel is compiled for: a head, how much of it turns, by which angles."""
    return rope.head_dim, rope.width, rope.distance, rope.columns, rope.dtype


@dataclass(frozen=True)
class Form:
    """What a kernel is made for, of a workload."""

    weights: int
    """Weights of a tile: 2 of a gated pair, and where pairs of features turn."""
    packed: Packed | None
    """How the weights are stored."""
    apart: int
    """How far the features of a pair are apart that turn, which are of two weights then; 0 where
    none turn, or neighbours."""
    outputs: tuple[Projection, ...]
    """What is stored: of a gated pair, its product."""
    adds_residual: bool
    rotates: bool
    """Whether a residual is added to results, and whether features of some turn."""

    def unpacked(self, plan: CudaPlan) -> Packed | None:
        """Return how the weights are stored that the matmul itself unpacks; None if it has none."""
        return None if plan.copied else self.packed


@lru_cache(maxsize=256)
def form_of(work: NormMatmul | GatedFFN) -> Form:
    """Return what a kernel of a workload is made for."""
    if isinstance(work, GatedFFN):
        return Form(2, work.packed, 0, (Projection(work.n, work.layout),), False, False)
    ropes = [p.rope for p in work.outputs if p.rope]
    apart = max((rope.distance for rope in ropes if rope.distance > 1), default=0)
    adds_residual = any("residual" in p.epilogue for p in work.outputs)
    packed, weights = work.outputs[0].packed, 2 if apart else 1
    return Form(weights, packed, apart, work.outputs, adds_residual, bool(ropes))


def adapter_form(projection: Projection) -> tuple[int, str, float] | None:
    """Return what adapters have in common whose projections a launch computes: steps, and A's."""
    adapter = projection.adapter
    if adapter is None:
        return None
    return ceil_div(adapter.rank, HALF_K), adapter.layout, adapter.scale


def lines_violations(plan: CudaPlan, dtype: str) -> Iterator[str]:
    """Yield why ``wgmma`` has no such number of wide lines."""
    lines = plan.wide // plan.groups_wide
    if lines > MOST_LINES:
        yield f"a warp group has {lines} lines, at most {MOST_LINES}"
    if dtype in INTEGER_DTYPES and lines % 16 and lines not in (8, 24):  # PTX ISA, ``wgmma``
        yield f"a warp group has {lines} lines; of {dtype}, must be 8, 24 or a multiple of 16"
