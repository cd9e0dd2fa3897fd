"""Register tiles of a CPU, which read weights as they lie, or panels that are packed first.

As they lie: a task has ``block_n`` columns of all rows.  Packed (the kernel "panels"): a task packs
``reg_n`` columns, all of k, and takes them through the rows in register tiles of ``reg_m x reg_n``
results, so that block and tile are one.  Sums over ``block_k`` elements are added up at the end:
rounding errors grow with the length of a sum.  Where a CPU adds up products of neighbours by an
instruction (the kernels of `cpu_dots`), rows and panels hold words of these.  Where there are fewer
panels than tasks are wanted, the tiles are cut into ``split_m`` parts, each with its own copy of
the panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from ...hardware import DeviceSpec
from ...validation import Count
from ...workload import INTEGER_DTYPES
from .. import cpu_cost
from ..family import Offer
from ..limits import core_limits, one_stage
from ..prediction import Footprint, Formula, Prediction, ceil_div, power_dividing
from ..shape import MatmulShape, Size, rows_at
from ..tile_plan import TilePlan
from . import cpu_dots
from .matmuls import MAX_PADDING, CpuMatmul, MatmulProblem

FAMILY, PANELS = "cpu_tiles", "panels"
FAMILIES = FAMILY, PANELS, *cpu_dots.COUNTS
"""The names of the kernels: weights as they lie, packed, and packed by words of neighbours."""

REG_M = (1, 2, 4, 8)
REG_N = (1, 2, 3, 4, 6, 8)
BLOCK_ROWS = (1, 2, 4)
TASKS_PER_CORE = (1, 2, 4, 8, 16)
"""Rows and columns of a register tile, tiles of rows of a block, and tasks of a core that are tried
where weights are read as they lie."""

OPERAND_REGISTERS = 2
"""A tile has 2 vector registers besides accumulators and row operands: a weight and a spare."""

PANEL_VECTORS = (1, 2, 3, 4)
"""A row of a register tile that reads a panel is so many vectors wide."""

PANEL_ROWS = 16
"""A register tile that reads a panel has 16 rows at most."""

PANEL_TASKS_PER_CORE = 4
"""Four tasks of packed columns keep a core about equally busy: with one more than a multiple of the
cores, a fifth of the time is lost at most."""

MAX_SUM = 256
"""At most 256 elements are added up in one go, where k has such a divisor.  With all of k = 768,
results erred by three times as much as MKL's."""

MIN_SUM = 64
"""At least 64 elements are added up in one go: with fewer, storing the sums would cost more than a
tenth of making them."""

STORE_CYCLES_PER_VECTOR = 4
"""An accumulator takes 4 cycles for each part of k: set to zero, stored, and read to be added up.
Counted."""

COPY_CYCLES_PER_VECTOR = 2
"""A packed vector takes 2 cycles to be loaded, converted and stored.  Counted; transposing adds a
shuffle for each halving of the lanes.  Measured on Zen 4 for 16 lanes: 9 with the time that the
weight takes from the third-level cache, where this and `DeviceSpec.l3_cycles_per_byte` give 8.7."""

COPY_CYCLES_PER_ELEMENT = 1
"""An element of x takes a cycle to be copied into its tile.  Counted for squares of 4: 8 shuffles,
4 loads and 4 stores for 16 elements, at one a cycle."""


@dataclass(frozen=True)
class CpuPlan(TilePlan):
    """Tile sizes of a kernel of a CPU."""

    split_m: Count = 1
    """Parts that the rows are cut into, however many they are, where weights are packed."""

    @property
    def packed(self) -> bool:
        """Whether tasks pack the weights that they read."""
        return self.family in (PANELS, *cpu_dots.COUNTS)

    @property
    def steps(self) -> int:
        """Elements of a part of a sum, or words of them."""
        return self.block_k // cpu_dots.COUNTS.get(self.family, 1)


