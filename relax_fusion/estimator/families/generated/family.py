"""The family "generated": a kernel of any chain, from its block graph and a tiling expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from ....errors import TilePlanError, TilingError
from ....tiling.structure import refuse_blocks
from ....workload import Chain
from ...family import Breaks, KernelFamily, Launches, Offer
from ...limits import block_limits
from ...prediction import HALF_DTYPES, Step
from ...ranges import ranges
from ...shape import Problem, Size, sizes_of
from ...tile_plan import TilePlan
from .memory import MOST_REGISTERS, footprint, narrow_behind, wanted_registers
from .plan import FAMILY, GeneratedPlan, launches, loop_sizes, space_of
from .price import step_of
from .space import BEAM, descended, plans, variants

MAPS = 1.02
"""Tensor maps make a block take 1.02 times as long: 0.98 to 1.03 of 229 pairs of kernels on an
H200, with long and short blocks; single ones take 0.73 to 1.22
(`2026-11-23-generated_chains.md`)."""

FINALISTS = 8
"""Tilings that are priced with all numbers of stages."""

MOST_WARPS, MOST_STAGES = 32, 64
"""A kernel of Triton has 32 warps and 64 stages at most."""

OFFERED = 8
"""Plans of each size that others are compared with."""


class Generated(KernelFamily[Chain]):
    """The chain engine: a block does all of the chain for its tile of the result.

    Or, where sums are split, for its part of a sum, and a second launch merges the parts.
    """

    names = (FAMILY,)
    language = "triton"
    plan = GeneratedPlan
    error = 1.1
    breaks = Breaks((16, 64, 256, 512), 1024)

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all."""
        return problem.is_plain("gpu", Chain)

    def refuses(self, problem: Problem[Chain]) -> str | None:
        """Refuse devices that Triton is not for, and graphs that have no tiles."""
        dev = problem.dev
        if not dev.capabilities.async_copies:
            return f"the {dev.label} has no asynchronous copies, which Triton's pipelines need"
        try:
            space = space_of(problem.work.graph)
        except TilingError as err:
            return str(err)
        products = {step.dtype for step in space.steps if step.dtype}
        if not products <= {*HALF_DTYPES}:
            found = ", ".join(sorted(products.difference(HALF_DTYPES)))
            return f"products are of {found}, generated kernels have {' and '.join(HALF_DTYPES)}"
        return None

    def plans(self, problem: Problem[Chain]) -> Iterator[Offer]:
        """Yield the cheapest plans of each size that is priced."""
        every = ranges(problem.work, self.breaks)
        sizes = tuple(size for r in every for _, each in r.cells for size in each)
        yield from map(Offer, _cheapest(problem, tuple(dict.fromkeys(sizes))))

    def violations(self, plan: TilePlan, problem: Problem[Chain]) -> Iterator[str]:
        """Yield why a plan is none for the graph, or needs more than a block has."""
        assert isinstance(plan, GeneratedPlan)
        work, dev = problem.work, problem.dev
        wrong = next(_bad_launch(plan), None)
        if wrong is not None:
            yield wrong
            return
        try:
            every = launches(work.graph, plan)
            for launched in every:
                refuse_blocks(launched.schedule)
        except (TilingError, TilePlanError) as err:
            yield str(err)
            return
        for launched in every:
            wanted = wanted_registers(launched)
            if wanted > MOST_REGISTERS:
                yield f"a thread has {wanted} registers of tiles; at most {MOST_REGISTERS}"
            narrow = narrow_behind(launched)
            if narrow and dev.capabilities.tma:
                name, columns = narrow
                yield f"{name} has tiles of {columns} columns behind another product; must be 64"
        if plan.tensor_maps and not dev.capabilities.tma:
            yield f"tensor_maps is {plan.tensor_maps}, the {dev.label} has none"
        yield from block_limits(footprint(every[0]), plan, problem)

    def price(self, plan: TilePlan, problem: Problem[Chain]) -> Launches:
        """Price each launch; the second begins while the first ends."""
        assert isinstance(plan, GeneratedPlan)
        every = launches(problem.work.graph, plan)
        return Launches(problem.dev, footprint(every[0]), partial(_steps, plan, problem))


def _bad_launch(plan: GeneratedPlan) -> Iterator[str]:
    """Yield why no kernel of Triton is launched so."""
    if not 1 <= plan.num_warps <= MOST_WARPS or plan.num_warps & (plan.num_warps - 1):
        yield f"num_warps is {plan.num_warps}; must be a power of two, at most {MOST_WARPS}"
    if plan.num_stages > MOST_STAGES:
        yield f"num_stages is {plan.num_stages}; at most {MOST_STAGES}"


def _steps(plan: GeneratedPlan, problem: Problem[Chain], size: Size) -> Iterator[Step]:
    """Yield the launches of a plan."""
    work, dev = problem.work, problem.dev
    sizes = tuple(sizes_of(work, size).items())
    for number, launched in enumerate(launches(work.graph, plan)):
        step = step_of(launched, loop_sizes(launched.graph, sizes), dev, number == 0)
        if plan.tensor_maps and number == 0:
            step = replace(step, block_s=MAPS * step.block_s, chain_s=MAPS * step.chain_s)
        yield step


@lru_cache(maxsize=256)
def _cheapest(problem: Problem[Chain], sizes: tuple[Size, ...]) -> tuple[GeneratedPlan, ...]:
    family, every = Generated(), list(plans(problem.work.graph))

    def seconds(size: Size) -> Callable[[GeneratedPlan], float]:
        return lambda plan: family.price(plan, problem).at(size).seconds

    def allowed(some: Iterable[GeneratedPlan], count: int) -> list[GeneratedPlan]:
        fitting = (p for p in some if not any(family.violations(p, problem)))
        return list(islice(fitting, count))

    last = near = descended(every, seconds(sizes[-1]))
    found: dict[GeneratedPlan, None] = {}
    for number, size in enumerate(sizes):
        if number:
            starts = dict.fromkeys((*near[:BEAM], *last[:BEAM]))
            near = descended(every, seconds(size), starts)
        elif len(sizes) > 1:
            near = descended(every, seconds(size))
        best = allowed(near, FINALISTS)
        more = dict.fromkeys(v for plan in best for v in variants(plan, problem.dev))
        found |= dict.fromkeys(allowed(sorted(more, key=seconds(size)), OFFERED))
    return tuple(found)
