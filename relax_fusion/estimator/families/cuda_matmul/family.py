"""Matmuls in CUDA C++ for Hopper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import gcd
from typing import NamedTuple

from ....hardware import DeviceSpec
from ....hardware.instructions import PIECE_BYTES
from ....workload import DTYPE_BYTES, GatedFFN, NormMatmul, Packed, Projection, Rope
from ....workload.dtypes import step_dtype
from ...family import OWN_BASELINE_ERROR, Breaks, KernelFamily
from ...prediction import HALF_DTYPES, Prediction, ceil_div
from ...shape import Size, matmul_shape, rows_of
from ...steps import Footprint
from ...tile_plan import TilePlan
from ..matmuls import MatmulWork
from ..triton_matmul.cost import SYSTEM_SMEM_BYTES
from ..triton_matmul.tiles import kernel_steps
from . import adapters, cost
from .dtypes import lines_fit, refuses_dtypes
from .packed import (
    FEW_ROWS,
    LEAST_COPIED,
    packed_of,
    packed_plans,
    packed_violations,
    refuses_packed,
    unpacked_by,
)
from .tiles import (
    FAMILY,
    MOST_STAGES,
    PART,
    CudaPlan,
    accumulators,
    block_k,
    copies_residual,
    other_bytes,
    pairs_apart,
    residual_steps,
    smem_bytes,
    stage_bytes,
    tile_weights,
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

NARROW_COLUMNS = 128
NARROW = (
    _Kind(64, 1, 1, 1, 8, 8),
    _Kind(64, 1, 1, 1, 8, 32, split_k=2),
    _Kind(64, 1, 1, 1, 8, 48, split_k=4),
    _Kind(64, 1, 1, 1, 8, 64, split_k=8),
)
"""Tiles that are tried as well for weights of so few features, as those of adapters: with rows as
the tall operand nothing is multiplied in vain, and parts of k fill the chip.  None was timed.
Tiles of fewer features than there are, up to 64, would read x again and are not tried."""

FEW_TILES = 32
"""Row tiles up to which tiles of less than 64 rows can be the fastest: they were in no shape that
was timed with more."""

LEAST_STAGES = 2
"""A stage is handed back when the products of the next one have begun: one alone would hang."""

MOST_ACCUMULATORS = {1: 176, 2: 176, 3: 96}
"""Of a thread, by warp groups that multiply: with more, its registers spill."""

MOST_IN_TURNS = {0: 160, 1: 128}
"""The same where warp groups take turns, by whether operands are swapped."""

MOST_LINES = 256
"""Of a warp group: the widest ``wgmma``."""

MOST_COPIED = 256
"""Lines of a box of a tensor map (CUDA driver API, ``cuTensorMapEncodeTiled``)."""

LEAST_RUN = 32
"""Lines of a half of a head that a copy brings, where there are as many: copies of 8 lines, as tiles
of 24, 40 and 56 would need, made matmuls with a rope take up to twice as long."""

MOST_OF_TWO_BLOCKS = 64
"""Accumulators of a thread of two blocks of 256 threads, which have 128 registers each."""


class CudaMatmul(KernelFamily[MatmulWork]):
    """Norm in front, matmul or gated projections: tiles of any multiple of 8 rows."""

    names = (FAMILY,)
    backend = "triton"
    takes = (NormMatmul, GatedFFN)
    plan = CudaPlan
    error = OWN_BASELINE_ERROR
    adapts = True
    breaks = Breaks((16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), 4096)

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
        refused = (_refused(p, work) for p in _projections(work))
        return next(filter(None, refused), None)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield every tile with as many stages as fit."""
        weights, packed = tile_weights(work), packed_of(work)[0]
        columns = max(p.columns for p in _projections(work))
        narrow = weights == 1 and columns <= NARROW_COLUMNS and packed is None
        smem = dev.smem_per_sm_bytes, dev.smem_per_block_bytes
        kinds = KINDS[weights] + NARROW * narrow
        found = _plans(kinds, weights, pairs_apart(work) > 0, smem, work.dtype)
        if packed is not None:
            copied = (replace(plan, copied=1) for plan in found if plan.block_m >= LEAST_COPIED)
            return chain(packed_plans(weights, packed, *smem), copied)
        return (p for p in found if not narrow or p.block_n >= min(PART, columns))

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what the instructions, the copies and the registers do not allow."""
        plan, weights = CudaPlan.of(plan), tile_weights(work)
        tall, wide = PART * plan.groups_tall, 8 * plan.groups_wide
        if plan.copied and packed_of(work)[0] is None:
            yield "copied is 1, but weights are not packed"
        names = ("block_m", "block_n") if plan.swapped else ("block_n", "block_m")
        for name, lines in zip(names, (tall, wide), strict=True):
            if getattr(plan, name) % lines:
                yield f"{name} is {getattr(plan, name)}, must be a multiple of {lines}"
        if "kn" in matmul_shape(work).layouts and (plan.swapped or plan.cluster_m > 1):
            yield "weights lie as [k, n], which are the tall operand of blocks that share no copies"
        yield from _lines_violations(plan, work.dtype)
        if apart := pairs_apart(work):
            run, most = gcd(plan.box_n, apart), min(plan.box_n, apart, LEAST_RUN)
            if run < most:
                yield f"{run} lines of a half of a head are copied at once, must be at least {most}"
        packed = unpacked_by(plan, work)
        step = plan.block_k if packed else block_k(work.dtype)
        given = {"block_k": step, "num_warps": 4 * (plan.multiplying + 1)}
        for name, value in given.items():
            if getattr(plan, name) != value:
                yield f"{name} is {getattr(plan, name)}, family {FAMILY!r} has {value} for this"
        least = LEAST_STAGES
        if _adds_residual(work):  # its stages are all held at once
            least = max(
                least, residual_steps(plan, weights, unpacked_by(plan, work), work.out_dtype)
            )
            if plan.turns > 1:
                yield "warp groups that take turns add no residual"
        if plan.num_stages < least:
            yield f"num_stages is {plan.num_stages}, must be at least {least}"
        yield from _register_violations(plan, weights)
        if packed is not None:
            yield from packed_violations(plan, weights, packed, work.k)
        yield from _cluster_violations(plan, weights, work.k, packed)
        foot, room = (
            self.footprint(plan, work, dev),
            dev.smem_per_sm_bytes // plan.blocks - SYSTEM_SMEM_BYTES,
        )
        if foot.smem_bytes > min(room, dev.smem_per_block_bytes):
            most = min(room, dev.smem_per_block_bytes)
            yield f"needs {foot.smem_bytes} B of shared memory, there are {most} B for a block"

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the stages in shared memory, and the sums of a thread."""
        plan, weights = CudaPlan.of(plan), tile_weights(work)
        threads = plan.num_warps * dev.warp_size
        smem = smem_bytes(plan, weights, unpacked_by(plan, work), pairs_apart(work) > 0)
        return Footprint(smem, accumulators(plan, weights), threads)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches cost, by a model that was fitted to this kernel."""
        shape = matmul_shape(work, pairs=pairs_apart(work) > 0)
        columns = [[shape.n_parts[i] for i in alike] for alike in together(work)]
        plan, rows, projections = CudaPlan.of(plan), rows_of(work, size), _projections(work)
        waits = _adds_residual(work) and not copies_residual(plan, work.out_dtype)
        store_s = cost.RESIDUAL_S * waits + cost.ROTATED_S * any(p.rope for p in projections)
        if not work.is_adapted:
            return cost.predict(plan, shape, columns, dev, rows, store_s)
        shape = adapters.longer(work)
        whole = cost.predict(plan, shape, columns, dev, rows, store_s)
        return adapters.priced(whole, adapters.in_front(self, work, dev, rows), dev)

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


def _lines_violations(plan: CudaPlan, dtype: str) -> Iterator[str]:
    lines = plan.wide // plan.groups_wide
    if lines > MOST_LINES:
        yield f"a warp group has {lines} lines, at most {MOST_LINES}"
    if not lines_fit(lines, dtype):
        yield f"a warp group has {lines} lines; of {dtype}, must be 8, 24 or a multiple of 16"


def _cluster_violations(
    plan: CudaPlan, weights: int, k: int, packed: Packed | None
) -> Iterator[str]:
    if plan.cluster not in (1, 2, 4, 8):
        yield f"a cluster has {plan.cluster} thread blocks, must be 1, 2, 4 or 8"
    if plan.split_k > 1 and plan.cluster > plan.split_k:
        yield f"split_k is {plan.split_k}, blocks that split k share no copies"
    steps = ceil_div(k, plan.block_k)
    if plan.split_k > steps:
        yield f"split_k is {plan.split_k}, k has {steps} blocks"
    sums = 4 * weights * plan.block_m * plan.block_n
    if plan.split_k > 1 and sums > plan.num_stages * stage_bytes(plan, weights, packed):
        yield f"the sums of a tile are {sums} B, its stages have room for less"
    for what, lines in (("rows", plan.box_m), ("weights", plan.box_n)):
        if lines % 8 or not 8 <= lines <= MOST_COPIED:
            yield f"{lines} lines of {what} are copied at once, must be a multiple of 8 up to 256"


def _refused(projection: Projection, work: MatmulWork) -> str | None:
    """Return why there is no kernel with such an epilogue."""
    lanes = PIECE_BYTES // DTYPE_BYTES[work.out_dtype]
    steps = kernel_steps(projection.epilogue)
    own = step_dtype(work.dtype)
    if not isinstance(projection.n, int):
        return f"the weight has {projection.n.name} columns, family {FAMILY!r} is made for a number"
    if projection.n % lanes:
        return f"n is {projection.n}, family {FAMILY!r} stores {lanes} features at a time"
    if projection.rope is not None:
        return _unrotated(projection, projection.rope, work)
    if projection.adapter is not None and projection.adapter.rank % 8:
        return f"an adapter has rank {projection.adapter.rank}, lines are copied by 8 elements"
    if projection.adapter is not None and work.dtype not in HALF_DTYPES:
        return f"adapters are {work.dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
    if steps.count("residual") > 1:
        return f"an epilogue has several residuals, family {FAMILY!r} adds one"
    if "residual" in steps and own != work.out_dtype:
        return f"a residual is {own}, results are {work.out_dtype}; must be of one dtype"
    if projection.epilogue and work.out_dtype == "int32":
        return f"results are int32, of which family {FAMILY!r} stores sums without steps"
    return None


def _adds_residual(work: MatmulWork) -> bool:
    return any("residual" in projection.epilogue for projection in _projections(work))


def _unrotated(projection: Projection, rope: Rope, work: MatmulWork) -> str | None:
    """Return why the kernel cannot rotate features: it turns eight of a row at a time."""
    if work.dtype not in HALF_DTYPES or work.out_dtype != work.dtype:
        types = f"of {work.dtype} to {work.out_dtype}"
        return f"family {FAMILY!r} rotates results of {' and '.join(HALF_DTYPES)}, none {types}"
    if projection.adapter is not None or projection.packed is not None:
        return f"family {FAMILY!r} rotates a matmul whose weight is not packed, without an adapter"
    if set(projection.epilogue) - {"bias"}:
        return f"family {FAMILY!r} rotates a matmul with a bias, and with no other step before it"
    apart, period = rope.distance, rope.period or projection.columns
    pairs = f"pairs of rotated features are {apart} apart"
    if apart > 1 and projection.layout == "kn" and apart % PART:
        return f"{pairs}, of weights [k, n] it must be a multiple of {PART}"
    if apart > 1 and apart % 8:
        return f"{pairs}, family {FAMILY!r} needs a multiple of 8"
    if apart > 1 and projection.columns % (2 * apart):
        return f"n is {projection.columns}, {pairs}: must be a multiple of {2 * apart}"
    if rope.head_dim % 8 or rope.width % 8 or period % 8:
        sizes = f"{rope.width} features of heads of {rope.head_dim}, each {period},"
        return f"{sizes} are rotated, family {FAMILY!r} needs multiples of 8"
    if rope.dtype not in ("float32", work.dtype):
        return f"angles are {rope.dtype}, family {FAMILY!r} takes float32 and {work.dtype}"
    return None


def _projections(work: MatmulWork) -> tuple[Projection, ...]:
    if isinstance(work, GatedFFN):
        return (Projection(work.n, work.layout),)
    return work.outputs


@lru_cache(maxsize=8)
def _plans(
    kinds: tuple[_Kind, ...], weights: int, apart: bool, smem_bytes: tuple[int, int], dtype: str
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
                if next(_lines_violations(plan, dtype), None):
                    continue
                room = smem - other_bytes(plan, apart) - 2 * 8 * MOST_STAGES
                stages = min(MOST_STAGES, room // stage_bytes(plan, weights))
                found.append(replace(plan, num_stages=stages))
    return tuple(found)


def _plan(kind: _Kind, wide: int, step: int) -> CudaPlan:
    """Return the plan of one stage with so many lines of the wide operand."""
    rows, features = (kind.tall, wide) if kind.swapped else (wide, kind.tall)
    groups = kind.groups_tall, kind.groups_wide
    groups_m, groups_n = groups if kind.swapped else groups[::-1]
    return CudaPlan(
        *(rows, features, step),
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
