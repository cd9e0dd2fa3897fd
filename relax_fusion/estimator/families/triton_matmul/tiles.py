"""Plans of the Triton back end for matmuls: what they ask for, and what its kernels reach.

Families, by the kernels of `relax_fusion.triton_bridge.kernels`:

``gemv``         one row: dot products, no tensor cores, any device
``packed_gemv``  the same kernel for up to two rows and weights of few bits
``pointer``      tiles on tensor cores, operands loaded through pointers; k may be split

Tiles on tensor cores share operands only through L2.  Dot products of one row wait for memory, for
the launches of their blocks, or within a block for one part of k after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul, Projection, Step
from ...gpu_cost import ISSUE_PER_CLOCK, Rates, resident_blocks
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import Footprint, ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from ..matmuls import MatmulProblem, Tile, group_clocks

FAMILIES = GEMV, POINTER = ("gemv", "pointer")

PACKED = "packed_gemv"

DOTS = (GEMV, PACKED)
"""The families of dot products."""

MOST_TOGETHER = 3
"""Projections that share a launch at most: queries, keys and values."""

NORM_INSIDE_ROWS, NORM_INSIDE_K = 16, 64
"""Pointer tiles in which a norm inside does not stall the loop: with 128 elements of k at once,
gamma is not copied ahead (measured: 35 us instead of 20)."""

FINER_ROWS = (
    *(1, 2, 4, 8, *range(16, 128, 16), *range(128, 1024, 32)),
    *(*range(1024, 2048, 64), *range(2048, 4096, 128), *range(4096, 8192, 256)),
    *range(8192, 16385, 512),
)
"""Rows at which it is looked, each with one more, whether a plan serves that loses little."""

SMEM_RESERVE_BYTES = 4 << 10
"""A pointer tile has 4096 bytes of shared memory beside its stages: layout conversions."""


RATES = {
    "gemv": Rates(latency_s=0.281e-6, issue=5.15, start_s=2.2e-6, block_s=1.08e-9),
    "packed_gemv": Rates(latency_s=0.281e-6, issue=2.0, start_s=2.2e-6, block_s=1.08e-9),
    "pointer": Rates(
        tensor=1.12,
        feed=55.1,
        latency_s=1.06e-6,
        start_s=2.87e-6,
        wave_s=4.58e-6,
        out_s=92e-12,
        meet_s=1.49e-6,
    ),
}
"""What the kernels reach, by family."""

NORM_INSIDE_S = 1.3e-6
"""Statistics in the loop over k add so many seconds to a block: the operand passes through
registers.  Kept times of an H200 have that in the mean, and so has a whole step of eight rows
(`2026-11-30-parallel.log`)."""

MERGED_S_PER_ROW = 11e-9
"""The kernel that adds up the parts of split sums takes so many seconds for each row."""

EARLY_S = {"pointer": 1.1e-6}
"""A kernel of few rows has done so many seconds of its work before the kernel in front of it ends:
it is launched early, and asks for weights before it waits.  The median of what prices have more
than an H200 took for MCFuser's G1 to G9, beside what of launching overlaps
(`2026-11-23-bench_chains.json`)."""

MEETING, NORM_WAIT, LAYER_WAIT = 60, 90, 300
"""Instructions of a warp in whose time a block of dot products gets the sums of twice as many warps
(`MEETING`), and normalises inside (`NORM_WAIT`): a LayerNorm walks over the row twice for its
statistics, before any product, `LAYER_WAIT` for each part of k."""

IDLE_LANES, REOPENED = 0.15, 0.015
"""Lanes beyond the end of a row, which load nothing, add `IDLE_LANES` of what as many others take.
Doubling the number of parts of k adds `REOPENED` to the time in memory: each opens pages anew."""

UNPACKING, FURTHER, OF_ROW, NORMALISING = 6.5, 2.0, 3.8, 10.5
"""Instructions for a number of a word and one row, and for each further row; for an element of a
row, and where it is normalised inside.  Counted, and times what schedulers are idle: plans of one
and two rows took as long on an H200 (`2026-11-30-packed_gemv.log`)."""

DOTS_REGISTERS = 32
"""A thread has 32 registers beside the weights that it holds at once."""

COMPILED_REGISTERS = 24
"""Beside 16 to 32 registers of weights it was compiled with 22 to 24 others: `DOTS_REGISTERS`, with
a register for each weight of 16 bits, was fitted to times."""

ACCUMULATOR_OVERHEAD = 17
"""A thread has 17 registers beside its accumulators (Triton keeps operands in shared memory)."""


def kernel_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps behind the bias that comes first, which kernels add by themselves."""
    return steps[1:] if steps[:1] == ("bias",) else steps


def launches(work: NormMatmul | GatedFFN) -> list[list[int]]:
    """Return the numbers of the projections of each launch.

    Up to `MOST_TOGETHER` share one, in order.  Their weights lie alike; if pairs of features of
    some are turned that are no neighbours, the others consist of such pairs too, with no more
    behind them than a bias.
    """
    if isinstance(work, GatedFFN):
        return [[0]]
    found: list[list[int]] = []
    for index, projection in enumerate(work.outputs):
        last = [work.outputs[i] for i in found[-1]] if found else []
        if 0 < len(last) < MOST_TOGETHER and _fit_together([*last, projection]):
            found[-1].append(index)
        else:
            found.append([index])
    return found


def _fit_together(projections: Sequence[Projection]) -> bool:
    """Tell whether one kernel can compute projections."""
    if len({(p.layout, p.packed) for p in projections}) > 1:
        return False
    apart = {p.rope.distance for p in projections if p.rope is not None}
    if not apart or apart == {1}:
        return True
    even = all(p.columns % (2 * max(apart)) == 0 for p in projections)
    return len(apart) == 1 and even and all(set(p.epilogue) <= {"bias"} for p in projections)


