"""What the blocks of a launch of the chain engine do, for the common launch model.

A block waits, and moves and computes.  Loads in front of a statement are a wait and their bytes; a
loop whose loads are done ahead takes, each time, little longer than its arithmetic, its bytes, or
the wait over the tiles in flight, whichever is longest.  Blocks that share a multiprocessor hide
each other's waits, not their bytes and arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ....hardware import DeviceSpec
from ....tiling import Compute, Load, Loop, moves, space
from ....tiling.structure import Node
from ....workload.roofline import Sizes
from ...prediction import Step, ceil_div
from .memory import MMA_DEPTH, block_of, crosses, footprint, warp_groups
from .plan import Launched

FLOAT_BYTES = 4

LOAD_S, AHEAD_S = 0.195e-6, 0.42e-6
"""From asking for a tile to having it: by statements in order; by a loop that loads ahead."""

SHARPNESS = 2.56
"""How little a loop takes longer than the longer of its loads and its work: the exponent of a sum
of powers, of which the maximum is the limit."""

PRODUCT_S, CROSSING_S = 0.066e-6, 0.104e-6
"""What a product of tiles takes beside its arithmetic; and more, where its left operand is computed
and crosses warps."""

STEP_S = 0.0218e-6
"""From one instruction of a product to the next, which adds to its sums."""

FEED_PART = 1.29
"""Loads of its tiles reach this part of the L2 bandwidth that falls to a multiprocessor."""

CROSSING_BYTES = 42
"""Bytes that cross warps in a cycle, through shared memory."""

WARP_GROUP_PART, WARP_PART = 0.699, 0.338
"""Parts of the rate of tensor cores that products by warp groups and by single warps reach."""

SLOTS_PART, ENOUGH_WARPS, FEW_WARPS = 0.58, 8, 1.51
"""Part of its instruction slots in which a multiprocessor issues maps and reductions; of how many
warps one block is enough for that, and how many times as long fewer take by themselves."""

CAST_SLOTS = 0.5
"""Instructions to make float32 of half precision or the other way round, of which one does two."""

START_S = 2.07e-6
"""From a launch to the first load, and from the last store to the end, beside `launch_s`."""

NEXT_S, NEXT_DEPENDENT_S = 1.5e-6, 0.54e-6
"""From the end of a launch to the first load of the next; where that waits on the device."""

# Fitted, but for `NEXT_S`, to 1,436 kernels on an H200: 10 to 28 tilings of each of 45 chains of
# `python -m benchmarks judge chains`, and 268 of MCFuser's G1 to G12, when blocks on one
# multiprocessor were taken to hide a part of their waits.  By the common launch model, which lets
# them hide all, times are given to within 17 % (root mean square of logs, 15 % then).


@dataclass(frozen=True)
class _Time:
    """Seconds that a block waits, and seconds that it keeps its multiprocessor busy."""

    waits: float
    works: float


Loops = tuple[str, ...]
"""The names of loops around something: it is done once for each of their tiles."""

Terms = tuple[tuple[Loops, float], ...]
"""What adds up, each as often as its loops have tiles, or elements."""


@dataclass(frozen=True)
class _Parts:
    """What does not depend on sizes: terms of a block in seconds, of a launch in bytes and flops.

    `distinct` and `flops` count elements of their loops, the others tiles.
    """

    waits: Terms
    works: Terms
    moved: Terms
    distinct: Terms
    flops: Terms


class BlockTime:
    """The time of a block, as terms that its loops multiply."""

    def __init__(self, launched: Launched, dev: DeviceSpec):
        self.schedule, self.dev, self.launched = launched.schedule, dev, launched
        self.feed = FEED_PART * dev.l2_bytes_per_s / dev.sm_count
        self.slots = SLOTS_PART * dev.fma_float32_flops_per_s / 2 / dev.sm_count
        self.size = dict(self.schedule.space.element_bytes)

    def of(self, body: tuple[Node, ...], around: Loops = ()) -> Iterator[tuple[Loops, _Time]]:
        """Yield the times of statements one after the other, and the loops around each."""
        loaded = 0
        for node in body:
            if isinstance(node, Load):
                loaded += self._bytes(node.tensor, node.what.loops)
                continue
            if loaded:
                yield around, _Time(LOAD_S, loaded / self.feed)
                loaded = 0
            if isinstance(node, Loop):
                yield from self._loop(node, around)
            elif isinstance(node, Compute):
                yield around, self._compute(self.schedule.space.step[node.tensor])
            else:
                stored = self._bytes(node.tensor, node.what.loops)
                yield around, _Time(0.0, stored / self.feed)

    def _loop(self, loop: Loop, around: Loops) -> Iterator[tuple[Loops, _Time]]:
        """Yield the times of a loop, whose loads may be done ahead."""
        ahead, inside = self.launched.stages - 1, (*around, loop.name)
        if not ahead or any(isinstance(node, Loop) for node in loop.body):
            yield from self.of(loop.body, inside)
            return
        loads = [n for n in loop.body if isinstance(n, Load)]
        moved = sum(self._bytes(n.tensor, n.what.loops) for n in loads) / self.feed
        times = [t for _, t in self.of(tuple(n for n in loop.body if not isinstance(n, Load)))]
        computed = _Time(sum(t.waits for t in times), sum(t.works for t in times))
        works = max(moved, computed.works)
        longer, other = max(works, computed.waits + computed.works), (AHEAD_S + moved) / ahead
        each = (longer**SHARPNESS + other**SHARPNESS) ** (1 / SHARPNESS)
        yield around, _Time(LOAD_S, moved)
        yield inside, _Time(each - works, works)

    def _compute(self, step: space.Step) -> _Time:
        if not step.dtype:
            works = self._instructions(step) / self.slots
            alone = works * (FEW_WARPS - 1) if self.launched.warps < ENOUGH_WARPS else 0.0
            return _Time(alone, works)
        tile = prod(block_of(self.launched, n) for n in step.loops)
        part = WARP_GROUP_PART if warp_groups(self.launched, step) else WARP_PART
        works = 2.0 * tile / (part * self.dev.tensor_flops_per_s(step.dtype) / self.dev.sm_count)
        chain = STEP_S * prod(block_of(self.launched, n) for n in step.reduced) / MMA_DEPTH
        waits = PRODUCT_S + max(0.0, chain - works)
        left = step.reads[0]
        if left.tensor in self.schedule.space.step and crosses(self.launched, step):
            moved = self._bytes(left.tensor, left.loops)
            waits += CROSSING_S
            works += moved / (CROSSING_BYTES * self.dev.clock_hz)
        return _Time(waits, works)

    def _instructions(self, step: space.Step) -> float:
        """Return the instructions of a map or a reduction, for a tile."""

        def elements(loops: Iterable[str]) -> int:
            return prod(block_of(self.launched, n) for n in loops)

        half = [each for each in (step.makes, *step.reads) if self.size[each.tensor] < FLOAT_BYTES]
        found = CAST_SLOTS * sum(elements(each.loops) for each in half)
        return found + sum(count * elements(loops) for loops, count in step.slots)

    def _bytes(self, tensor: str, loops: tuple[str, ...]) -> int:
        return self.size[tensor] * prod(block_of(self.launched, n) for n in loops)


def step_of(launched: Launched, sizes: Sizes, dev: DeviceSpec, is_first: bool) -> Step:
    """Return the blocks of a launch; the first of a chain has none of it in front."""
    parts, tile = _parts(launched, dev), launched.schedule.tile
    trips = {name: ceil_div(count, tile[name]) for name, count in sizes.items()}
    works = _total(parts.works, trips)
    start = START_S
    if not is_first:
        start = NEXT_DEPENDENT_S if dev.capabilities.dependent_launch else NEXT_S
        start -= dev.launch_s
    return Step(
        blocks=prod(trips[n] for n in launched.schedule.structure.grid),
        foot=footprint(launched),
        block_s=works,
        dram_bytes=_total(parts.distinct, sizes),
        l2_bytes=_total(parts.moved, trips),
        flops=_total(parts.flops, sizes),
        chain_s=_total(parts.waits, trips) + works,
        start_s=start,
    )


def _total(terms: Terms, counts: Sizes) -> float:
    return sum(value * prod(map(counts.__getitem__, loops)) for loops, value in terms)


@lru_cache(maxsize=1 << 14)
def _parts(launched: Launched, dev: DeviceSpec) -> _Parts:
    """Return the terms of a launch, which are the same at all sizes."""
    schedule, size = launched.schedule, dict(launched.schedule.space.element_bytes)
    times = list(BlockTime(launched, dev).of(schedule.structure.body))
    operands = {
        statement.tensor: statement.what.loops
        for statement, _ in schedule.structure.statements
        if not isinstance(statement, Compute)
    }
    return _Parts(
        waits=_merged((around, time.waits) for around, time in times),
        works=_merged((around, time.works) for around, time in times),
        moved=_merged(moves(schedule)),
        distinct=_merged((loops, size[tensor]) for tensor, loops in operands.items()),
        flops=_merged((tuple(step.loops), 2.0) for step in schedule.space.steps if step.dtype),
    )


def _merged(terms: Iterable[tuple[Loops, float]]) -> Terms:
    found: dict[Loops, float] = {}
    for loops, value in terms:
        found[loops] = found.get(loops, 0.0) + value
    return tuple(found.items())
