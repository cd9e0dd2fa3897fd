"""Matmuls in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar

from ....hardware import DeviceSpec
from ....hardware.instructions import MMA
from ....workload import DynamicDim, GatedFFN
from ...family import OWN_BASELINE_ERROR, Breaks, Offer
from ...limits import GRID_YZ, grid_limits
from ...prediction import HALF_DTYPES, Footprint, ceil_div
from ...shape import MatmulShape, Problem
from ...tile_plan import TilePlan
from ..cuda_matmul.family import CudaMatmul
from ..cuda_matmul.tiles import form_of
from ..matmuls import Columns, GpuMatmul, MatmulProblem, TilePrice, packed_form
from . import tiles

GEMV_TILES = ((512, 1), (1024, 4), (2048, 8), (4096, 8), (8192, 8))
"""Tiles of one row have so many elements of k and warps; a lane loads 16 bytes at a time, or
more."""

GEMV_LINES = (4, 2, 1)
"""Such a tile has so many columns, those of both products counted: with fewer, blocks read too
little for what launching them takes."""

LEAST_ROWS = 16
"""The lowest tiles of tensor cores have 16 rows."""

TILE_ROWS = (LEAST_ROWS, 32, 64, 128)
"""The "pointer" tiles have so many rows."""

MAX_ACCUMULATORS = 192
"""A thread has 192 accumulators at most: with more, its registers spill."""

POINTER_ROWS = 64
"""Rows beyond which "pointer" takes longer than its price for gated pairs whose weights L2 does not
hold: 1.11 and 1.21 of it with two and four tiles of rows (`2026-11-21-judge_estimator-wide.json`
and the others), 1.30 at 192 rows of Qwen2.5-7B's (`2026-11-24-bench_widths-seed5.md`)."""


class TritonMatmul(GpuMatmul):
    """Norm, matmul or gated projections: "gemv" and "pointer"."""

    names: ClassVar[tuple[str, ...]] = tiles.FAMILIES
    language = "triton"
    error = OWN_BASELINE_ERROR
    breaks = Breaks(
        (1, 16, 32, 64, 128, 256, 384, 512, 768, 896, 1024), 4096, finer=tiles.FINER_ROWS
    )

    def takes(self, problem: Problem[Any]) -> bool:
        """Leave weights of few bits to `PackedGemv`."""
        return super().takes(problem) and packed_form(problem.work) is None

    def refuses(self, problem: MatmulProblem) -> str | None:
        """Refuse dtypes, epilogues and devices that the kernels are not for."""
        work, dev = problem.work, problem.dev
        if work.dtype not in HALF_DTYPES:
            return f"dtype is {work.dtype}, the Triton kernels take {' and '.join(HALF_DTYPES)}"
        if MMA[work.dtype] not in dev.capabilities.matrix_instructions:
            return f"the {dev.label} has no tensor cores for {work.dtype}"
        if isinstance(work, GatedFFN):
            return None
        unknown = [p.n.name for p in work.outputs if isinstance(p.n, DynamicDim)]
        if unknown:
            return f"the weight has {unknown[0]} columns, the Triton kernels are made for a number"
        if any(p.rope and set(p.epilogue) - {"bias"} for p in work.outputs):
            return "the kernels rotate a matmul with a bias, and with no other step before it"
        return None

    def plans(self, problem: MatmulProblem) -> Iterator[Offer]:
        """Yield the plans of all kernels: the lowest tiles of tensor cores for two rows and more.

        Many rows of gated pairs are left to CUDA C++, where it has a kernel.
        """
        work, last = problem.work, None
        if isinstance(work, GatedFFN) and CudaMatmul().refuses(problem) is None:
            last = POINTER_ROWS
        if not isinstance(work.rows, int) or work.rows <= 2:
            for plan in _gemv_plans(problem):
                yield Offer(plan, last=last, most=GRID_YZ)
        for block_m, stages in product(TILE_ROWS, (6, 8, 4)):
            first = 2 if block_m == LEAST_ROWS else None
            for block_k, split in ((64, 1), (128, 1), (64, 4)):
                plan = tiles.triton_plan("pointer", (block_m, 64, block_k), 4, stages, split)
                yield Offer(plan, first, last)

    def violations(self, plan: TilePlan, problem: MatmulProblem) -> Iterator[str]:
        """Yield what tiles, copies and epilogues ask for, and what a block has not."""
        shape = problem.columns
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(plan, name)
            if value < 1 or value & (value - 1):
                yield f"{name} is {value}, triton needs a power of two"
        if plan.family == tiles.GEMV:
            yield from _gemv_violations(plan, shape)
            yield from grid_limits({"the rows": problem.most or 0})
        elif plan.family == tiles.POINTER:
            yield from _tile_violations(plan, shape, problem.dev)
        if form_of(problem.work).rotates and plan.block_n % 2:
            yield f"block_n is {plan.block_n}, rotated features come 2 at a time"

    def price(self, plan: TilePlan, problem: MatmulProblem) -> TilePrice:
        """Price the launches, which begin early behind others."""
        shape, dev = problem.columns, problem.dev
        sums, threads = tiles.accumulators(plan, shape), plan.num_warps * dev.warp_size
        columns = Columns(
            shape, [[shape.n_parts[i] for i in some] for some in tiles.launches(problem.work)]
        )
        return TilePrice(
            dev,
            Footprint(tiles.smem_bytes(plan, shape), sums, threads),
            tiles.tile_of(plan, problem),
            tiles.RATES[plan.family],
            columns,
            tiles.EARLY_S.get(plan.family, 0.0) if dev.capabilities.dependent_launch else 0.0,
        )


