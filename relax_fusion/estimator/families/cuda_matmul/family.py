"""Matmuls in CUDA C++ for Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ....workload import GatedFFN, NormMatmul, Packed
from ...family import OWN_BASELINE_ERROR, Breaks, KernelFamily, Offer
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import Footprint, Formula, Prediction, Price, ceil_div
from ...shape import Problem, Size, rows_at
from ...tile_plan import TilePlan
from ..matmuls import Columns, MatmulProblem, MatmulWork, TilePrice
from ..triton_matmul.tiles import FINER_ROWS
from . import adapters, cost
from .cost import FEW_ROWS, LEAST_COPIED, packed_violations
from .kinds import KINDS, NARROW, NARROW_COLUMNS, packed_plans, plans_of, run_violations
from .refusals import refused
from .tiles import (
    FAMILY,
    PART,
    CudaPlan,
    accumulators,
    block_k,
    form_of,
    is_interleaved,
    lines_copied,
    lines_violations,
    residual_steps,
    smem_bytes,
    stage_bytes,
    together,
)

FEW_TILES = 32
"""Row tiles up to which tiles of less than 64 rows can be the fastest: they were in no shape that
was timed with more."""

LEAST_STAGES = 2
"""A stage is handed back when the products of the next one have begun: one alone would hang."""

MOST_ACCUMULATORS = {1: 176, 2: 176, 3: 96}
"""A thread has so many accumulators at most, by warp groups that multiply: with more, its registers
spill."""

MOST_IN_TURNS = {0: 160, 1: 128}
"""Where warp groups take turns, a thread has so many at most, by whether operands are swapped."""

MOST_COPIED = 256
"""A box of a tensor map has 256 lines at most (CUDA driver API, ``cuTensorMapEncodeTiled``)."""

MOST_OF_TWO_BLOCKS = 64
"""Where a multiprocessor holds two blocks of 256 threads, a thread has 64 accumulators at most, of
128 registers."""


class CudaMatmul(KernelFamily[MatmulWork]):
    """Norm in front, matmul or gated projections: tiles of any multiple of 8 rows."""

    names = (FAMILY,)
    language = "cuda"
    plan = CudaPlan
    error = OWN_BASELINE_ERROR
    breaks = Breaks(
        *((16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), 4096),
        finer=FINER_ROWS,
    )

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all, with adapters or without."""
        return problem.dev.kind == "gpu" and isinstance(problem.work, NormMatmul | GatedFFN)

    def refuses(self, problem: MatmulProblem) -> str | None:
        """Refuse dtypes, epilogues, layouts and devices that the kernel is not for."""
        return refused(problem)

    def plans(self, problem: MatmulProblem) -> Iterator[Offer]:
        """Yield every tile with as many stages as fit.

        Tiles that only pad are for no rows, nor are those so low that many read each weight; few
        rows of packed weights are left to others.
        """
        packed = form_of(problem.work).packed
        for plan in _tiles(problem):
            first = plan.block_m if plan.block_m > PART else 1
            if packed is not None:
                first = max(first, FEW_ROWS + 1)
            low = plan.block_m < PART
            yield Offer(plan, first, FEW_TILES * (plan.block_m + 1) - 1 if low else None)

    def violations(self, plan: TilePlan, problem: MatmulProblem) -> Iterator[str]:
        """Yield what the instructions, the copies and the registers do not allow."""
        plan, work, form = CudaPlan.of(plan), problem.work, form_of(problem.work)
        weights, packed = form.weights, form.unpacked(plan)
        part = PART // 2 if is_interleaved(weights, packed) else PART
        tall, wide = part * plan.groups_tall, 8 * plan.groups_wide
        if plan.copied and form.packed is None:
            yield "copied is 1, but weights are not packed"
        names = ("block_m", "block_n") if plan.swapped else ("block_n", "block_m")
        for name, lines in zip(names, (tall, wide), strict=True):
            if getattr(plan, name) % lines:
                yield f"{name} is {getattr(plan, name)}, must be a multiple of {lines}"
        if "kn" in problem.shape.layouts and (plan.swapped or plan.cluster_m > 1):
            yield "weights lie as [k, n], which are the tall operand of blocks that share no copies"
        yield from lines_violations(plan, work.dtype)
        yield from run_violations(plan, form.apart)
        step = plan.block_k if packed else block_k(work.dtype)
        given = {"block_k": step, "num_warps": 4 * (plan.multiplying + 1)}
        for name, value in given.items():
            if getattr(plan, name) != value:
                yield f"{name} is {getattr(plan, name)}, family {FAMILY!r} has {value} for this"
        least = LEAST_STAGES * plan.groups_k
        if form.adds_residual:  # its stages are all held at once
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
        dev, needed = problem.dev, smem_bytes(plan, weights, packed, form.apart > 0)
        room = dev.smem_per_sm_bytes // plan.blocks - SYSTEM_SMEM_BYTES
        most = min(room, dev.smem_per_block_bytes)
        if needed > most:
            yield f"needs {needed} B of shared memory, there are {most} B for a block"

    def price(self, plan: TilePlan, problem: MatmulProblem) -> Price:
        """Price the launches, with those of adapters in front."""
        plan, work, dev = CudaPlan.of(plan), problem.work, problem.dev
        form = form_of(work)
        packed, turned = form.unpacked(plan), form.apart > 0
        foot = Footprint(
            smem_bytes(plan, form.weights, packed, turned),
            accumulators(plan, form.weights),
            plan.num_warps * dev.warp_size,
        )
        shape = problem.shape if turned else problem.columns
        if work.is_adapted:  # whose steps are behind those of k
            shape = adapters.longer(work)
        columns = Columns(shape, [[shape.n_parts[i] for i in alike] for alike in together(work)])
        rates = cost.PACKED_RATES if packed else cost.RATES
        whole = TilePrice(dev, foot, cost.tile_of(plan, form, problem), rates, columns)
        if not work.is_adapted:
            return whole

        def with_adapters(size: Size) -> Prediction:
            first = adapters.in_front(self, work, dev, rows_at(size))
            return adapters.priced(whole.at(size), first, dev)

        return Formula(foot, with_adapters)


def _tiles(problem: MatmulProblem) -> Iterator[CudaPlan]:
    form, dev = form_of(problem.work), problem.dev
    columns = max(p.columns for p in form.outputs)
    narrow = form.weights == 1 and columns <= NARROW_COLUMNS and form.packed is None
    smem = dev.smem_per_sm_bytes, dev.smem_per_block_bytes
    kinds = KINDS[form.weights] + NARROW * narrow
    every = plans_of(kinds, form.weights, form.apart > 0, smem, problem.work.dtype)
    found = (plan for plan in every if next(run_violations(plan, form.apart), None) is None)
    if form.packed is not None:
        yield from packed_plans(form.weights, form.packed, *smem)
        yield from (replace(plan, copied=1) for plan in found if plan.block_m >= LEAST_COPIED)
    else:
        yield from (p for p in found if not narrow or p.block_n >= min(PART, columns))


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
