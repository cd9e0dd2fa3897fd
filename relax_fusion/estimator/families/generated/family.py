"""The family "generated": a kernel of any chain, from its block graph and a tiling expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from ....errors import TilePlanError, TilingError
from ....hardware import DeviceSpec
from ....tiling.blocks import refuse_blocks
from ....workload import Chain
from ....workload.graph import Graph
from ...family import Breaks, KernelFamily
from ...limits import block_limits
from ...prediction import HALF_DTYPES, Prediction, in_a_row
from ...ranges import ranges
from ...shape import Size, sizes_of
from ...steps import Footprint
from ...tile_plan import TilePlan
from .memory import MOST_REGISTERS, footprint, narrow_behind, wanted_registers
from .plan import FAMILY, GeneratedPlan, Launched, launches, loop_sizes, space_of
from .price import price
from .space import BEAM, descended, plans, variants

MAPS = 1.02
"""What tensor maps do to a time, between 0.98 and 1.03, which they do on an H200 to 229 pairs of
kernels, with long and short blocks; to single ones 0.73 to 1.22 (`2026-11-23-generated_chains.md`).
"""

FINALISTS = 8
"""Tilings that are priced with all numbers of stages."""

MOST_WARPS, MOST_STAGES = 32, 64
"""Of a kernel of Triton."""

OFFERED = 8
"""Plans of each size that others are compared with."""


class Generated(KernelFamily[Chain]):
    """The chain engine: a block does all of the chain for its tile of the result.

    Or, where sums are split, for its part of a sum, and a second launch merges the parts.
    """

    names = (FAMILY,)
    language = "triton"
    takes = (Chain,)
    plan = GeneratedPlan
    error = 1.1
    breaks = Breaks((16, 64, 256, 512), 1024)

    def refuses(self, work: Chain, dev: DeviceSpec) -> str | None:
        """Refuse devices that Triton is not for, and graphs that have no tiles."""
        if not dev.capabilities.async_copies:
            return f"the {dev.label} has no asynchronous copies, which Triton's pipelines need"
        try:
            space = space_of(work.graph)
        except TilingError as err:
            return str(err)
        products = {step.dtype for step in space.steps if step.dtype}
        if not products <= {*HALF_DTYPES}:
            found = ", ".join(sorted(products.difference(HALF_DTYPES)))
            return f"products are of {found}, generated kernels have {' and '.join(HALF_DTYPES)}"
        return None

    def plans(self, work: Chain, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield the cheapest plans of each size that is priced."""
        sizes = tuple(
            size for r in ranges(work, self.breaks) for _, each in r.cells for size in each
        )
        yield from _cheapest(work, dev, tuple(dict.fromkeys(sizes)))

    def violations(self, plan: TilePlan, work: Chain, dev: DeviceSpec) -> Iterator[str]:
        """Yield why a plan is none for the graph, or needs more than a block has."""
        assert isinstance(plan, GeneratedPlan)
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
        yield from block_limits(self.footprint(plan, work, dev), plan, work, dev)

    def footprint(self, plan: TilePlan, work: Chain, dev: DeviceSpec) -> Footprint:
        """Return what a block of the first launch occupies."""
        assert isinstance(plan, GeneratedPlan)
        return footprint(launches(work.graph, plan)[0])

    def predict(self, plan: TilePlan, work: Chain, dev: DeviceSpec, size: Size) -> Prediction:
        """Price each launch; the second begins while the first ends."""
        assert isinstance(plan, GeneratedPlan)
        return _predict(work.graph, plan, dev, tuple(sizes_of(work, size).items()))


def _bad_launch(plan: GeneratedPlan) -> Iterator[str]:
    """Yield why no kernel of Triton is launched so."""
    if not 1 <= plan.num_warps <= MOST_WARPS or plan.num_warps & (plan.num_warps - 1):
        yield f"num_warps is {plan.num_warps}; must be a power of two, at most {MOST_WARPS}"
    if plan.num_stages > MOST_STAGES:
        yield f"num_stages is {plan.num_stages}; at most {MOST_STAGES}"


def _predict(
    graph: Graph, plan: GeneratedPlan, dev: DeviceSpec, sizes: tuple[tuple[str, int], ...]
) -> Prediction:
    every = launches(graph, plan)
    parts = [price(every[0], loop_sizes(every[0].graph, sizes), dev, True)]
    parts += [_merging_price(launched, sizes, dev) for launched in every[1:]]
    if plan.tensor_maps:
        parts[0] = replace(parts[0], seconds=MAPS * parts[0].seconds)
    return in_a_row(parts)


@lru_cache(maxsize=1024)
def _merging_price(
    launched: Launched, sizes: tuple[tuple[str, int], ...], dev: DeviceSpec
) -> Prediction:
    """Price a launch that merges sums, which many plans have in common."""
    return price(launched, loop_sizes(launched.graph, sizes), dev, False)


@lru_cache(maxsize=256)
def _cheapest(work: Chain, dev: DeviceSpec, sizes: tuple[Size, ...]) -> tuple[GeneratedPlan, ...]:
    """Return the cheapest plans at each of some sizes."""
    family, every = Generated(), list(plans(work.graph))

    def seconds(size: Size) -> Callable[[GeneratedPlan], float]:
        return lambda plan: family.predict(plan, work, dev, size).seconds

    def allowed(some: Iterable[GeneratedPlan], count: int) -> list[GeneratedPlan]:
        fitting = (p for p in some if not any(family.violations(p, work, dev)))
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
        more = dict.fromkeys(v for plan in best for v in variants(plan, dev))
        found |= dict.fromkeys(allowed(sorted(more, key=seconds(size)), OFFERED))
    return tuple(found)
