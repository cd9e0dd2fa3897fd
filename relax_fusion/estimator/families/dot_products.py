"""Dot products of whole warps along k: a family of GPUs, for a few rows of "nk" weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...hardware import STATIC_SMEM_BYTES, DeviceSpec
from ...workload import INTEGER_DTYPES, GatedFFN, NormMatmul
from ..family import OWN_BASELINE_ERROR, Breaks, KernelFamily
from ..gpu_cost import ISSUE_PER_CLOCK, L2_SHARE, MEMORY_LATENCY_S
from ..limits import VECTOR_LOAD_BYTES, one_stage
from ..prediction import DRAM_EFFICIENCY, ceil_div, power_dividing, powers
from ..shape import Size, matmul_shape, rows_of
from ..steps import Footprint, Step
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

COLUMNS = (1, 2, 4)
STEPS = (1, 2, 4)
THREADS = (64, 128, 256)

STATISTICS = 64
"""Words of shared memory beside a row: mean, mean square, and one per warp to add up."""

NORM_FLOPS_PER_ELEMENT = 4
"""Square and add for the statistics, scale and gamma to apply them; counted."""

GEMV_DRAM_EFFICIENCY = 0.95 * DRAM_EFFICIENCY
"""Reached part of the peak bandwidth by dot products of one row: 4.1 TB/s on 235 MB of weights,
measured on an H200."""

GEMV_INSTRUCTIONS_PER_WEIGHT = 2.5
"""Convert, multiply-add, and a share of the loads and of converting x.  Counted."""

GEMV_PROLOGUE_LOADS = 10
"""Dependent trips to memory or through barriers before the first weight is asked for, with a norm:
5 us, what a norm of 4096 features in front of 50 MB of weights added on an H200.  Each wave of
blocks normalises anew: 25,000 blocks of two columns took 79 us where 12,600 of four took 45."""

GEMV_FILL_LOADS = 4
"""The same without a norm: the start of a kernel, and the sums of its threads.  13.4 to 14.3 us for
34 MB, measured on an H200 (`2026-11-21-skinny_plans.log`)."""


class DotProducts(KernelFamily[MatmulWork]):
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

    def steps(
        self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size
    ) -> Iterator[Step]:
        """Yield the launch; each row goes through all weights again, from L2 where they fit."""
        shape, rows = matmul_shape(work), rows_of(work, size)
        tiles_n = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
        steps = ceil_div(shape.k, plan.block_k)
        weights = steps * plan.block_k * plan.block_n * shape.parts
        issued = weights * GEMV_INSTRUCTIONS_PER_WEIGHT / dev.warp_size
        block_s = issued / (ISSUE_PER_CLOCK * dev.clock_hz)
        # Sums are float32 FMAs on at most as many lanes as there are.
        block_s = max(block_s, 2.0 * weights * dev.sm_count / dev.fma_float32_flops_per_s)
        if shape.has_norm:
            norm_s = shape.k * NORM_FLOPS_PER_ELEMENT * dev.sm_count / dev.fma_float32_flops_per_s
            block_s += norm_s
        moved = rows * shape.row_bytes
        missing = max(0.0, 1 - dev.l2_bytes * L2_SHARE / shape.weight_bytes)
        x_reads = tiles_n * (2 if shape.has_norm else 1)
        prologue = GEMV_PROLOGUE_LOADS if shape.has_norm else GEMV_FILL_LOADS
        # That waves normalise anew was measured with weights that are not packed
        anew = shape.has_norm and not shape.unpacked_bytes
        yield Step(
            blocks=rows * tiles_n,
            foot=self.footprint(plan, work, dev),
            block_s=block_s,
            chain_s=(steps + 1) * MEMORY_LATENCY_S,
            dram_bytes=shape.weight_bytes * (1 + (rows - 1) * missing) + moved,
            l2_bytes=rows * (shape.weight_bytes + x_reads * shape.x_row_bytes) + moved,
            flops=shape.flops(rows),
            start_s=prologue * MEMORY_LATENCY_S,
            wave_s=prologue * MEMORY_LATENCY_S if anew else 0.0,
            num_stages=plan.num_stages,
            dram_efficiency=GEMV_DRAM_EFFICIENCY,
        )

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
