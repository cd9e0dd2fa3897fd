"""Matmuls in CUDA C++ for Hopper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from ....hardware import DeviceSpec
from ....hardware.instructions import WARP_GROUP_MMA
from ....workload import GatedFFN, NormMatmul, Projection
from ...family import OWN_BASELINE_ERROR, Breaks, KernelFamily
from ...prediction import HALF_DTYPES, Prediction, ceil_div
from ...shape import Size, matmul_shape, rows_of
from ...steps import Footprint
from ...tile_plan import TilePlan
from ..matmuls import MatmulWork
from ..triton_matmul.cost import SYSTEM_SMEM_BYTES
from ..triton_matmul.tiles import kernel_steps
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
)

LINES = (*range(8, 65, 8), *range(80, 257, 16))
"""Lines of the wide operand that are tried: all that there are up to 64, and every other one."""

SIDES = {
    1: ((64, 1, 1), (128, 2, 1), (192, 1, 2), (192, 3, 1), (256, 2, 1), (320, 1, 2)),
    2: ((64, 1, 1), (64, 1, 2), (128, 2, 1), (128, 1, 2), (192, 3, 1)),
}
"""Lines of the tall operand, and warp groups along the tall and the wide one; by weights, 2 of a
gated pair."""

SPLITS = (2, 4, 8)
"""Parts of k, of which each block of a cluster sums one."""

LEAST_STAGES, MOST_STAGES = 2, 12
"""A stage is handed back when the products of the next one have begun: one alone would hang."""

MOST_ACCUMULATORS = {1: 176, 2: 176, 3: 96}
"""Of a thread, by warp groups that multiply: with more, its registers spill."""

MOST_LINES = 256
"""Of a warp group: the widest ``wgmma``."""

SHARED_LINES = 128
"""Rows of a tile up to which it is worth sharing copies of weights in a cluster: with more, a tile
multiplies longer than it loads."""

SPLIT_LINES = 128
"""Rows, and features, of a tile up to which k is split."""

MOST_OF_TWO_BLOCKS = 64
"""Accumulators of a thread of two blocks of 256 threads, which have 128 registers each."""


class CudaMatmul(KernelFamily[MatmulWork]):
    """Norm in front, matmul or gated projections: tiles of any multiple of 8 rows."""

    names = (FAMILY,)
    backend = "triton"
    takes = (NormMatmul, GatedFFN)
    plan = CudaPlan
    error = OWN_BASELINE_ERROR
    breaks = Breaks((16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), 4096)

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
        if shape.layouts != {"nk"}:
            return f"weights lie as [k, n], family {FAMILY!r} reads [n, k]"
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
        given = {"block_k": BLOCK_K, "num_warps": 4 * (plan.groups + 1)}
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
        return cost.predict(
            CudaPlan.of(plan), matmul_shape(work, pairs=False), dev, rows_of(work, size)
        )

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer the lowest tiles to any number of rows."""
        return (plan for plan in plans if plan.block_m <= max(rows[1], PART))


def _register_violations(plan: CudaPlan, weights: int) -> Iterator[str]:
    if plan.groups > max(MOST_ACCUMULATORS):
        yield f"{plan.groups} warp groups multiply, at most {max(MOST_ACCUMULATORS)}"
        return
    most = MOST_ACCUMULATORS[plan.groups]
    if plan.blocks > 1:
        if (plan.blocks, plan.groups) != (2, 1):
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
    for name, sharers in (("box_m", plan.cluster_n), ("box_n", plan.cluster_m)):
        if getattr(plan, name) % 8 or getattr(plan, name) < 8:
            yield f"{sharers} blocks copy {getattr(plan, name)} lines each, must be a multiple of 8"


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
    """Return the plans for one weight, or for two of a gated pair."""
    found: list[CudaPlan] = []
    for (tall, *groups), wide, swapped in product(SIDES[weights], LINES, (0, 1)):
        one = _tile(tall, wide, (groups[0], groups[1]), swapped)
        if wide % (8 * groups[1]) or accumulators(one, weights) > MOST_ACCUMULATORS[one.groups]:
            continue
        if swapped and tall > 128:  # rows come in all numbers
            continue
        blocks = [1] + [2] * (one.groups == 1 and accumulators(one, weights) <= MOST_OF_TWO_BLOCKS)
        for each in blocks:
            smem = min(sm_smem // each - SYSTEM_SMEM_BYTES, block_smem)
            room = smem - other_bytes(one) - 2 * 8 * MOST_STAGES
            stages = min(MOST_STAGES, room // stage_bytes(one, weights))
            plan = replace(one, num_stages=stages, blocks=each)
            found.append(plan)
            if max(one.block_m, one.block_n) <= SPLIT_LINES:
                found += [replace(plan, split_k=split) for split in SPLITS]
            if one.block_m <= SHARED_LINES and each == 1 and one.box_n % 16 == 0:
                found.append(replace(plan, cluster_m=2))
    return tuple(found)


def _tile(tall: int, wide: int, groups: tuple[int, int], swapped: int) -> CudaPlan:
    """Return a plan by its tall and wide lines, and the warp groups along these."""
    rows, features = (tall, wide) if swapped else (wide, tall)
    groups_m, groups_n = groups if swapped else groups[::-1]
    return CudaPlan(
        *(rows, features, BLOCK_K),
        num_stages=1,
        num_warps=4 * (groups_m * groups_n + 1),
        backend="triton",
        family=FAMILY,
        swapped=swapped,
        groups_m=groups_m,
        groups_n=groups_n,
    )