def norm_inside(work: NormMatmul | GatedFFN, plan: TilePlan) -> bool:
    """Tell whether the matmul's own kernel normalises: where it can, and nothing else wants it.

    A row that is read at once is stored as well.
    """
    norm = work.norm
    if norm is None or norm.residual or norm.returns_sum or norm.each:
        return False
    if norm.returns_norm:
        return plan.family in DOTS and norm.kind == "rms" and work.k <= plan.block_k
    if plan.family in DOTS:
        return True
    few = plan.block_m <= NORM_INSIDE_ROWS and plan.block_k == NORM_INSIDE_K
    return plan.family == "pointer" and norm.kind == "rms" and few


def triton_plan(
    family: str, block: tuple[int, int, int], warps: int, stages: int, split: int = 1
) -> TilePlan:
    """Return a plan of the Triton back end; `block` is ``(block_m, block_n, block_k)``."""
    return TilePlan(*block, split_k=split, num_stages=stages, num_warps=warps, family=family)


def smem_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the shared memory of one thread block: the stages of both operands, and the rest."""
    if plan.family in DOTS:
        return 0
    step = (plan.block_m + shape.parts * plan.block_n) * plan.block_k * shape.in_bytes
    return step * plan.num_stages + SMEM_RESERVE_BYTES


def accumulators(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the float32 accumulators of one thread."""
    return ceil_div(plan.block_m * plan.block_n * shape.parts, 32 * max(plan.num_warps, 1))


def tile_of(plan: TilePlan, problem: MatmulProblem) -> Tile:
    """Return what a plan asks for."""
    shape, dev, inside = problem.columns, problem.dev, norm_inside(problem.work, plan)
    if plan.family in DOTS:
        return _dots(plan, shape, dev, inside)
    columns, steps = plan.block_n * shape.parts, plan.block_k * plan.split_k
    rows, slices = plan.block_m / 64, plan.block_k * shape.in_bytes / 32
    weight_bytes = columns * plan.block_k * shape.in_bytes
    flops = 2.0 * plan.block_m * columns * plan.block_k
    return Tile(
        rows=plan.block_m,
        columns=plan.block_n,
        blocks=plan.split_k,
        residents=_residents(plan, shape, dev),
        multiprocessors=dev.sm_count,
        depth=steps,
        ahead=plan.num_stages,
        tensor_s=flops * dev.sm_count / dev.tensor_flops_per_s(shape.dtype),
        clocks=max(1.0, rows) * slices * group_clocks(columns),
        weight_bytes=weight_bytes,
        row_bytes=plan.block_k * shape.in_bytes,
        asked_bytes=weight_bytes,
        sums=plan.block_m * columns,
        elements=plan.block_m * plan.block_n,
        meetings=plan.split_k > 1,
        in_front=shape.has_norm and not inside,
        store_s=NORM_INSIDE_S * inside,
        row_s=MERGED_S_PER_ROW * (plan.split_k > 1),
    )


def _dots(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec, inside: bool) -> Tile:
    """Return what dot products of a row ask for, which may normalise inside."""
    parts = ceil_div(shape.k, plan.block_k)
    idle = parts * plan.block_k / shape.k - 1
    products = shape.k * plan.block_n * shape.parts / (dev.warp_size * plan.num_warps)
    issued = 0.0
    if shape.packed is not None:
        of_row = (OF_ROW + NORMALISING * inside) / (plan.block_n * shape.parts)
        further = FURTHER * (plan.block_m - 1)
        products *= (1 + idle) * (UNPACKING + further + plan.block_m * of_row)
        issued = products * plan.num_warps / ISSUE_PER_CLOCK
    waited = products + MEETING * log2(plan.num_warps)
    if inside:
        waited += NORM_WAIT + (LAYER_WAIT * parts if shape.norm == "layer" else 0)
    return Tile(
        rows=plan.block_m,
        columns=plan.block_n,
        blocks=1,
        residents=_residents(plan, shape, dev),
        multiprocessors=dev.sm_count,
        depth=plan.block_k,
        clocks=issued / parts,
        instructions=waited / parts,
        in_front=shape.has_norm and not inside,
        rereads=1.0,
        reopened=REOPENED * log2(parts) + IDLE_LANES * (idle if parts > 1 else 0.0),
    )


def at_once(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> bool:
    """Tell whether all programs of dot products run at the same time, each with its whole k."""
    threads = dev.warp_size * plan.num_warps
    held = plan.block_k * plan.block_n * shape.parts * shape.in_bytes // (4 * threads)
    slots = resident_blocks(Footprint(0, held + COMPILED_REGISTERS, threads), dev)
    programs = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
    return plan.block_k >= shape.k and programs <= slots * dev.sm_count


def dots_held(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the registers of a thread for what dot products hold at once.

    Those are weights; or words, for each eight of their numbers a scale and sums, and rows.
    """
    threads, columns = 32 * max(plan.num_warps, 1), plan.block_n * shape.parts
    if shape.packed is None:
        return min(shape.k, plan.block_k) * columns // threads
    each = plan.block_k / threads
    of_column = each * shape.packed.bits / 32 + each / 8 * (1 + plan.block_m)
    return round(of_column * columns + plan.block_m * each)


def _residents(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    threads = dev.warp_size * plan.num_warps
    registers = accumulators(plan, shape) + ACCUMULATOR_OVERHEAD
    if plan.family in DOTS:
        registers = dots_held(plan, shape) + (DOTS_REGISTERS if shape.packed is None else 0)
    foot = Footprint(smem_bytes(plan, shape), registers, threads)
    return resident_blocks(foot, dev, SYSTEM_SMEM_BYTES)
