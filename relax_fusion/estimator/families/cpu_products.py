"""Chains of few rows on a CPU: each product in a parallel loop of its own, over its columns.

With few rows, blocks of rows do not keep the cores busy, and copying weights takes longer than
multiplying by them: a task has ``block_n`` columns of ``block_m`` rows, and reads weights as they
lie.  Rows are those of a register tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

from ...errors import TilingError
from ...hardware import DeviceSpec
from ...tiling import Schedule, product_parts
from ...tiling.space import Step
from ...workload import Chain, NormMatmul, Projection
from ...workload.graph import Graph
from ..cpu_cost import SLOT_CYCLES, matmul_on_cpu
from ..family import Breaks, KernelFamily, Offer
from ..limits import core_limits, one_stage
from ..prediction import Footprint, Formula, Prediction, ceil_div, in_a_row, power_dividing
from ..shape import Problem, Size, matmul_shape, sizes_of
from ..tile_plan import TilePlan
from .cpu_generated.price import DOT_COLUMNS, VECTORS, Registers, other_dtypes, sides_of
from .generated.plan import loop_sizes, scheduled, space_of

FAMILY = "cpu_products"
"""The name of the family of loops for each product of a chain on CPUs."""

ROWS, TASK_TILES = (1, 2, 4, 8), (1, 2, 4, 8)
"""Rows of a register tile, and such tiles of a task."""

FEW_ROWS = 16
"""Rows up to which a chain of a static size has such plans."""


class Product(NamedTuple):
    """A part of a chain: a product, with the maps behind it."""

    graph: Graph
    """What is computed."""
    step: Step
    row: str
    column: str
    """The loops of its register tiles."""
    along: str
    """The loop along which its weight lies: the column, or one of the sum."""

    @property
    def dots(self) -> bool:
        """Whether results are dot products of rows and columns that both lie side by side."""
        return self.along != self.column

    @property
    def size(self) -> dict[str, int]:
        """Elements of each loop; many of a dynamic one."""
        return {loop.name: loop.size for loop in space_of(self.graph).loops}

    def schedule(self, plan: TilePlan) -> Schedule:
        """Return the loop over tiles of rows and columns, each with all of the sum."""
        tile = {**self.size, self.row: plan.block_m}
        tile[self.column] = min(plan.block_n, self.size[self.column])
        return scheduled(self.graph, ".".join(space_of(self.graph).ordered), tile)


@lru_cache(maxsize=256)
def products_of(graph: Graph) -> tuple[Product, ...]:
    """Return the products of a chain, in order.

    Raises `TilingError` if it has other reductions, or a product that is none of rows by a weight.
    """
    return tuple(map(_product, product_parts(graph)))


def _product(part: Graph) -> Product:
    space = space_of(part)
    step, *more = (step for step in space.steps if step.reduced)
    sides = None if more or len(space.results) > 1 else sides_of(part, space, step)
    if sides is None or any(loop.batch for loop in space.loops):
        names = ", ".join(s.out for s in (step, *more))
        raise TilingError(f"{names}: must be one product, of rows by a weight, and maps of it")
    row, column = sides
    weight = next(read for read in step.reads if column in read.loops)
    along = weight.loops[-1]
    if weight.at[-1].terms != ((along, 1),):
        raise TilingError(f"{weight} has no neighbours along a loop")
    return Product(part, step, row, column, along)


def registers_of(plan: TilePlan) -> Registers:
    """Return the register tiles of a plan."""
    return Registers(plan.reg_m, VECTORS * plan.lanes, plan.lanes)


class CpuProducts(KernelFamily[Chain]):
    """Each product of a chain in a loop of its own, for few rows."""

    names = (FAMILY,)
    emitter = "relax_fusion.dlight_rules.cpu.generated:emit_products"
    error = 1.0
    breaks = Breaks((1, 4, 8, 16, 64, 256))

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all."""
        return problem.is_plain("cpu", Chain)

    def refuses(self, problem: Problem[Chain]) -> str | None:
        """Refuse what is not float32, and chains of more than products and maps."""
        try:
            products_of(problem.work.graph)
        except TilingError as err:
            return str(err)
        return other_dtypes(problem.work.graph)

    def plans(self, problem: Problem[Chain]) -> Iterator[Offer]:
        """Yield register tiles of few rows, in tasks of several columns."""
        work, dev = problem.work, problem.dev
        if isinstance(work.rows, int) and work.rows > FEW_ROWS:
            return
        products = products_of(work.graph)
        lanes = min(power_dividing(p.size[p.along], dev.vector_bytes // 4) for p in products)
        unit = VECTORS * lanes if any(not p.dots for p in products) else DOT_COLUMNS
        depth = max(prod(p.size[n] for n in p.step.reduced) for p in products)
        for rows in ROWS:
            for tiles in TASK_TILES:
                tile = (rows, unit * tiles, depth)
                plan = TilePlan(*tile, reg_m=rows, reg_n=unit, lanes=lanes, family=FAMILY)
                yield Offer(plan)

    def violations(self, plan: TilePlan, problem: Problem[Chain]) -> Iterator[str]:
        """Yield what vectors and columns ask for, and what a core has not."""
        yield from one_stage(plan)
        if plan.block_m != plan.reg_m:
            yield f"block_m is {plan.block_m}, family {FAMILY!r} has reg_m of them"
        for each in products_of(problem.work.graph):
            length, columns = each.size[each.along], each.size[each.column]
            if length % plan.lanes:
                yield f"lanes is {plan.lanes}, does not divide {length}, along which a weight lies"
            some = min(plan.block_n, columns)
            if not each.dots and (columns % some or some % plan.lanes):
                yield f"block_n is {plan.block_n}, cuts {columns} columns into no whole vectors"
        yield from core_limits(_footprint(plan, problem.work), plan, problem.dev)

    def price(self, plan: TilePlan, problem: Problem[Chain]) -> Formula:
        """Price the loops one after the other, by the model of register tiles."""
        return Formula(_footprint(plan, problem.work), partial(_predict, plan, problem))


def _footprint(plan: TilePlan, work: Chain) -> Footprint:
    """Return the sums of a register tile, a row of weights, and an element of each row."""
    vectors = max(DOT_COLUMNS if p.dots else VECTORS for p in products_of(work.graph))
    sums = plan.reg_m * vectors
    return Footprint(0, sums + plan.reg_m + vectors, 1, 4 * sums * plan.lanes)


def _predict(plan: TilePlan, problem: Problem[Chain], size: Size) -> Prediction:
    """Return what the loops cost at a size."""
    dims = tuple(sizes_of(problem.work, size).items())
    each = products_of(problem.work.graph)
    return in_a_row([_loop(p, plan, problem.dev, loop_sizes(p.graph, dims)[p.row]) for p in each])


def _loop(product: Product, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    """Price a loop over the columns of a product, and its maps."""
    size = product.size | {product.row: rows}
    columns, depth = size[product.column], prod(size[n] for n in product.step.reduced)
    weight = Projection(columns, "nk" if product.dots else "kn", ())
    work = NormMatmul(rows, depth, (weight,), None, "float32", "float32")
    reg_n = DOT_COLUMNS if product.dots else VECTORS * plan.lanes
    some = ceil_div(min(plan.block_n, columns), reg_n) * reg_n
    found = matmul_on_cpu(
        matmul_shape(work), replace(plan, block_n=some, reg_n=reg_n, block_k=depth), dev, rows
    )
    maps = (step for step in space_of(product.graph).steps if not step.reduced)
    slots = sum(n * prod(size[loop] for loop in loops) for s in maps for loops, n in s.slots)
    vector = (
        plan.lanes if min(plan.block_n, columns) >= plan.lanes else 1
    )  # else element by element
    cycles = SLOT_CYCLES * slots / vector / dev.sm_count
    return replace(found, seconds=found.seconds + cycles / dev.clock_hz)
