"""Dot products of whole warps along k: a family of GPUs, for a few rows of "nk" weights."""

from __future__ import annotations

from collections.abc import Iterator

from ...hardware import STATIC_SMEM_BYTES, DeviceSpec
from ...workload import INTEGER_DTYPES
from ..family import OWN_BASELINE_ERROR, Breaks, Offer
from ..gpu_cost import ISSUE_PER_CLOCK, L2_SHARE, Rates, resident_blocks
from ..limits import GRID_YZ, VECTOR_LOAD_BYTES, grid_limits, one_stage
from ..prediction import Footprint, ceil_div, power_dividing, powers
from ..shape import MatmulShape
from ..tile_plan import TilePlan
from . import matmuls
from .few_rows import tiles as few_rows
from .tensor_cores import tiles as mma

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
"""Clocks in which a block has the statistics of its row, before it asks for the first weight, where
weights are packed: 3 us on an H200."""

NORM_READ = 220
"""Clocks in which a thread has an element of its row, where weights are not packed: about the
latency of the second level, as it asks for one at a time, once for an RMSNorm and twice for a
LayerNorm.  Fitted to 50 times with norms on an H200, whose prices err by 14 % (23 % where rows of
all lengths wait as long).  Blocks of each wave read anew: 25,000 of two columns took 79 us where
12,600 of four took 45."""


class DotProducts(matmuls.GpuMatmul):
    """Norm, matmul or gated projections of a row at a time, k contiguous in the weights."""

    names = (matmuls.DOT_PRODUCTS,)
    emitter = "relax_fusion.dlight_rules.contraction_gpu:emit"
    error = OWN_BASELINE_ERROR
    fallback = True
    breaks = Breaks((1, 16))

    def refuses(self, problem: matmuls.MatmulProblem) -> str | None:
        """Refuse integers where tensor cores do not multiply them, and words across k."""
        is_integer = problem.work.dtype in INTEGER_DTYPES
        missing = mma.unsupported(problem.shape, problem.dev) if is_integer else None
        return matmuls.refuses_scattered(problem) or missing

    def plans(self, problem: matmuls.MatmulProblem) -> Iterator[Offer]:
        """Yield groups of whole warps, each with some columns.

        Many rows are left to tensor cores: dot products read all weights once a row.
        """
        shape, dev = problem.shape, problem.dev
        if shape.layouts != {"nk"}:
            return
        last = few_rows.MOST_ROWS if mma.unsupported(shape, dev) is None else None
        lanes = power_dividing(shape.k, VECTOR_LOAD_BYTES // shape.in_bytes)
        for threads in (t for t in THREADS if t > dev.warp_size):
            for along_k in powers(dev.warp_size, threads):
                for reg_n in COLUMNS:
                    block_n = threads // along_k * reg_n
                    if not matmuls.columns_fit(shape, block_n):
                        continue
                    for step in STEPS:
                        block_k = along_k * lanes * step
                        if shape.k % block_k == 0:
                            plan = TilePlan(
                                *(1, block_n, block_k),
                                reg_n=reg_n,
                                lanes=lanes,
                                num_warps=threads // dev.warp_size,
                                family=matmuls.DOT_PRODUCTS,
                            )
                            yield Offer(plan, last=last, most=GRID_YZ)

    def violations(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> Iterator[str]:
        """Yield what a block has not, and which groups of threads do not divide k."""
        shape = problem.shape
        yield from one_stage(plan)
        if plan.block_m != 1:
            yield f"block_m is {plan.block_m}, family {matmuls.DOT_PRODUCTS!r} takes 1 row"
        if shape.layouts != {"nk"}:
            yield f"family {matmuls.DOT_PRODUCTS!r} takes weights [n, k], some are [k, n]"
        foot = _footprint(plan, shape, problem.dev)
        yield from matmuls.matmul_limits(foot, plan, problem, is_static=True)
        yield from _groups(plan, shape.k, problem.dev)
        yield from grid_limits({"the rows": problem.most or 0})

    def price(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> matmuls.TilePrice:
        """Price each row's way through all weights; of packed ones, blocks normalise once."""
        shape, dev = problem.shape, problem.dev
        foot, once = _footprint(plan, shape, dev), shape.has_norm and shape.unpacked_bytes > 0
        rates = RATES._replace(start_s=RATES.start_s + once * NORM_WAIT / dev.clock_hz)
        return matmuls.TilePrice(
            dev, foot, _tile(plan, shape, foot, dev), rates, matmuls.Columns.of(shape)
        )


def _footprint(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Footprint:
    """Return the row in shared memory, and a step of operands in flight."""
    threads = plan.num_warps * dev.warp_size
    columns = plan.reg_n * shape.parts
    x_bytes = 4 if shape.has_norm else shape.in_bytes
    elements = plan.block_k * (plan.block_n // plan.reg_n) // threads
    held = ceil_div(elements * (columns * shape.in_bytes + x_bytes), 4)
    staged = shape.has_norm and len(shape.n_parts) == 1 and stages_norm(shape.k, dev)
    return Footprint(
        smem_bytes=(shape.k + STATISTICS) * 4 if staged else 0,
        registers_per_thread=columns + held + matmuls.THREAD_OVERHEAD_REGISTERS,
        threads=threads,
    )


def _tile(plan: TilePlan, shape: MatmulShape, foot: Footprint, dev: DeviceSpec) -> matmuls.Tile:
    """Return what a plan asks for."""
    weights = plan.block_k * plan.block_n * shape.parts
    issued = weights * INSTRUCTIONS_PER_WEIGHT / dev.warp_size
    # Sums are float32 FMAs on at most as many lanes as there are
    pipes = 2.0 * weights * dev.sm_count * dev.clock_hz / dev.fma_float32_flops_per_s
    reads = shape.normed_first + {"": 0, "layer": 2}.get(shape.norm, 1)
    anew = reads * (shape.unpacked_bytes == 0)
    norm = anew * NORM_READ * plan.block_k / foot.threads  # the part of a step along k
    return matmuls.Tile(
        rows=1,
        columns=plan.block_n,
        blocks=1,
        residents=resident_blocks(foot, dev),
        multiprocessors=dev.sm_count,
        depth=plan.block_k,
        clocks=max(issued / ISSUE_PER_CLOCK, pipes),
        instructions=issued / plan.num_warps + norm,
        asked_bytes=weights * shape.stored_bytes + plan.block_k * shape.in_bytes,
        rereads=max(0.0, 1 - dev.l2_bytes * L2_SHARE / shape.weight_bytes),
    )


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
