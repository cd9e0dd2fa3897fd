"""Matmuls in CUDA C++ for Hopper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ....hardware import DeviceSpec
from ....hardware.instructions import PIECE_BYTES
from ....workload import GatedFFN, NormMatmul, Packed
from ...arrays import Seconds, Wanted
from ...family import OWN_BASELINE_ERROR, Breaks, KernelFamily
from ...gpu_cost import Rates
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import Prediction, ceil_div
from ...shape import Size, matmul_shape, rows_of
from ...steps import Footprint
from ...tile_plan import TilePlan
from ..matmuls import MatmulWork
from ..tiled import Columns, Tile, TiledMatmul
from ..triton_matmul.tiles import FINER_ROWS
from . import adapters, cost
from .dtypes import lines_violations, refuses_dtypes
from .kinds import KINDS, NARROW, NARROW_COLUMNS, plans_of, run_violations
from .packed import (
    FEW_ROWS,
    LEAST_COPIED,
    packed_of,
    packed_plans,
    packed_violations,
    refuses_packed,
    unpacked_by,
)
from .refusals import projections, refused
from .tiles import (
    FAMILY,
    PART,
    CudaPlan,
    accumulators,
    block_k,
    is_interleaved,
    lines_copied,
    pairs_apart,
    residual_steps,
    smem_bytes,
    stage_bytes,
    tile_weights,
    together,
)

FEW_TILES = 32
"""Row tiles up to which tiles of less than 64 rows can be the fastest: they were in no shape that
was timed with more."""

LEAST_STAGES = 2
"""A stage is handed back when the products of the next one have begun: one alone would hang."""

MOST_ACCUMULATORS = {1: 176, 2: 176, 3: 96}
"""Of a thread, by warp groups that multiply: with more, its registers spill."""

MOST_IN_TURNS = {0: 160, 1: 128}
"""The same where warp groups take turns, by whether operands are swapped."""

MOST_COPIED = 256
"""Lines of a box of a tensor map (CUDA driver API, ``cuTensorMapEncodeTiled``)."""

MOST_OF_TWO_BLOCKS = 64
"""Accumulators of a thread of two blocks of 256 threads, which have 128 registers each."""


class CudaMatmul(TiledMatmul):
    """Norm in front, matmul or gated projections: tiles of any multiple of 8 rows."""

    names = (FAMILY,)
    language = "cuda"
    takes = (NormMatmul, GatedFFN)
    plan = CudaPlan
    error = OWN_BASELINE_ERROR
    adapts = True
    breaks = Breaks(
        *((16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), 4096),
        finer=FINER_ROWS,
    )

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, epilogues, layouts and devices that the kernel is not for."""
        capabilities = dev.capabilities
        if not (capabilities.tma and capabilities.clusters and capabilities.warp_group_mma):
            return f"family {FAMILY!r} needs TMA and wgmma (sm_90), which the {dev.label} lacks"
        reason = refuses_dtypes(work)
        if reason is not None:
            return reason
        shape = matmul_shape(work)
        if shape.unpacked_bytes and (reason := refuses_packed(work, shape.layouts)):
            return reason
        lanes = PIECE_BYTES // shape.in_bytes
        if work.k % lanes:
            return f"k is {work.k}, rows of a tensor map must be multiples of {lanes} elements"
        reasons = (refused(p, work) for p in projections(work))
        return next(filter(None, reasons), None)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield every tile with as many stages as fit."""
        weights, packed = tile_weights(work), packed_of(work)[0]
        columns = max(p.columns for p in projections(work))
        narrow = weights == 1 and columns <= NARROW_COLUMNS and packed is None
        smem = dev.smem_per_sm_bytes, dev.smem_per_block_bytes
        kinds = KINDS[weights] + NARROW * narrow
        apart = pairs_apart(work)
        every = plans_of(kinds, weights, apart > 0, smem, work.dtype)
        found = [plan for plan in every if next(run_violations(plan, apart), None) is None]
        if packed is not None:
            copied = (replace(plan, copied=1) for plan in found if plan.block_m >= LEAST_COPIED)
            return chain(packed_plans(weights, packed, *smem), copied)
        return (p for p in found if not narrow or p.block_n >= min(PART, columns))

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what the instructions, the copies and the registers do not allow."""
        plan, weights = CudaPlan.of(plan), tile_weights(work)
        packed = unpacked_by(plan, work)
        part = PART // 2 if is_interleaved(weights, packed) else PART
        tall, wide = part * plan.groups_tall, 8 * plan.groups_wide
        if plan.copied and packed_of(work)[0] is None:
            yield "copied is 1, but weights are not packed"
        names = ("block_m", "block_n") if plan.swapped else ("block_n", "block_m")
        for name, lines in zip(names, (tall, wide), strict=True):
            if getattr(plan, name) % lines:
                yield f"{name} is {getattr(plan, name)}, must be a multiple of {lines}"
        if "kn" in matmul_shape(work).layouts and (plan.swapped or plan.cluster_m > 1):
            yield "weights lie as [k, n], which are the tall operand of blocks that share no copies"
        yield from lines_violations(plan, work.dtype)
        yield from run_violations(plan, pairs_apart(work))
        step = plan.block_k if packed else block_k(work.dtype)
        given = {"block_k": step, "num_warps": 4 * (plan.multiplying + 1)}
        for name, value in given.items():
            if getattr(plan, name) != value:
                yield f"{name} is {getattr(plan, name)}, family {FAMILY!r} has {value} for this"
        least = LEAST_STAGES * plan.groups_k
        if _adds_residual(work):  # its stages are all held at once
            least = max(least, residual_steps(plan, weights, packed, work.out_dtype))
            if plan.turns > 1:
                yield "warp groups that take turns add no residual"
        if plan.num_stages % plan.groups_k:  # each stage belongs to one set, which knows its parity
            yield f"num_stages is {plan.num_stages}, must be a multiple of {plan.groups_k} sets"
        if plan.num_stages < least:
            yield f"num_stages is {plan.num_stages}, must be at least {least}"
        yield from _register_violations(plan, weights)
        if packed is not None:
            yield from packed_violations(plan, weights, packed, work.k)
        yield from _cluster_violations(plan, weights, work.k, packed)
        room = dev.smem_per_sm_bytes // plan.blocks - SYSTEM_SMEM_BYTES
        needed, most = (
            self.footprint(plan, work, dev).smem_bytes,
            min(room, dev.smem_per_block_bytes),
        )
        if needed > most:
            yield f"needs {needed} B of shared memory, there are {most} B for a block"

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the stages in shared memory, and the sums of a thread."""
        plan, weights = CudaPlan.of(plan), tile_weights(work)
        threads = plan.num_warps * dev.warp_size
        smem = smem_bytes(plan, weights, unpacked_by(plan, work), pairs_apart(work) > 0)
        return Footprint(smem, accumulators(plan, weights), threads)

    def columns(self, work: MatmulWork) -> Columns:
        """Return the weights of each launch; steps of adapters are behind those of k."""
        is_apart = pairs_apart(work) > 0
        shape = adapters.longer(work) if work.is_adapted else matmul_shape(work, pairs=is_apart)
        return Columns(shape, [[shape.n_parts[i] for i in alike] for alike in together(work)])

    def tile_of(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Tile:
        """Return what `plan` asks for."""
        plan, shape = CudaPlan.of(plan), matmul_shape(work, pairs=pairs_apart(work) > 0)
        packed, peak = unpacked_by(plan, work), dev.tensor_flops_per_s(shape.dtype)
        form = shape.parts, shape.out_bytes, packed, shape.has_norm, dev, peak
        tile = cost.tile_of(plan, *form)
        return tile._replace(store_s=cost.store_s(plan, work, shape.out_bytes))

    def rates_of(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Rates:
        """Return what the kernel reaches."""
        return cost.PACKED_RATES if unpacked_by(CudaPlan.of(plan), work) else cost.RATES

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches cost, with those of adapters in front."""
        found = super().predict(plan, work, dev, size)
        if not work.is_adapted:
            return found
        return adapters.priced(found, adapters.in_front(self, work, dev, rows_of(work, size)), dev)

    def seconds(
        self,
        plans: Sequence[TilePlan],
        work: MatmulWork,
        dev: DeviceSpec,
        sizes: Sequence[Size],
        wanted: Wanted,
    ) -> Seconds:
        """Return what `predict` does, of all plans at all sizes."""
        if work.is_adapted:
            return KernelFamily.seconds(self, plans, work, dev, sizes, wanted)
        return super().seconds(plans, work, dev, sizes, wanted)

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Leave out tiles that only pad, and tiles so low that many read each weight."""
        if packed_of(work)[0] is not None and rows[1] <= FEW_ROWS:
            return ()
        least, most = min(rows[0] // FEW_TILES, PART), max(rows[1], PART)
        return (plan for plan in plans if least <= plan.block_m <= most)


def _register_violations(plan: CudaPlan, weights: int) -> Iterator[str]:
    if plan.multiplying > max(MOST_ACCUMULATORS):
        yield f"{plan.multiplying} warp groups multiply, at most {max(MOST_ACCUMULATORS)}"
        return
    if plan.turns > 1 and (plan.turns, plan.groups, plan.parts) != (2, 1, 1):
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


def _cluster_violations(
    plan: CudaPlan, weights: int, k: int, packed: Packed | None
) -> Iterator[str]:
    if plan.cluster not in (1, 2, 4, 8):
        yield f"a cluster has {plan.cluster} thread blocks, must be 1, 2, 4 or 8"
    if plan.parts > 1 and plan.cluster > plan.split_k:
        yield f"k is split in {plan.parts} parts, blocks that split k share no copies"
    steps = ceil_div(k, plan.block_k)
    if plan.parts > steps:
        yield f"k is split in {plan.parts} parts, it has {steps} blocks"
    sums = 4 * weights * plan.block_m * plan.block_n * plan.groups_k
    if plan.parts > 1 and sums > plan.num_stages * stage_bytes(plan, weights, packed):
        yield f"the sums of a tile are {sums} B, its stages have room for less"
    of_weights = lines_copied(plan, weights, packed)
    for what, lines in (("rows", plan.box_m), ("weights", of_weights)):
        if lines % 8 or not 8 <= lines <= MOST_COPIED:
            yield f"{lines} lines of {what} are copied at once, must be a multiple of 8 up to 256"


def _adds_residual(work: MatmulWork) -> bool:
    return any("residual" in projection.epilogue for projection in projections(work))
