"""Matmuls in CUDA C++ for Hopper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ....hardware import DeviceSpec
from ....hardware.instructions import WARP_GROUP_MMA
from ....workload import GatedFFN, NormMatmul, Projection
from ...arrays import Seconds, Wanted, column, stacked
from ...family import OWN_BASELINE_ERROR, Breaks, KernelFamily
from ...prediction import HALF_DTYPES, Prediction, ceil_div
from ...shape import MatmulShape, Size, matmul_shape, rows_of
from ...steps import Footprint
from ...tile_plan import TilePlan
from ..matmuls import MatmulWork
from ..triton_matmul.cost import SYSTEM_SMEM_BYTES
from ..triton_matmul.tiles import FINER_ROWS, kernel_steps
from . import cost
from .tiles import (
    BLOCK_K,
    FAMILY,
    PART,
    CudaPlan,
    accumulators,
    other_bytes,
    smem_bytes,
    stage_bytes,
    together,
)

LINES = (*range(8, 65, 8), *range(80, 257, 16))
"""Lines of the wide operand that are tried: all that there are up to 64, and every other one."""


class _Kind(NamedTuple):
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
        _Kind(64, 1, 1, 0, 8, 256),
        _Kind(64, 1, 1, 0, 80, 128, cluster_m=2),
        _Kind(64, 1, 1, 0, 8, 32, blocks=2),
        _Kind(64, 1, 1, 0, 8, 64, split_k=2),
        _Kind(64, 1, 1, 0, 8, 64, split_k=4),
        _Kind(64, 1, 1, 0, 8, 32, split_k=8),
        _Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=2),
        _Kind(64, 1, 1, 0, 8, 64, blocks=2, split_k=4),
        _Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=8),
        _Kind(128, 2, 1, 0, 8, 256),
        _Kind(128, 2, 1, 0, 96, 128, cluster_m=2),
        _Kind(192, 3, 1, 0, 80, 192),
        _Kind(192, 1, 2, 0, 208, 224),
        _Kind(256, 2, 1, 0, 80, 176),
        _Kind(256, 2, 1, 0, 112, 128, cluster_m=2),
        _Kind(64, 1, 1, 1, 16, 128),
        _Kind(64, 1, 1, 1, 40, 64, split_k=2),
        _Kind(64, 1, 1, 1, 56, 96, split_k=4),
        _Kind(128, 2, 1, 1, 80, 256),
        _Kind(128, 2, 1, 1, 80, 256, cluster_m=2),
        _Kind(128, 2, 1, 1, 48, 112, split_k=2),
        _Kind(192, 1, 2, 1, 80, 224),
        _Kind(256, 2, 1, 1, 80, 176),
        _Kind(128, 1, 1, 0, 96, 160, turns=2),
        _Kind(128, 1, 1, 1, 96, 128, turns=2),
        *(_Kind(64, 1, 1, swapped, 128, 256, turns=2) for swapped in (0, 1)),
        _Kind(192, 1, 1, 0, 80, 96, turns=2),
        _Kind(192, 1, 1, 1, 80, 80, turns=2),
    ),
    2: (
        _Kind(64, 1, 1, 0, 8, 128),
        _Kind(64, 1, 1, 0, 8, 32, cluster_m=2),
        _Kind(64, 1, 1, 0, 96, 128, cluster_m=2),
        _Kind(64, 1, 1, 0, 8, 32, blocks=2),
        _Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=2),
        _Kind(64, 1, 1, 0, 8, 32, blocks=2, split_k=4),
        _Kind(64, 1, 2, 0, 16, 256),
        _Kind(128, 2, 1, 0, 8, 176),
        _Kind(64, 1, 1, 1, 16, 176),
        _Kind(64, 1, 1, 1, 16, 64, blocks=2),
        _Kind(64, 1, 2, 1, 64, 176),
        _Kind(128, 2, 1, 1, 80, 176),
        _Kind(128, 2, 1, 1, 96, 176, cluster_m=2),
        _Kind(192, 1, 2, 1, 80, 112),
        _Kind(256, 2, 1, 1, 72, 88),
        _Kind(64, 1, 1, 0, 96, 160, turns=2),
        _Kind(64, 1, 1, 1, 64, 128, turns=2),
        _Kind(128, 1, 1, 1, 56, 64, turns=2),
    ),
}
"""Tiles that are tried, by weights, 2 of a gated pair: kinds and lines that came within 2 % of the
fastest plan in some of 739 shapes that were timed
(`docs/experiments/2026-11-24-cuda_matmul.md` says what was left out, and why)."""

FEW_TILES = 32
"""Row tiles up to which tiles of less than 64 rows can be the fastest: they were in no shape that
was timed with more."""

LEAST_STAGES, MOST_STAGES = 2, 12
"""A stage is handed back when the products of the next one have begun: one alone would hang."""

MOST_ACCUMULATORS = {1: 176, 2: 176, 3: 96}
"""Of a thread, by warp groups that multiply: with more, its registers spill."""

MOST_IN_TURNS = {0: 160, 1: 128}
"""The same where warp groups take turns, by whether operands are swapped."""

MOST_LINES = 256
"""Of a warp group: the widest ``wgmma``."""

MOST_COPIED = 256
"""Lines of a box of a tensor map (CUDA driver API, ``cuTensorMapEncodeTiled``)."""

MOST_OF_TWO_BLOCKS = 64
"""Accumulators of a thread of two blocks of 256 threads, which have 128 registers each."""


class CudaMatmul(KernelFamily[MatmulWork]):
    """Norm in front, matmul or gated projections: tiles of any multiple of 8 rows."""

    names = (FAMILY,)
    backend = "triton"
    takes = (NormMatmul, GatedFFN)
    plan = CudaPlan
    error = OWN_BASELINE_ERROR
    breaks = Breaks(
        *((16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), 4096),
        finer=FINER_ROWS,
    )

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, epilogues, layouts and devices that the kernel is not for."""
        capabilities = dev.capabilities
        if not (capabilities.tma and capabilities.clusters and capabilities.warp_group_mma):
            return f"family {FAMILY!r} needs TMA and wgmma (sm_90), which the {dev.label} lacks"
        if work.dtype not in HALF_DTYPES or WARP_GROUP_MMA[work.dtype] is None:
            return f"dtype is {work.dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
        if work.out_dtype != work.dtype:
            return f"results are {work.out_dtype}, family {FAMILY!r} stores {work.dtype}"
        shape = matmul_shape(work)
        if shape.unpacked_bytes:
            return f"family {FAMILY!r} reads weights that are not packed"
        if work.k % 8:
            return f"k is {work.k}, rows of a tensor map must be multiples of 8 elements"
        return next(filter(None, map(_refused, _projections(work))), None)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield every tile with as many stages as fit."""
        weights = 2 if isinstance(work, GatedFFN) else 1
        return iter(_plans(weights, dev.smem_per_sm_bytes, dev.smem_per_block_bytes))

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what the instructions, the copies and the registers do not allow."""
        plan, weights = CudaPlan.of(plan), 2 if isinstance(work, GatedFFN) else 1
        tall, wide = PART * plan.groups_tall, 8 * plan.groups_wide
        names = ("block_m", "block_n") if plan.swapped else ("block_n", "block_m")
        for name, lines in zip(names, (tall, wide), strict=True):
            if getattr(plan, name) % lines:
                yield f"{name} is {getattr(plan, name)}, must be a multiple of {lines}"
        if plan.wide // plan.groups_wide > MOST_LINES:
            yield f"a warp group has {plan.wide // plan.groups_wide} lines, at most {MOST_LINES}"
        if "kn" in matmul_shape(work).layouts and (plan.swapped or plan.cluster_m > 1):
            yield "weights lie as [k, n], which are the tall operand of blocks that share no copies"
        given = {"block_k": BLOCK_K, "num_warps": 4 * (plan.multiplying + 1)}
        for name, value in given.items():
            if getattr(plan, name) != value:
                yield f"{name} is {getattr(plan, name)}, family {FAMILY!r} has {value} for this"
        if plan.num_stages < LEAST_STAGES:
            yield f"num_stages is {plan.num_stages}, must be at least {LEAST_STAGES}"
        yield from _register_violations(plan, weights)
        yield from _cluster_violations(plan, weights, work.k)
        foot, room = (
            self.footprint(plan, work, dev),
            dev.smem_per_sm_bytes // plan.blocks - SYSTEM_SMEM_BYTES,
        )
        if foot.smem_bytes > min(room, dev.smem_per_block_bytes):
            most = min(room, dev.smem_per_block_bytes)
            yield f"needs {foot.smem_bytes} B of shared memory, there are {most} B for a block"

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the stages in shared memory, and the sums of a thread."""
        plan, weights = CudaPlan.of(plan), 2 if isinstance(work, GatedFFN) else 1
        threads = plan.num_warps * dev.warp_size
        return Footprint(smem_bytes(plan, weights), accumulators(plan, weights), threads)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches cost, by a model that was fitted to this kernel."""
        shape = matmul_shape(work, pairs=False)
        launched = shape, _columns(work, shape), dev, rows_of(work, size), _has_residual(work)
        return cost.predict(CudaPlan.of(plan), *launched)

    def seconds(
        self,
        plans: Sequence[TilePlan],
        work: MatmulWork,
        dev: DeviceSpec,
        sizes: Sequence[Size],
        wanted: Wanted,
    ) -> Seconds:
        """Return what `predict` does, of all plans at all sizes."""
        shape, rows = matmul_shape(work, pairs=False), column([rows_of(work, s) for s in sizes])
        each = [cost.tile_of(CudaPlan.of(p), shape.parts, dev.sm_count) for p in plans]
        launched = shape, _columns(work, shape), dev, rows, _has_residual(work)
        return cost.launches(stacked(each), *launched).seconds

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Leave out tiles that only pad, and tiles so low that many read each weight."""
        least, most = min(rows[0] // FEW_TILES, PART), max(rows[1], PART)
        return (plan for plan in plans if least <= plan.block_m <= most)


def _columns(work: MatmulWork, shape: MatmulShape) -> list[list[int]]:
    """Return the features of the weights of each launch."""
    return [[shape.n_parts[i] for i in alike] for alike in together(work)]


def _has_residual(work: MatmulWork) -> bool:
    return any("residual" in projection.epilogue for projection in _projections(work))


def _register_violations(plan: CudaPlan, weights: int) -> Iterator[str]:
    if plan.multiplying > max(MOST_ACCUMULATORS):
        yield f"{plan.multiplying} warp groups multiply, at most {max(MOST_ACCUMULATORS)}"
        return
    if plan.turns > 1 and (plan.turns, plan.groups, plan.split_k) != (2, 1, 1):
        yield f"{plan.groups} warp groups take {plan.turns} turns; must be 1 and 2, and k not split"
    most = MOST_ACCUMULATORS[plan.multiplying]
    if plan.turns > 1:
        most = MOST_IN_TURNS[plan.swapped]
    if plan.blocks > 1:
        if (plan.blocks, plan.multiplying) != (2, 1):
            yield f"a multiprocessor holds {plan.blocks} blocks, at most 2 of one warp group"
        most = MOST_OF_TWO_BLOCKS
    if accumulators(plan, weights) > most:
        yield f"a thread has {accumulators(plan, weights)} accumulators, at most {most} fit"


def _cluster_violations(plan: CudaPlan, weights: int, k: int) -> Iterator[str]:
    if plan.cluster not in (1, 2, 4, 8):
        yield f"a cluster has {plan.cluster} thread blocks, must be 1, 2, 4 or 8"
    if plan.split_k > 1 and plan.cluster > plan.split_k:
        yield f"split_k is {plan.split_k}, blocks that split k share no copies"
    if plan.split_k > ceil_div(k, BLOCK_K):
        yield f"split_k is {plan.split_k}, k has {ceil_div(k, BLOCK_K)} blocks"
    sums = 4 * weights * plan.block_m * plan.block_n
    if plan.split_k > 1 and sums > plan.num_stages * stage_bytes(plan, weights):
        yield f"the sums of a tile are {sums} B, its stages have room for less"
    for what, lines in (("rows", plan.box_m), ("weights", plan.box_n)):
        if lines % 8 or not 8 <= lines <= MOST_COPIED:
            yield f"{lines} lines of {what} are copied at once, must be a multiple of 8 up to 256"


def _refused(projection: Projection) -> str | None:
    """Return why there is no kernel with such an epilogue."""
    if not isinstance(projection.n, int):
        return f"the weight has {projection.n.name} columns, family {FAMILY!r} is made for a number"
    if projection.n % 8:
        return f"n is {projection.n}, family {FAMILY!r} stores 8 features at a time"
    if projection.rope is not None:
        return f"family {FAMILY!r} rotates no features"
    if kernel_steps(projection.epilogue).count("residual") > 1:
        return f"an epilogue has several residuals, family {FAMILY!r} adds one"
    return None


def _projections(work: MatmulWork) -> tuple[Projection, ...]:
    if isinstance(work, GatedFFN):
        return (Projection(work.n, work.layout),)
    return work.outputs


@lru_cache(maxsize=8)
def _plans(weights: int, sm_smem: int, block_smem: int) -> tuple[CudaPlan, ...]:
    """Return the plans for one weight, or for two of a gated pair, with as many stages as fit."""
    found: list[CudaPlan] = []
    for kind in KINDS[weights]:
        smem = min(sm_smem // kind.blocks - SYSTEM_SMEM_BYTES, block_smem)
        for wide in LINES:
            if kind.least <= wide <= kind.most and wide % (8 * kind.groups_wide) == 0:
                plan = _plan(kind, wide)
                room = smem - other_bytes(plan) - 2 * 8 * MOST_STAGES
                stages = min(MOST_STAGES, room // stage_bytes(plan, weights))
                found.append(replace(plan, num_stages=stages))
    return tuple(found)


def _plan(kind: _Kind, wide: int) -> CudaPlan:
    """Return the plan of one stage with so many lines of the wide operand."""
    rows, features = (kind.tall, wide) if kind.swapped else (wide, kind.tall)
    groups = kind.groups_tall, kind.groups_wide
    groups_m, groups_n = groups if kind.swapped else groups[::-1]
    return CudaPlan(
        *(rows, features, BLOCK_K),
        split_k=kind.split_k,
        num_stages=1,
        num_warps=4 * (groups_m * groups_n * kind.turns + 1),
        backend="triton",
        family=FAMILY,
        swapped=kind.swapped,
        groups_m=groups_m,
        groups_n=groups_n,
        cluster_m=kind.cluster_m,
        turns=kind.turns,
        blocks=kind.blocks,
    )
