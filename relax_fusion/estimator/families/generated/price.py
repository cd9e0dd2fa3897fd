"""What a launch of the chain engine costs.

A block waits, and moves and computes.  Loads in front of a statement are a wait and their bytes; a
loop whose loads are done ahead takes, each time, little longer than its arithmetic, its bytes, or
the wait over the tiles in flight, whichever is longest.  Blocks that share a multiprocessor hide a
part of each other's waits, not their bytes and arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ....hardware import DeviceSpec
from ....tiling import Compute, Load, Loop, Schedule, volumes
from ....tiling.space import Step
from ....tiling.structure import Node
from ....workload.roofline import Sizes
from ...gpu_cost import resident_blocks
from ...prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from ...steps import Footprint
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
"""Part of the L2 bandwidth that falls to a multiprocessor which loads of its tiles reach."""

CROSSING_BYTES = 42
"""Bytes that cross warps in a cycle, through shared memory."""

WARP_GROUP_PART, WARP_PART = 0.699, 0.338
"""Parts of the rate of tensor cores that products by warp groups and by single warps reach."""

SLOTS_PART, ENOUGH_WARPS, FEW_WARPS = 0.58, 8, 1.51
"""Part of its instruction slots in which a multiprocessor issues maps and reductions; of how many
warps one block is enough for that, and how many times as long fewer take by themselves."""

CAST_SLOTS = 0.5
"""Instructions to make float32 of half precision or the other way round, of which one does two."""

HIDDEN = 0.58
"""How much of their waits blocks on one multiprocessor hide behind each other's work: 1 is all."""

START_S = 2.07e-6
"""From a launch to the first load, and from the last store to the end, beside `launch_s`."""

NEXT_S, NEXT_DEPENDENT_S = 1.5e-6, 0.54e-6
"""From the end of a launch to the first load of the next; where that waits on the device."""

# Fitted, but for `NEXT_S`, to 1,436 kernels on an H200: 10 to 28 tilings of each of 45 chains of
# `python -m benchmarks judge chains`, and 268 of MCFuser's G1 to G12.  Their times are given to
# within 15 % (root mean square of logs).


@dataclass
class _Time:
    """Seconds that a block waits, and seconds that it keeps its multiprocessor busy."""

    waits: float = 0.0
    works: float = 0.0

    def add(self, other: _Time, times: int = 1) -> None:
        self.waits += times * other.waits
        self.works += times * other.works


class BlockTime:
    """The time of a block.

    Parameters
    ----------
    launched : Launched
        The launch.
    trips : mapping of str to int
        Tiles of each loop at the sizes that are priced.
    dev : DeviceSpec
        The device.
    """

    def __init__(self, launched: Launched, trips: dict[str, int], dev: DeviceSpec):
        self.schedule, self.trips, self.dev = launched.schedule, trips, dev
        self.launched = launched
        self.feed = FEED_PART * dev.l2_bytes_per_s / dev.sm_count
        self.slots = SLOTS_PART * dev.fma_float32_flops_per_s / 2 / dev.sm_count
        self.size = dict(self.schedule.space.element_bytes)

    def of(self, body: tuple[Node, ...]) -> _Time:
        """Return the time of statements one after the other."""
        time, loaded = _Time(), 0
        for node in body:
            if isinstance(node, Load):
                loaded += self._bytes(node.tensor, node.what.loops)
                continue
            if loaded:
                time.add(_Time(LOAD_S, loaded / self.feed))
                loaded = 0
            if isinstance(node, Loop):
                time.add(self._loop(node))
            elif isinstance(node, Compute):
                time.add(self._compute(self.schedule.space.step[node.tensor]))
            else:
                stored = self._bytes(node.tensor, node.what.loops)
                time.add(_Time(0.0, stored / self.feed))
        return time

    def _loop(self, loop: Loop) -> _Time:
        """Return the time of a loop, whose loads may be done ahead."""
        trips, ahead = self.trips[loop.name], self.launched.stages - 1
        time = _Time()
        if not ahead or any(isinstance(node, Loop) for node in loop.body):
            time.add(self.of(loop.body), trips)
            return time
        loads = [n for n in loop.body if isinstance(n, Load)]
        moved = sum(self._bytes(n.tensor, n.what.loops) for n in loads) / self.feed
        computed = self.of(tuple(n for n in loop.body if not isinstance(n, Load)))
        works = max(moved, computed.works)
        longer, other = max(works, computed.waits + computed.works), (AHEAD_S + moved) / ahead
        each = (longer**SHARPNESS + other**SHARPNESS) ** (1 / SHARPNESS)
        time.add(_Time(LOAD_S, moved))
        time.add(_Time(each - works, works), trips)
        return time

    def _compute(self, step: Step) -> _Time:
        if not step.dtype:
            works = self._instructions(step) / self.slots
            alone = works * (FEW_WARPS - 1) if self.launched.warps < ENOUGH_WARPS else 0.0
            return _Time(alone, works)
        tile = prod(block_of(self.launched, n) for n in step.loops)
        part = WARP_GROUP_PART if warp_groups(self.launched, step) else WARP_PART
        works = 2.0 * tile / (part * self.dev.tensor_flops_per_s(step.dtype) / self.dev.sm_count)
        chain = STEP_S * prod(block_of(self.launched, n) for n in step.reduced) / MMA_DEPTH
        time = _Time(PRODUCT_S + max(0.0, chain - works), works)
        left = step.reads[0]
        if left.tensor in self.schedule.space.step and crosses(self.launched, step):
            moved = self._bytes(left.tensor, left.loops)
            time.add(_Time(CROSSING_S, moved / (CROSSING_BYTES * self.dev.clock_hz)))
        return time

    def _instructions(self, step: Step) -> float:
        """Return the instructions of a map or a reduction, for a tile."""

        def elements(loops: Iterable[str]) -> int:
            return prod(block_of(self.launched, n) for n in loops)

        half = [each for each in (step.makes, *step.reads) if self.size[each.tensor] < FLOAT_BYTES]
        found = CAST_SLOTS * sum(elements(each.loops) for each in half)
        return found + sum(count * elements(loops) for loops, count in step.slots)

    def _bytes(self, tensor: str, loops: tuple[str, ...]) -> int:
        return self.size[tensor] * prod(block_of(self.launched, n) for n in loops)


