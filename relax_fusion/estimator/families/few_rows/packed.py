"""Tensor cores for at most 16 rows and packed weights, which are unpacked in registers.

A kernel is bound by memory, by L2, which gives the rows to every thread block, by how many words
are on their way at once, or by how fast warps unpack and multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ....validation import Natural
from ...family import OWN_BASELINE_ERROR, Breaks, Offer
from ...gpu_cost import ISSUE_PER_CLOCK, Rates, resident_blocks
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import HALF_DTYPES, Footprint, ceil_div
from ...shape import Problem
from ...tile_plan import TilePlan
from .. import matmuls
from ..dot_products import DotProducts
from ..fma_tiles import FmaTiles
from . import streamed
from .tiles import (
    MEMBERS,
    MMA_COLUMNS,
    MMA_ROWS,
    MOST_ROWS,
    PACKED_FAMILY,
    PIECE,
    SUM_BYTES,
    offered,
    refuses_others,
    width,
)

AHEAD = (2, 3, 4)
"""So many steps are copied ahead."""

BLOCK_COLUMNS = (16, 32, 48, 64, 128)
"""A tile has so many columns, of all parts."""

BLOCK_WARPS = (4, 8, 16)
"""A thread block has so many warps, which take turns along k."""

RATES = Rates(feed=41.9, latency_s=0.53e-6, start_s=2.64e-6, wave_s=0.264e-6, out_s=19e-12)
"""What the kernel reaches."""

UNPACKING, MULTIPLYING = 4.4, 0.33
"""A multiprocessor's quarter takes `UNPACKING` clocks for the weights of a warp, and `MULTIPLYING`
more for each eight rows."""

MANY_WARPS, FEWER = 16, 0.44
"""16 warps keep a multiprocessor busy; its speed with fewer has the exponent `FEWER`."""

INSIDE_S = 0.4e-6
"""A norm inside adds 0.4e-6 seconds; words are on their way meanwhile.  Behind other kernels, a
layer of LLaMA-3.1-8B took 1.6 us less with the norm inside (`2026-11-23-early_launches.md`)."""

OVERHEAD_REGISTERS = 36
"""A thread has 36 registers beside sums, rows and scales: addresses, and the words that are being
unpacked."""


@dataclass(frozen=True)
class PackedPlan(TilePlan):
    """Tile sizes of a kernel that unpacks weights for a few rows."""

    keeps_row: bool = False
    """Whether a thread block normalises a row and keeps it in shared memory; it has one row then.
    Else warps load with the words what they multiply, and a kernel in front normalises."""
    residents: Natural = 0
    """Thread blocks of a multiprocessor that take one tile after the other, all at once on the
    device, and keep their row (`streamed`); 0 where each block has one tile."""

    @property
    def height(self) -> int:
        """Rows of a tile that are stored."""
        return 1 if self.keeps_row else self.block_m


class PackedRows(matmuls.GpuMatmul):
    """Norm, matmul or gated projections of a few rows; threads unpack what they multiply."""

    names = (PACKED_FAMILY,)
    emitter = "relax_fusion.dlight_rules.tensor_cores.contraction:emit"
    error = OWN_BASELINE_ERROR
    instead_of = (DotProducts, FmaTiles)
    plan = PackedPlan
    breaks = Breaks((1, 8, 16))
    most_rows = MOST_ROWS

    def takes(self, problem: Problem[Any]) -> bool:
        """Leave weights that are not packed to `FewRows`."""
        return super().takes(problem) and matmuls.packed_form(problem.work) is not None

    def refuses(self, problem: matmuls.MatmulProblem) -> str | None:
        """Refuse formats, dtypes and devices that its instructions are not for."""
        work = problem.work
        if (scattered := matmuls.refuses_scattered(problem)) is not None:
            return scattered
        if work.k % PIECE and work.dtype in HALF_DTYPES:
            return f"k is {work.k}, family {PACKED_FAMILY!r} takes multiples of {PIECE}"
        return refuses_others(problem)

    def plans(self, problem: matmuls.MatmulProblem) -> Iterator[Offer]:
        """Yield tiles of 8 and 16 rows."""
        shape, rows = problem.shape, problem.work.rows
        most = rows if isinstance(rows, int) else MOST_ROWS
        if most > MOST_ROWS:
            return
        own = [*_streamed_plans(problem)]
        yield from own
        for block_m, columns, warps, ahead in product(
            (MMA_ROWS, MOST_ROWS), BLOCK_COLUMNS, BLOCK_WARPS, AHEAD
        ):
            block_n, block_k = columns // shape.parts, MEMBERS * width(shape.k) * warps
            if block_n % MMA_COLUMNS or block_m >= 2 * max(most, MMA_ROWS):
                continue
            if block_n > MMA_COLUMNS and not matmuls.columns_fit(shape, block_n):
                continue
            if ahead * block_k > shape.k and (warps, ahead) != (BLOCK_WARPS[0], AHEAD[0]):
                continue
            plan = PackedPlan(
                *(block_m, block_n, block_k),
                reg_m=block_m,
                reg_n=block_n,
                lanes=PIECE,
                num_stages=ahead,
                num_warps=warps,
                family=PACKED_FAMILY,
            )
            yield offered(plan)
            if block_m == MMA_ROWS and not own:
                yield offered(replace(plan, keeps_row=True), last=1)

    def violations(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> Iterator[str]:
        """Yield what its tiles ask for, and what a block has not."""
        own = PackedPlan.of(plan)
        family, chunk = f"family {PACKED_FAMILY!r}", MEMBERS * width(problem.work.k)
        columns = MMA_COLUMNS
        if own.residents:
            if (reason := _unstreamed(problem)) is not None:
                yield f"residents is {own.residents}, but {reason}"
                return
            if own.residents not in streamed.LATE_S:
                yield f"residents is {own.residents}, {family} has {[*streamed.LATE_S]}"
                return
            chunk, columns = streamed.CHUNK, MMA_COLUMNS // problem.shape.parts
            if plan.block_n != columns or not own.keeps_row:
                yield f"block_n is {plan.block_n}, {family} streams {columns} and keeps its row"
        if plan.block_m not in (MMA_ROWS, MOST_ROWS):
            yield f"block_m is {plan.block_m}, {family} has tiles of {MMA_ROWS} or {MOST_ROWS}"
        given = {
            "reg_m": plan.block_m,
            "lanes": PIECE,
            "split_k": 1,
            "block_k": chunk * plan.num_warps,
        }
        for name, value in given.items():
            if getattr(plan, name) != value:
                yield f"{name} is {getattr(plan, name)}, {family} has {value} with these weights"
        if plan.block_n % columns:
            yield f"block_n is {plan.block_n}, {family} takes multiples of {columns}"
        yield from matmuls.matmul_limits(_footprint(plan, problem), plan, problem)

    def price(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> matmuls.TilePrice:
        """Price the launch, with that of a norm where blocks do not normalise."""
        foot, columns = _footprint(plan, problem), matmuls.Columns.of(problem.shape)
        rates = streamed.RATES if PackedPlan.of(plan).residents else RATES
        return matmuls.TilePrice(problem.dev, foot, _tile(plan, foot, problem), rates, columns)


def _unstreamed(problem: matmuls.MatmulProblem) -> str | None:
    """Return why weights are not streamed for one row; None if they are."""
    form = matmuls.packed_form(problem.work)
    assert form is not None
    return streamed.refuses(form, problem.work.k, problem.work.dtype)


def _streamed_plans(problem: matmuls.MatmulProblem) -> Iterator[Offer]:
    """Yield what streams one row."""
    shape = problem.shape
    if _unstreamed(problem) is not None:
        return
    for warps, residents, ahead in streamed.shapes(shape.k, problem.dev):
        block_n = MMA_COLUMNS // shape.parts
        plan = PackedPlan(
            *(MMA_ROWS, block_n, streamed.CHUNK * warps),
            reg_m=MMA_ROWS,
            reg_n=block_n,
            lanes=PIECE,
            num_stages=ahead,
            num_warps=warps,
            family=PACKED_FAMILY,
            keeps_row=True,
            residents=residents,
        )
        yield offered(plan, last=1)


def _footprint(plan: TilePlan, problem: matmuls.MatmulProblem) -> Footprint:
    """Return what is copied ahead or the sums of warps, and what a thread holds."""
    shape = problem.shape
    if PackedPlan.of(plan).residents:
        return streamed.footprint(plan, shape.k, plan.num_warps * problem.dev.warp_size)
    columns, neighbours = shape.parts * plan.block_n, width(shape.k)
    held, tall = columns // 8, plan.block_m // MMA_ROWS
    x, words = tall * neighbours // 2, held * neighbours * _bits(problem.work) // 32
    threads = plan.num_warps * problem.dev.warp_size
    kept = PackedPlan.of(plan).keeps_row
    steps = ceil_div(shape.k, plan.block_k)
    ahead = min(plan.num_stages, steps)
    copied = ahead * threads * 4 * (words if kept else x + words)
    rows = steps * plan.block_k * shape.in_bytes if kept else 0
    sums = SUM_BYTES * columns * plan.block_m * plan.num_warps
    registers = tall * held + x + ahead * held + OVERHEAD_REGISTERS
    return Footprint(max(rows + copied, sums), registers, threads)


def _tile(plan: TilePlan, foot: Footprint, problem: matmuls.MatmulProblem) -> matmuls.Tile:
    """Return what a plan asks for."""
    shape, dev, norm, own = problem.shape, problem.dev, problem.work.norm, PackedPlan.of(plan)
    columns, height = plan.block_n * shape.parts, plan.block_m // MMA_ROWS
    inside = own.keeps_row and not (norm is not None and norm.residual)
    in_front, row_s = shape.has_norm and not inside, INSIDE_S * (shape.has_norm and inside)
    if own.residents:
        found = streamed.tile(plan, own.residents, shape, dev)
        return found._replace(in_front=in_front, row_s=row_s)
    each = (UNPACKING + MULTIPLYING * height) / dev.warp_size / ISSUE_PER_CLOCK
    clocks = columns * plan.block_k * each
    return matmuls.Tile(
        rows=own.height,
        columns=plan.block_n,
        blocks=1,
        residents=resident_blocks(foot, dev, SYSTEM_SMEM_BYTES),
        multiprocessors=dev.sm_count,
        depth=plan.block_k,
        ahead=min(plan.num_stages, ceil_div(shape.k, plan.block_k)),
        clocks=clocks,
        instructions=clocks * (MANY_WARPS / plan.num_warps) ** FEWER,
        weight_bytes=columns * plan.block_k * shape.stored_bytes,
        row_bytes=plan.block_k * shape.in_bytes,
        asked_bytes=plan.block_k * shape.in_bytes * own.height,
        sums=columns * plan.num_warps * plan.block_m,
        rereads=1.0,
        in_front=in_front,
        row_s=row_s,
    )


def _bits(work: matmuls.MatmulWork) -> int:
    form = matmuls.packed_form(work)
    assert form is not None
    return form.bits
