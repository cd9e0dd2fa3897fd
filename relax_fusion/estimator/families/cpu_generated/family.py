"""The family "cpu_generated": one parallel loop for any chain, from its block graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from math import prod
from typing import Any, Literal, TypeAlias

from ....errors import TilePlanError, TilingError
from ....hardware import DeviceSpec
from ....tiling import Schedule
from ....workload import Chain
from ....workload.graph import Graph
from ....workload.roofline import distinct_bytes
from ...family import OWN_BASELINE_ERROR, KernelFamily, Offer
from ...limits import core_limits, one_stage
from ...prediction import Footprint, Formula, Prediction
from ...ranges import ranges
from ...shape import Problem, Size, sizes_of
from ...tile_plan import TilePlan
from ..generated.plan import TilingPlan, loop_sizes, scheduled, space_of
from ..generated.space import result_loops, structures
from .price import ChainPrice, Registers, other_dtypes, sides_of

FAMILY = "cpu_generated"
"""The name of the family of generated chains on CPUs."""

ROWS = (16, 32, 64, 128, 256)
"""Tiles of the rows of the result."""

FEW_ROWS = 8
"""A tile of them as well, where a block need not copy weights."""

TILES = (64, 128, 256)
"""Tiles of the other loops, beside all of a loop."""

MOST_WHOLE = 1024
"""Elements of a loop that is one tile."""

ORDERS = 3
"""Orders of the loops that are tried with all tiles, of those with the same loops of one tile: the
cheapest by tiles of `USUAL` elements."""

USUAL = 128

Loops: TypeAlias = Literal["blocks", "rows"]

OFFERED = 2
"""Plans of each size that others are compared with."""


@dataclass(frozen=True)
class CpuChainPlan(TilingPlan):
    """A plan of a kernel of a CPU."""

    loops: Loops = "blocks"
    """With "blocks", each packs what it multiplies by; with "rows", weights are packed in loops in
    front, and a block makes whole rows of the result."""


class CpuGenerated(KernelFamily[Chain]):
    """The chain engine on a CPU: a block does all of the chain for its tile of the result."""

    names = (FAMILY,)
    plan = CpuChainPlan
    emitter = "relax_fusion.dlight_rules.cpu.generated:emit"
    error = OWN_BASELINE_ERROR

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all."""
        return problem.is_plain("cpu", Chain)

    def refuses(self, problem: Problem[Chain]) -> str | None:
        """Refuse what is not float32, and products that have no register tiles."""
        graph = problem.work.graph
        try:
            space = space_of(graph)
        except TilingError as err:
            return str(err)
        other = other_dtypes(graph)
        if other:
            return other
        if not space.ordered:
            return "no loop of the chain has more than one element"
        for step in space.steps:
            if step.dtype and sides_of(graph, space, step) is None:
                return f"{step.out} has no register tiles: it is masked, or no rows by columns"
        return None

    def plans(self, problem: Problem[Chain]) -> Iterator[Offer]:
        """Yield the cheapest plans of each size that is priced."""
        work, dev = problem.work, problem.dev
        found = (size for r in ranges(work, self.breaks) for _, each in r.cells for size in each)
        every = (_cheapest(work.graph, dev, tuple(sizes_of(work, s).items())) for s in found)
        yield from map(Offer, dict.fromkeys(plan for plans in every for plan in plans))

    def violations(self, plan: TilePlan, problem: Problem[Chain]) -> Iterator[str]:
        """Yield why a plan is none for the graph, or needs more than a core has."""
        assert isinstance(plan, CpuChainPlan)
        work, dev = problem.work, problem.dev
        yield from one_stage(plan)
        try:
            schedule = schedule_of(work.graph, plan)
        except (TilingError, TilePlanError) as err:
            yield str(err)
            return
        if schedule.structure.kept:
            names = ", ".join(name for name, _ in schedule.structure.kept)
            yield f"expression is {plan.expression}, which keeps tiles of {names} for a whole loop"
        foot = _footprint(plan, work.graph, dev)
        if foot.scratch_bytes > dev.l2_bytes // 2:
            yield (
                f"needs {foot.scratch_bytes} B of cache for tiles, half of what a core of the "
                f"{dev.label} has is {dev.l2_bytes // 2} B"
            )
        yield from core_limits(foot, plan, dev)

    def price(self, plan: TilePlan, problem: Problem[Chain]) -> Formula:
        """Price the blocks of a plan."""
        assert isinstance(plan, CpuChainPlan)
        work, dev = problem.work, problem.dev
        foot = _footprint(plan, work.graph, dev)
        return Formula(foot, partial(_at, plan, problem))