def price(launched: Launched, sizes: Sizes, dev: DeviceSpec, is_first: bool) -> Prediction:
    """Return what a launch costs.

    Parameters
    ----------
    launched : Launched
        The launch.
    sizes : mapping of str to int
        Elements of each loop.
    dev : DeviceSpec
        The device.
    is_first : bool
        Whether no other launch of the chain is in front of it.
    """
    schedule, trips = launched.schedule, tiles_at(launched, sizes)
    block = BlockTime(launched, trips, dev).of(schedule.structure.body)
    blocks = prod(trips[n] for n in schedule.structure.grid)
    foot: Footprint = footprint(launched)
    each = ceil_div(blocks, dev.sm_count)
    waves = ceil_div(each, resident_blocks(foot, dev))
    moved = float(sum(volumes(schedule, trips).values()))
    distinct = float(sum(_distinct(schedule, sizes).values()))
    flops = float(sum(_flops(schedule, sizes)))
    start = dev.launch_s + START_S
    if not is_first:
        start = NEXT_DEPENDENT_S if dev.capabilities.dependent_launch else NEXT_S
    apart = waves * block.waits + each * block.works
    hidden = max(each * block.works, waves * (block.waits + block.works))
    inside = (1 - HIDDEN) * apart + HIDDEN * hidden
    terms: dict[Bound, float] = {
        "launch": start,
        "latency": inside - each * block.works,
        "compute": each * block.works,
        "l2": moved / (FEED_PART * dev.l2_bytes_per_s),
        "dram": distinct / (dev.dram_bytes_per_s * DRAM_EFFICIENCY),
    }
    busy = max(inside, terms["l2"], terms["dram"])
    return Prediction(start + busy, distinct, flops, waves, largest(terms))


def tiles_at(launched: Launched, sizes: Sizes) -> dict[str, int]:
    """Return the tiles of each loop, of which `sizes` are the elements."""
    return {n: ceil_div(size, launched.schedule.tile[n]) for n, size in sizes.items()}


def _distinct(schedule: Schedule, sizes: Sizes) -> dict[str, int]:
    """Return the bytes of each operand and result, counted once."""
    size = dict(schedule.space.element_bytes)
    return {
        statement.tensor: size[statement.tensor] * prod(sizes[n] for n in statement.what.loops)
        for statement, _ in schedule.structure.statements
        if not isinstance(statement, Compute)
    }


def _flops(schedule: Schedule, sizes: Sizes) -> list[float]:
    """Return the operations of each contraction."""
    return [2.0 * prod(sizes[n] for n in s.loops) for s in schedule.space.steps if s.dtype]
