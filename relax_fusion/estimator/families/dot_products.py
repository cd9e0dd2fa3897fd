"""Dot products of whole warps along k: a family of GPUs, for a few rows of "nk" weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...hardware import STATIC_SMEM_BYTES, DeviceSpec
from ...workload import INTEGER_DTYPES, GatedFFN, NormMatmul
from ..family import OWN_BASELINE_ERROR, Breaks
from ..gpu_cost import ISSUE_PER_CLOCK, L2_SHARE, Rates, resident_blocks
from ..limits import VECTOR_LOAD_BYTES, one_stage
from ..prediction import ceil_div, power_dividing, powers
from ..shape import matmul_shape
from ..steps import Footprint
from ..tile_plan import TilePlan
from .few_rows import tiles as few_rows
from .matmuls import (
    DOT_PRODUCTS,
    THREAD_OVERHEAD_REGISTERS,
    MatmulWork,
    columns_fit,
    matmul_limits,
    refuses_scattered,
)
from .tensor_cores import tiles as mma
from .tiled import Tile, TiledMatmul

COLUMNS = (1, 2, 4)
STEPS = (1, 2, 4)
THREADS = (64, 128, 256)

STATISTICS = 64
"""Words of shared memory beside a row: mean, mean square, and one per warp to add up."""

RATES = Rates(latency_s=0.456e-6, start_s=2.3e-6, issue=1.44)
"""What the kernel reaches: float32 sums wait for loads that nobody asked for ahead."""

INSTRUCTIONS_PER_WEIGHT = 2.5
"""A weight takes 2.5 instructions: convert, multiply-add, and a share of the loads and of
converting x.  Counted."""

NORM_WAIT = 6000
"""Clocks in which a block has the statistics of its row, before it asks for the first weight: 3 us
on an H200.  Blocks of each wave normalise anew: 25,000 of two columns took 79 us where 12,600 of
four took 45.  That was measured with weights that are not packed; packed ones do so once."""


class DotProducts(TiledMatmul):
    """Norm, matmul or gated projections of a row at a time, k contiguous in the weights."""

    names = (DOT_PRODUCTS,)
    takes = (NormMatmul, GatedFFN)
    emitter = "relax_fusion.dlight_rules.contraction_gpu:emit"
    error = OWN_BASELINE_ERROR
    fallback = True
    breaks = Breaks((1, 16))

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse integers where tensor cores do not multiply them, and words across k."""
        missing = mma.unsupported(matmul_shape(work), dev)
        return refuses_scattered(work) or (missing if work.dtype in INTEGER_DTYPES else None)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield groups of whole warps, each with some columns."""
        shape = matmul_shape(work)
        if shape.layouts != {"nk"}:
            return
        lanes = power_dividing(shape.k, VECTOR_LOAD_BYTES // shape.in_bytes)
        for threads in (t for t in THREADS if t > dev.warp_size):
            for along_k in powers(dev.warp_size, threads):
                for reg_n in COLUMNS:
                    block_n = threads // along_k * reg_n
                    if not columns_fit(shape, block_n):
                        continue
                    for step in STEPS:
                        block_k = along_k * lanes * step
                        if shape.k % block_k == 0:
                            yield TilePlan(
                                *(1, block_n, block_k),
                                reg_n=reg_n,
                                lanes=lanes,
                                num_warps=threads // dev.warp_size,
                                family=DOT_PRODUCTS,
                            )

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Leave many rows to tensor cores: dot products read all weights once a row."""
        many = rows[0] > few_rows.MOST_ROWS and mma.unsupported(matmul_shape(work), dev) is None
        return () if many else plans

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what a block has not, and which groups of threads do not divide k."""
        yield from one_stage(plan)
        if plan.block_m != 1:
            yield f"block_m is {plan.block_m}, family {DOT_PRODUCTS!r} takes 1 row"
        if matmul_shape(work).layouts != {"nk"}:
            yield f"family {DOT_PRODUCTS!r} takes weights [n, k], some are [k, n]"
        foot = self.footprint(plan, work, dev)
        yield from matmul_limits(foot, plan, work, dev, is_static=True)
        yield from _groups(plan, work.k, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the row in shared memory, and a step of operands in flight."""
        shape = matmul_shape(work)
        threads = plan.num_warps * dev.warp_size
        columns = plan.reg_n * shape.parts
        x_bytes = 4 if shape.has_norm else shape.in_bytes
        elements = plan.block_k * (plan.block_n // plan.reg_n) // threads
        held = ceil_div(elements * (columns * shape.in_bytes + x_bytes), 4)
        staged = shape.has_norm and len(shape.n_parts) == 1 and stages_norm(shape.k, dev)
        return Footprint(
            smem_bytes=(shape.k + STATISTICS) * 4 if staged else 0,
            registers_per_thread=columns + held + THREAD_OVERHEAD_REGISTERS,
            threads=threads,
        )

    def tile_of(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Tile:
        """Return what `plan` asks for; each row goes through all weights."""
        shape = matmul_shape(work)
        weights = plan.block_k * plan.block_n * shape.parts
        issued = weights * INSTRUCTIONS_PER_WEIGHT / dev.warp_size
        # Sums are float32 FMAs on at most as many lanes as there are
        pipes = 2.0 * weights * dev.sm_count * dev.clock_hz / dev.fma_float32_flops_per_s
        anew = shape.has_norm and not shape.unpacked_bytes
        norm = NORM_WAIT * plan.block_k / shape.k if anew else 0.0
        return Tile(
            rows=1,
            columns=plan.block_n,
            blocks=1,
            residents=resident_blocks(self.footprint(plan, work, dev), dev),
            multiprocessors=dev.sm_count,
            depth=plan.block_k,
            clocks=max(issued / ISSUE_PER_CLOCK, pipes),
            instructions=issued / plan.num_warps + norm,
            asked_bytes=weights * shape.stored_bytes + plan.block_k * shape.in_bytes,
            rereads=max(0.0, 1 - dev.l2_bytes * L2_SHARE / shape.weight_bytes),
        )

    def rates_of(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Rates:
        """Return what the kernel reaches; of packed weights, blocks normalise once."""
        shape = matmul_shape(work)
        once = shape.has_norm and shape.unpacked_bytes > 0
        return RATES._replace(start_s=RATES.start_s + once * NORM_WAIT / dev.clock_hz)

    def blocks(
        self, plan: TilePlan, work: MatmulWork, most: int | None
    ) -> Iterator[tuple[str, int]]:
        """Yield the rows, each of which has blocks of its own."""
        yield "the rows", most or 0


def stages_norm(k: int, dev: DeviceSpec) -> bool:
    """Tell whether a block holds its normalised row, and its statistics, in shared memory."""
    return (k + STATISTICS) * 4 <= min(STATIC_SMEM_BYTES, dev.smem_per_block_bytes)


def _groups(plan: TilePlan, k: int, dev: DeviceSpec) -> Iterator[str]:
    """Check that the threads form groups of whole warps along k."""
    threads, groups = plan.num_warps * dev.warp_size, plan.block_n // plan.reg_n
    if threads % (groups * dev.warp_size):
        yield (
            f"{plan.num_warps} warps do not form {groups} equal groups, one for each "
            f"reg_n={plan.reg_n} of block_n={plan.block_n}"
        )
    elif plan.block_k % (threads // groups * plan.lanes):
        yield (
            f"block_k is {plan.block_k}, no multiple of the {threads // groups * plan.lanes} "
            f"elements that a group of {threads // groups} threads loads at once"
        )
    if k % plan.lanes:
        yield f"lanes is {plan.lanes}, does not divide k={k}"
    elif k % plan.block_k:
        # A last step of fewer elements would multiply registers that were never loaded.
        yield f"block_k is {plan.block_k}, does not divide k={k}"