class CpuTiles(CpuMatmul):
    """Norm, matmul or gated projections: a task has some columns, and goes through the rows."""

    names = FAMILIES
    plan = CpuPlan

    def refuses(self, problem: MatmulProblem) -> str | None:
        """Refuse integers that no instruction adds up."""
        return cpu_dots.refuses_sums(problem.work, problem.dev)

    def plans(self, problem: MatmulProblem) -> Iterator[Offer]:
        """Yield tiles of weights as they lie, then of packed ones."""
        shape, dev = problem.shape, problem.dev
        exact = shape.dtype in INTEGER_DTYPES
        if not exact:
            yield from map(Offer, _as_they_lie(shape, dev))
            yield from map(Offer, _packed(shape, dev))
        if cpu_dots.why_no_rounding(problem.work, dev) is None:
            for plan in _packed(shape, dev):
                if plan.reg_m * plan.reg_n * shape.parts <= cpu_dots.ROUNDED_SUMS * plan.lanes:
                    yield Offer(replace(plan, block_k=shape.k, family=cpu_dots.ROUNDED))
        fit = (
            f
            for f in cpu_dots.dot_families(shape.dtype, dev)
            if cpu_dots.why_no_dots(f, shape, dev) is None
        )
        for family in islice(fit, 1):
            depth = shape.k if exact else sum_length(shape.k, cpu_dots.COUNTS[family])
            for plan in _packed(shape, dev):
                yield Offer(replace(plan, block_k=depth, family=family))

    def violations(self, plan: TilePlan, problem: MatmulProblem) -> Iterator[str]:
        """Yield what a core has not, and what vectors and panels do not divide."""
        own, shape, dev = CpuPlan.of(plan), problem.shape, problem.dev
        if shape.dtype in INTEGER_DTYPES and plan.family not in cpu_dots.COUNTS:
            yield f"dtype is {shape.dtype}, family {plan.family!r} adds up float32"
        if own.packed:
            yield from _panel_violations(own)
            count = cpu_dots.COUNTS.get(plan.family, 1)
            if plan.family == cpu_dots.ROUNDED:
                why = cpu_dots.why_no_rounding(problem.work, dev)
            else:
                why = cpu_dots.why_no_dots(plan.family, shape, dev) if count > 1 else None
            if why is not None:
                yield why
            elif plan.block_k % count:
                yield f"block_k is {plan.block_k}, family {plan.family!r} has words of {count}"
        else:
            yield from one_stage(plan)
            if own.split_m != 1:
                yield f"split_m is {own.split_m}, family {FAMILY!r} has 1"
        if plan.block_k > shape.k:
            yield f"block_k is {plan.block_k}, the reduction has {shape.k} elements"
        yield from core_limits(_footprint(own, shape), plan, dev)
        if shape.k % plan.block_k:
            yield f"block_k is {plan.block_k}, does not divide k={shape.k}"
        if "nk" in shape.layouts and plan.block_k % plan.lanes and not own.packed:
            yield f"lanes is {plan.lanes}, does not divide block_k={plan.block_k}"
        if (own.packed or "kn" in shape.layouts) and plan.reg_n % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n}"

    def price(self, plan: TilePlan, problem: MatmulProblem) -> Formula:
        """Price rows padded to whole tiles, by models that were fitted on CPUs."""
        own, shape, dev = CpuPlan.of(plan), problem.shape, problem.dev
        price = _with_panels if own.packed else _without_panels
        return Formula(_footprint(own, shape), partial(price, own, shape, dev))


def _as_they_lie(shape: MatmulShape, dev: DeviceSpec) -> Iterator[CpuPlan]:
    """Yield the register tiles that fit the registers, in blocks that fit the caches."""
    for lanes in _lanes(shape, dev):
        for reg_m, reg_n in _tiles(shape, dev, lanes):
            for block_m in (reg_m * r for r in BLOCK_ROWS):
                # Rows in half of L2: the other half is for the weights that stream by.
                if block_m > reg_m and block_m * shape.k * 4 > dev.l2_bytes // 2:
                    break
                for block_n in column_blocks(shape, dev, reg_n):
                    tile = block_m, block_n, shape.k
                    yield CpuPlan(*tile, reg_m=reg_m, reg_n=reg_n, lanes=lanes, family=FAMILY)