def _gemv_plans(problem: MatmulProblem) -> list[TilePlan]:
    """Return the plans of one row.

    Where nothing is normalised, the kernel in front may be an attention, which leaves memory the
    time for all weights.  If all programs of some plan ask for theirs by then, others with the
    whole k at once are left out: the projection of Qwen3-30B-A3B's took 3.6 us in the graph of a
    token, and 2.3 in one wave, where a launch by itself takes as long (`2026-11-30-token.log`).
    """
    parts, every = problem.columns.parts, list[TilePlan]()
    for (block_k, warps), lines in product(GEMV_TILES, GEMV_LINES):
        if lines % parts == 0:
            every.append(tiles.triton_plan("gemv", (1, lines // parts, block_k), warps, 1))
    if problem.work.norm is not None:
        return every
    together = [p for p in every if tiles.at_once(p, problem.columns, problem.dev)]
    return [p for p in every if p in together or not together or p.block_k < problem.work.k]


def _gemv_violations(plan: TilePlan, shape: MatmulShape) -> Iterator[str]:
    if plan.block_m != 1:
        yield f"block_m is {plan.block_m}, family 'gemv' takes 1 row"
    elements = plan.block_n * plan.block_k * shape.parts // (32 * max(plan.num_warps, 1))
    if elements > MAX_ACCUMULATORS:
        yield f"a thread holds {elements} weights, at most {MAX_ACCUMULATORS} fit its registers"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, family 'gemv' reduces in 1 part"


def _tile_violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
    """Check what all tiles on tensor cores must meet."""
    for name in ("block_m", "block_n", "block_k"):
        if getattr(plan, name) < 16:
            yield f"{name} is {getattr(plan, name)}, tensor cores need 16"
    used, most = tiles.smem_bytes(plan, shape), dev.smem_per_block_bytes
    if used > most:
        yield f"needs {used} B of shared memory, the {dev.label} has {most} B per block"
    sums = tiles.accumulators(plan, shape)
    if sums > MAX_ACCUMULATORS:
        yield f"a thread has {sums} accumulators, at most {MAX_ACCUMULATORS} fit its registers"
    if plan.split_k > ceil_div(shape.k, plan.block_k):
        yield f"split_k is {plan.split_k}, k has {ceil_div(shape.k, plan.block_k)} blocks"