def _at(plan: CpuChainPlan, problem: Problem[Chain], size: Size) -> Prediction:
    sizes = tuple(sizes_of(problem.work, size).items())
    return _predict(problem.work.graph, plan, problem.dev, sizes)


def _footprint(plan: CpuChainPlan, graph: Graph, dev: DeviceSpec) -> Footprint:
    """Return the register tile, and the tiles of a block."""
    registers = Registers.of(dev)
    sums = registers.rows * registers.columns
    vectors = registers.columns // registers.lanes
    scratch = _price(graph, plan, dev).scratch_bytes
    needed = sums // registers.lanes + vectors + 1
    return Footprint(0, needed, 1, 4 * sums, scratch)


def schedule_of(graph: Graph, plan: CpuChainPlan) -> Schedule:
    """Return the schedule of a plan; raise `TilingError` if the plan is none for the graph."""
    return scheduled(graph, plan.expression, plan.tile, _inside(graph, plan.loops))


def _inside(graph: Graph, loops: str) -> frozenset[str]:
    """Return the loops of the result that are no axes of the grid."""
    rows, *_, columns = result_loops(graph)
    return frozenset({columns} - {rows}) if loops == "rows" else frozenset()


@lru_cache(maxsize=4096)
def _price(graph: Graph, plan: CpuChainPlan, dev: DeviceSpec) -> ChainPrice:
    return ChainPrice(graph, schedule_of(graph, plan), dev, plan.loops == "rows")


def _predict(
    graph: Graph, plan: CpuChainPlan, dev: DeviceSpec, sizes: tuple[tuple[str, int], ...]
) -> Prediction:
    distinct, flops = _work(graph, sizes)
    return _price(graph, plan, dev).at(loop_sizes(graph, sizes), distinct, flops)


@lru_cache(maxsize=1024)
def _work(graph: Graph, sizes: tuple[tuple[str, int], ...]) -> tuple[float, float]:
    """Return the bytes of the operands, and the operations of the products."""
    count, space = loop_sizes(graph, sizes), space_of(graph)
    flops = sum(2.0 * prod(count[n] for n in step.loops) for step in space.steps if step.dtype)
    return float(sum(distinct_bytes(graph, dict(sizes)).values())), flops


@lru_cache(maxsize=256)
def _cheapest(
    graph: Graph, dev: DeviceSpec, sizes: tuple[tuple[str, int], ...]
) -> tuple[CpuChainPlan, ...]:
    """Return the cheapest plans at a size that fit."""

    def seconds(plan: CpuChainPlan) -> float:
        return _predict(graph, plan, dev, sizes).seconds

    found: list[CpuChainPlan] = []
    shared = _inside(graph, "rows") <= space_of(graph).common  # all statements are in that loop
    tilings: tuple[Loops, ...] = ("blocks",) if shared else ("blocks", "rows")
    for loops in tilings:
        for single, known in structures(graph, MOST_WHOLE, _inside(graph, loops)).items():
            rows = (FEW_ROWS, *ROWS) if loops == "rows" else ROWS
            every = list(_tilings(graph, single, rows))
            if not every:
                continue
            usual = min(every, key=lambda tile: sum(abs(t - USUAL) for t in tile.values()))
            plans = [_plan(graph, e, usual, dev, loops) for e in known.values()]
            orders = [plan.expression for plan in sorted(plans, key=seconds)[:ORDERS]]
            found += (_plan(graph, e, tile, dev, loops) for e in orders for tile in every)
    fitting = (p for p in found if _price(graph, p, dev).scratch_bytes <= dev.l2_bytes // 2)
    return tuple(sorted(fitting, key=seconds)[:OFFERED])


def _tilings(
    graph: Graph, single: frozenset[str], of_rows: tuple[int, ...]
) -> Iterator[Mapping[str, int]]:
    """Yield tiles, where some loops are one tile and the others are not."""
    space, rows = space_of(graph), result_loops(graph)[0]
    choices = []
    for loop in space.loops:
        several = [t for t in (of_rows if loop.name == rows else TILES) if t < loop.size]
        one = loop.batch or loop.size == 1
        choices.append([1] if one else [loop.size] if loop.name in single else several)
    for tiles in product(*choices):
        yield dict(zip((a.name for a in space.loops), tiles, strict=True))


def _plan(
    graph: Graph, expression: str, tile: Mapping[str, int], dev: DeviceSpec, loops: Loops
) -> CpuChainPlan:
    rows, *_, columns = (tile[n] for n in result_loops(graph))
    return CpuChainPlan(
        *(rows, columns, max(tile.values())),
        lanes=Registers.of(dev).lanes,
        family=FAMILY,
        expression=expression,
        tiles=" ".join(f"{name}={t}" for name, t in tile.items()),
        loops=loops,
    )