def _packed(shape: MatmulShape, dev: DeviceSpec) -> Iterator[CpuPlan]:
    """Yield the tall half of the register tiles of each width of a panel."""
    lanes = dev.vector_bytes // 4
    widths = [lanes * vectors for vectors in PANEL_VECTORS]
    exact = [w for w in widths if all(n % w == 0 for n in shape.n_parts)]
    little = [w for w in widths if _columns(shape, w) <= shape.n * (1 + MAX_PADDING)]
    block_k = sum_length(shape.k)
    for width in exact or little or widths[:1]:
        vectors = width // lanes * shape.parts
        highest = min(PANEL_ROWS, (dev.vector_registers - vectors - 1) // vectors)
        parts = _row_parts(_columns(shape, width) // width, dev)
        for reg_m in range(max(1, highest // 2), highest + 1):
            for split_m in parts:
                yield CpuPlan(
                    *(reg_m, width, block_k),
                    reg_m=reg_m,
                    reg_n=width,
                    lanes=lanes,
                    family=PANELS,
                    split_m=split_m,
                )


def _panel_violations(plan: CpuPlan) -> Iterator[str]:
    """Check that block and tile are one, and that k is not split."""
    for block, reg in (("block_m", "reg_m"), ("block_n", "reg_n")):
        if getattr(plan, block) != getattr(plan, reg):
            yield f"{block} is {getattr(plan, block)}, family {plan.family!r} has {reg} of them"
    if plan.split_k != 1 or plan.num_stages != 1:
        yield f"split_k and num_stages are 1 in family {plan.family!r}"


def _footprint(plan: CpuPlan, shape: MatmulShape) -> Footprint:
    """Return the accumulators, and the rows and columns that a task goes over as they lie."""
    if plan.packed:  # accumulators, weights, and an element of x
        vectors = ceil_div(plan.reg_n, plan.lanes) * shape.parts
        return Footprint(0, plan.reg_m * vectors + vectors + 1, 1)
    tile = plan.reg_m * plan.reg_n * shape.parts
    vectors, stack = 0, 0
    if "nk" in shape.layouts:  # one vector along k per accumulator
        vectors, stack = tile, tile * plan.lanes * 4
    if "kn" in shape.layouts:  # one vector holds `lanes` columns
        vectors = max(vectors, -(-tile // plan.lanes))
        stack = max(stack, tile * 4)
    step = plan.block_m * 4 + plan.reg_n * shape.parts * shape.in_bytes
    return Footprint(
        smem_bytes=0,
        registers_per_thread=vectors + plan.reg_m + OPERAND_REGISTERS,
        threads=1,
        stack_bytes=stack,
        scratch_bytes=plan.block_k * step,
    )


def _without_panels(plan: CpuPlan, shape: MatmulShape, dev: DeviceSpec, size: Size) -> Prediction:
    return cpu_cost.matmul_on_cpu(shape, plan, dev, rows_at(size))


def _with_panels(plan: CpuPlan, shape: MatmulShape, dev: DeviceSpec, size: Size) -> Prediction:
    """Price packing and multiplying."""
    rows = rows_at(size)
    tiles = ceil_div(rows, plan.reg_m)
    tasks = sum(ceil_div(n, plan.reg_n) for n in shape.n_parts) * plan.split_m
    vectors = plan.reg_n // plan.lanes * shape.parts
    tile = _steps(shape, plan) * _panel_step(shape, plan, dev, vectors)
    sums = plan.reg_m * vectors * STORE_CYCLES_PER_VECTOR + cpu_cost.TILE_CYCLES
    tile += shape.k // plan.block_k * sums
    if plan.family == cpu_dots.ROUNDED and shape.packed is not None:
        groups = shape.k // shape.packed.group
        tile += groups * plan.reg_m * vectors * cpu_dots.GROUP_CYCLES_PER_VECTOR / dev.fma_per_cycle
    task = _pack_cycles(shape, plan, dev, vectors) + ceil_div(tiles, plan.split_m) * tile
    elements = plan.reg_m * _steps(shape, plan)
    copying = ceil_div(tiles, dev.sm_count) * elements * COPY_CYCLES_PER_ELEMENT
    return cpu_cost.whole_matmul(shape, dev, rows, cpu_cost.Tasks(tasks, task, plan.lanes, copying))


def _steps(shape: MatmulShape, plan: CpuPlan) -> int:
    """Return the elements along k that are multiplied one after another, or the pairs of them."""
    return shape.k // plan.block_k * plan.steps


def _lanes(shape: MatmulShape, dev: DeviceSpec) -> list[int]:
    """Return the widest vector that the layouts allow, and the widest that needs no tail."""
    most = dev.vector_bytes // 4
    if "nk" in shape.layouts:
        return [power_dividing(shape.k, most)]
    exact = min(power_dividing(n, most) for n in shape.contiguous)
    # A vector that goes over the end of half a head would be a gather.
    return sorted({exact, most} if shape.contiguous == shape.n_parts else {exact})


def _tiles(shape: MatmulShape, dev: DeviceSpec, lanes: int) -> Iterator[tuple[int, int]]:
    """Yield the register tiles whose accumulators and operands the registers can hold."""
    unit = lanes if "kn" in shape.layouts else 1
    columns = [unit * r for r in REG_N]
    exact = [c for c in columns if all(n % c == 0 for n in shape.n_parts)]
    vectors_per_column = shape.parts / (lanes if shape.layouts == {"kn"} else 1)
    for reg_m in REG_M:
        free = dev.vector_registers - reg_m - OPERAND_REGISTERS
        for reg_n in exact or columns:
            if reg_m * reg_n * vectors_per_column <= free:
                yield reg_m, reg_n


def column_blocks(shape: MatmulShape, dev: DeviceSpec, reg_n: int) -> list[int]:
    """Return column counts that make some tasks per core, dividing n where a divisor is near."""
    found = set()
    whole, rest = divmod(min(shape.n_parts), reg_n)
    for per_core in TASKS_PER_CORE:
        tiles = max(1, shape.n // (dev.sm_count * per_core) // reg_n)
        # About as many as there are tasks; the tiles of one may be millions.
        blocks = range(-(-whole // tiles), whole // max(tiles // 2, 1) + 1) if not rest else ()
        exact = next((whole // b for b in blocks if whole % b == 0), tiles)
        found.add(exact * reg_n)
    return sorted(found)


def sum_length(k: int, unit: int = 1) -> int:
    """Return the greatest divisor of k that is not too long, or k where that is too short.

    It is made of whole units, as k is.
    """
    found = next(d for d in range(min(k, MAX_SUM), 0, -1) if k % d == 0 and d % unit == 0)
    return found if found >= min(k, MIN_SUM) else k


def _columns(shape: MatmulShape, width: int) -> int:
    """Return the columns of all panels."""
    return sum(ceil_div(n, width) * width for n in shape.n_parts)


def _row_parts(panels: int, dev: DeviceSpec) -> list[int]:
    """Return in how many parts to cut the rows: 1, and what makes enough tasks."""
    wanted = ceil_div(PANEL_TASKS_PER_CORE * dev.sm_count, panels)
    return [1] if wanted <= 1 else [1, wanted]


def _panel_step(shape: MatmulShape, plan: CpuPlan, dev: DeviceSpec, vectors: int) -> float:
    """Return the cycles of one element of k; prefetchers load while the core computes."""
    streamed = (plan.reg_m + vectors * plan.lanes) * 4
    panel, tile = (4 * _steps(shape, plan) * each for each in (vectors * plan.lanes, plan.reg_m))
    fits = panel + tile <= dev.l2_bytes
    each = cpu_cost.l2_cycles_per_byte(dev) if fits else dev.l3_cycles_per_byte
    return cpu_cost.vectors_step(plan.reg_m, vectors, streamed * each, dev)


def _pack_cycles(shape: MatmulShape, plan: CpuPlan, dev: DeviceSpec, vectors: int) -> float:
    """Return the cycles in which a task packs its panel, which streams by once."""
    shuffles = math.log2(plan.lanes) if "nk" in shape.layouts else 0
    read = plan.reg_n * shape.parts * shape.in_bytes * dev.l3_cycles_per_byte
    if shape.unpacked_bytes:  # of shuffled words there are few; elements are unpacked and scaled
        part = shape.weight_bytes / shape.unpacked_bytes
        shuffles, read = shuffles * part + cpu_cost.UNPACK_CYCLES + 1, read * part
    copied = vectors * (COPY_CYCLES_PER_VECTOR + shuffles)
    return _steps(shape, plan) * copied + shape.k * read
