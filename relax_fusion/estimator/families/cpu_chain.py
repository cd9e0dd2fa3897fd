"""Chains of two matmuls on a CPU, whose intermediate rows stay in its caches.

Family "panels": a task takes ``block_m`` rows through both matmuls, over weights that were packed
once, in register tiles of ``reg_m x reg_n`` results (fewer columns where the intermediate has
fewer); sums over ``block_k`` elements are added up at the end.  Family "", for few rows: both
matmuls one after the other, by tasks of ``block_n`` columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...hardware import DeviceSpec
from ...workload import MatmulChain, extent
from ..cpu_cost import (
    CROWDING,
    FMA_LATENCY_CYCLES,
    L1_STREAMS,
    L2_SPEED,
    L3_CYCLES_PER_BYTE,
    LOADS_PER_CYCLE,
    TILE_CYCLES,
    Traffic,
    activation_cycles,
    in_one_loop,
    matmul_on_cpu,
)
from ..family import KernelFamily
from ..limits import core_limits
from ..prediction import Prediction, ceil_div, in_a_row, power_dividing, repeated
from ..shape import PRICED_BATCH, Size, matmul_shape, rows_of
from ..steps import Footprint
from ..tile_plan import TilePlan
from .panels import (
    COPY_CYCLES_PER_VECTOR,
    MAX_PADDING,
    MAX_ROWS,
    STORE_CYCLES_PER_VECTOR,
    VECTORS,
    pack_cycles,
    sum_length,
)

IN_A_ROW, PANELS = "chain_in_a_row", "chain_panels"
"""The names of the two kernels of chains of matmuls on CPUs."""

TILES_OF_BLOCK = (1, 2, 4, 8, 16)
"""Register tiles that follow each other along the rows of a block."""

FEW_ROWS = 16
"""Rows of a block up to which weights may stay as they lie."""

REG_M, REG_COLUMNS, TASK_TILES = (1, 2, 4), (1, 2, 4), (1, 2, 4)
"""Rows and columns (of "kn": vectors) of a register tile, and tiles of a task, for few rows."""


class CpuChain(KernelFamily[MatmulChain]):
    """A task has some rows: in a row, or in blocks with packed weights."""

    names = (IN_A_ROW, PANELS)
    kind = "cpu"
    takes = (MatmulChain,)
    emitter = "relax_fusion.dlight_rules.cpu.matmul_chain:emit"
    error = 1.0

    def plans(self, work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield plans in a row, then in blocks."""
        yield from _in_a_row(work, dev)
        yield from _in_blocks(work, dev)

    def violations(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Iterator[str]:
        """Yield what tiles and caches ask for, and what a core has not."""
        if plan.split_k != 1 or plan.num_stages != 1:
            yield "split_k and num_stages are 1 in chains of matmuls"
        foot = self.footprint(plan, work, dev)
        if plan.family == PANELS:
            yield from _block_limits(plan, work, foot, dev)
        else:
            yield from _row_limits(plan, work)
        yield from core_limits(foot, plan, dev)

    def footprint(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Footprint:
        """Return accumulators, and the rows of the intermediate that a task holds.

        Beside the accumulators are weights, and an element of x, of which blocks hold the rows in
        float32.  In a row, "nk" has a vector along k for each accumulator.
        """
        if plan.family == PANELS:
            vectors = ceil_div(plan.reg_n, plan.lanes)
            width = panel_columns(plan, work, 0)
            kept = ceil_div(work.r, width) * width
            scratch = 4 * plan.block_m * (kept + (0 if work.dtype == "float32" else work.k))
            return Footprint(0, plan.reg_m * vectors + vectors + 1, 1, 0, scratch)
        tile = plan.reg_m * plan.reg_n
        vectors, stack = ceil_div(tile, plan.lanes), tile * 4
        if "nk" in work.layouts:
            vectors, stack = tile, tile * plan.lanes * 4
        return Footprint(0, vectors + plan.reg_m + 2, 1, stack)

    def predict(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec, size: Size) -> Prediction:
        """Price both matmuls in a row, or the rows that a task takes through both.

        By the model of register tiles, fitted on CPUs.
        """
        rows = rows_of(work, size)
        if plan.family == PANELS:
            return _blocks_on_cpu(work, plan, dev, rows)
        parts = [
            matmul_on_cpu(matmul_shape(part), replace(plan, block_k=part.k), dev, rows)
            for part in work.matmuls
        ]
        return in_a_row([repeated(p, _matrices(work), dev) for p in parts])


def panel_columns(plan: TilePlan, work: MatmulChain, which: int) -> int:
    """Return the columns of a register tile: for the intermediate, no more vectors than it has."""
    vectors = ceil_div((work.r, work.n)[which], plan.lanes)
    return min(plan.reg_n, vectors * plan.lanes)


def is_packed(work: MatmulChain, plan: TilePlan, which: int) -> bool:
    """Tell whether A (0) or B (1) is packed; rows of A may be as short as panels are."""
    lies_so = work.layouts[0] == "kn" and work.dtype == "float32"
    return which == 1 or not lies_so or work.r % panel_columns(plan, work, 0) > 0


def sum_parts(plan: TilePlan, depth: int) -> int:
    """Return into how many sums a reduction of `depth` elements is cut."""
    return depth // plan.block_k if depth % plan.block_k == 0 else 1


def _matrices(work: MatmulChain) -> int:
    """Return how many matrices a batch is priced at."""
    return 1 if work.batch is None else extent(work.batch, PRICED_BATCH)


def _in_a_row(work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
    rows, depths = work.rows, (work.k, work.r)
    if work.batch is not None or (isinstance(rows, int) and rows > FEW_ROWS):
        return
    along_k = [k for k, layout in zip(depths, work.layouts, strict=True) if layout == "nk"]
    across = [n for n, lay in zip((work.r, work.n), work.layouts, strict=True) if lay == "kn"]
    lanes = min(power_dividing(size, dev.vector_bytes // 4) for size in (*along_k, *across))
    for reg_m in REG_M:
        for columns in REG_COLUMNS:
            reg_n = columns * (lanes if across else 1)
            for tiles in TASK_TILES:
                yield TilePlan(
                    *(reg_m, reg_n * tiles, work.r),
                    reg_m=reg_m,
                    reg_n=reg_n,
                    lanes=lanes,
                    family=IN_A_ROW,
                )


def _in_blocks(work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
    lanes = dev.vector_bytes // 4
    widths = [lanes * vectors for vectors in VECTORS]
    little = [w for w in widths if ceil_div(work.n, w) * w <= work.n * (1 + MAX_PADDING)]
    for width in little or widths[:1]:
        vectors = width // lanes
        highest = min(MAX_ROWS, (dev.vector_registers - vectors - 1) // vectors)
        for reg_m in range(max(1, highest // 2), highest + 1):
            for tiles in TILES_OF_BLOCK:
                yield TilePlan(
                    *(reg_m * tiles, width, sum_length(work.k)),
                    reg_m=reg_m,
                    reg_n=width,
                    lanes=lanes,
                    family=PANELS,
                )


def _block_limits(
    plan: TilePlan, work: MatmulChain, foot: Footprint, dev: DeviceSpec
) -> Iterator[str]:
    if plan.block_n != plan.reg_n:
        yield f"block_n is {plan.block_n}, family {PANELS!r} has reg_n of them"
    if work.k % plan.block_k:
        yield f"block_k is {plan.block_k}, does not divide k={work.k}"
    if plan.reg_n % plan.lanes:
        yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n}"
    if foot.scratch_bytes > dev.l2_bytes // 2:
        yield (
            f"needs {foot.scratch_bytes} B of cache for rows of the intermediate, half of what a "
            f"core of the {dev.label} has is {dev.l2_bytes // 2} B"
        )


def _row_limits(plan: TilePlan, work: MatmulChain) -> Iterator[str]:
    if work.batch is not None:
        yield f"a batch of matrices needs family {PANELS!r}"
    for layout, k, n in zip(work.layouts, (work.k, work.r), (work.r, work.n), strict=True):
        if layout == "nk" and k % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide {k}, along which a weight lies"
        if layout == "kn" and (n % plan.lanes or plan.reg_n % plan.lanes):
            yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n} or {n} columns"


def _blocks_on_cpu(work: MatmulChain, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    """Price tasks that take a block of rows through both matmuls."""
    tiles = plan.block_m // plan.reg_m
    width = panel_columns(plan, work, 0)
    inner = tiles * ceil_div(work.r, width) * _tile(work.k, width, plan, dev)
    outer = tiles * ceil_div(work.n, plan.reg_n) * _tile(work.r, plan.reg_n, plan, dev)
    if work.dtype != "float32":
        inner += plan.block_m * work.k / plan.lanes * COPY_CYCLES_PER_VECTOR
    count = _matrices(work)
    tasks = count * ceil_div(rows, plan.block_m)
    cycles = ceil_div(tasks, dev.sm_count) * (inner + outer + _streamed(work, dev))
    packed = [which for which in range(2) if is_packed(work, plan, which)]
    cycles += sum(_pack(work, plan, which, dev) for which in packed)
    shapes = map(matmul_shape, work.matmuls)
    cycles += sum(activation_cycles(s, dev, (count * rows, tasks), plan.lanes) for s in shapes)
    moved = work.bytes(rows=rows, batch=count)
    traffic = Traffic(cycles, float(sum(moved.values())), 0.0, 1 + len(packed), tasks)
    return in_one_loop(traffic, dev, work.flops(rows=rows, batch=count), 2)


def _tile(depth: int, width: int, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return the cycles of one register tile, whose operands come from L2 unless they are small."""
    vectors = width // plan.lanes
    sums, loads = plan.reg_m * vectors, plan.reg_m + vectors
    walked = (plan.reg_m + width) * 4
    streamed = walked if walked * depth > dev.l1_bytes else 0
    crowding = max(1.0, (plan.reg_m + 1) / L1_STREAMS) ** CROWDING
    step = max(
        sums / dev.fma_per_cycle,
        loads / LOADS_PER_CYCLE,
        FMA_LATENCY_CYCLES,
        streamed * _l2_cycles_per_byte(dev) * crowding,
    )
    stored = sum_parts(plan, depth) * sums * STORE_CYCLES_PER_VECTOR
    return depth * step + stored + TILE_CYCLES


def _pack(work: MatmulChain, plan: TilePlan, which: int, dev: DeviceSpec) -> float:
    """Return the cycles in which the busiest core packs its part of a weight."""
    part, width = work.matmuls[which], panel_columns(plan, work, which)
    panel = replace(plan, block_n=width, reg_n=width)
    parts = sum_parts(plan, part.k)
    tasks = _matrices(work) * ceil_div(matmul_shape(part).n, width) * parts
    each = pack_cycles(matmul_shape(part), panel, width // plan.lanes) / parts
    return ceil_div(tasks, dev.sm_count) * each


def _streamed(work: MatmulChain, dev: DeviceSpec) -> float:
    """Return the cycles in which a task waits for the panels of B, once for each block of rows."""
    panels = work.r * work.n * 4
    fits = panels + work.k * work.r * 4 <= dev.l2_bytes
    return panels * (_l2_cycles_per_byte(dev) if fits else L3_CYCLES_PER_BYTE)


def _l2_cycles_per_byte(dev: DeviceSpec) -> float:
    return dev.sm_count * dev.clock_hz / (dev.l2_bytes_per_s * L2_SPEED)
