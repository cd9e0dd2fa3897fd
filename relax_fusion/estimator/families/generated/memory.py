"""What a block of the chain engine occupies: an estimate of what Triton's compiler decides."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ....tiling import Compute, IterationSpace, Load, Loop
from ....tiling.space import Step
from ....tiling.structure import Node
from ...steps import Footprint
from .plan import Launched

GROUP_ROWS = 64
"""Rows of a product by a warp group (PTX ISA, wgmma)."""

MMA_DEPTH = 16
"""Elements that one instruction of a product of half precision sums (PTX ISA, mma and wgmma)."""

GROUP_WARPS = 4
"""Warps of a group (the same)."""

NARROW = 64
"""Columns of a product by warp groups that are one swizzled row of 128 bytes."""

LOOSE_REGISTERS = 40
"""Of a thread, beside its tiles; assumed."""

MOST_REGISTERS = 255
"""Of a thread (CUDA guide)."""

WARP_SIZE = 32


def block_of(launched: Launched, loop: str) -> int:
    """Return the elements of a block along a loop."""
    return launched.block[loop]


def warp_groups(launched: Launched, step: Step) -> bool:
    """Tell whether a contraction is done by warp groups, of which each has 64 rows."""
    rows = [block_of(launched, n) for n in step.makes.loops if block_of(launched, n) > 1]
    return launched.warps % GROUP_WARPS == 0 and bool(rows) and rows[0] >= GROUP_ROWS


@lru_cache(maxsize=1 << 14)
def footprint(launched: Launched) -> Footprint:
    """Return what a block occupies.

    Operands of products lie in shared memory: as many tiles as there are stages where a loop loads
    them ahead (one less where single warps multiply, which copy them to registers).
    """
    threads = launched.warps * WARP_SIZE
    registers = LOOSE_REGISTERS + _largest_tiles(launched) // threads
    return Footprint(_shared(launched), min(registers, MOST_REGISTERS), threads)


def wanted_registers(launched: Launched) -> int:
    """Return the registers of a thread that its tiles take, however many there are."""
    return LOOSE_REGISTERS + _largest_tiles(launched) // (launched.warps * WARP_SIZE)


def narrow_behind(launched: Launched) -> tuple[str, int] | None:
    """Return a product with a computed operand and few columns, and how many; None if none is.

    Triton 3.6 reads shared memory that it has not allocated in such a product by warp groups
    (https://github.com/triton-lang/triton/issues/11366).
    """
    made = launched.schedule.space.step
    for step in launched.schedule.space.steps:
        if step.dtype and warp_groups(launched, step) and any(r.tensor in made for r in step.reads):
            columns = block_of(launched, step.makes.loops[-1])
            if columns < NARROW:
                return step.out, columns
    return None


def _largest_tiles(launched: Launched) -> int:
    """Return the 32-bit registers of the sums of all contractions, and of the largest operand."""
    steps = launched.schedule.space.steps
    size = dict(launched.schedule.space.element_bytes)

    def words(step: Step, each: int) -> int:
        return prod(block_of(launched, n) for n in step.makes.loops) * each // 4

    sums = [words(s, 4) for s in steps if s.reduced]
    maps = [words(s, size[s.out]) for s in steps if not s.reduced]
    return sum(sums) + max(maps, default=0)


def _shared(launched: Launched) -> int:
    """Return the bytes of tiles that wait for products, and of operands that are computed there.

    Triton loads ahead whatever a product of a loop is computed from, also by maps between.
    """
    space = launched.schedule.space
    products = [s for s in space.steps if s.dtype]
    operands = {read.tensor for s in products for read in s.reads}
    grouped = all(warp_groups(launched, s) for s in products)
    ahead = max(1, launched.stages if grouped else launched.stages - 1)
    size = dict(space.element_bytes)

    def tile(tensor: str, loops: tuple[str, ...]) -> int:
        return size[tensor] * prod(block_of(launched, n) for n in loops)

    def held(body: tuple[Node, ...], inside: bool) -> int:
        loops = [node for node in body if isinstance(node, Loop)]
        is_ahead = inside and not loops
        loads = [node for node in body if isinstance(node, Load)]
        waiting = _sources(body, space) if is_ahead else operands
        own = sum(tile(n.tensor, n.what.loops) for n in loads if n.tensor in waiting)
        loaded = {node.tensor for node in loads}
        made = [space.step[n.tensor] for n in body if isinstance(n, Compute)]
        moved = [
            tile(s.out, s.makes.loops)
            for s in made
            if s.out in operands and loaded & {read.tensor for read in s.reads}
        ]
        inner = max((held(loop.body, True) for loop in loops), default=0)
        return (ahead if is_ahead else 1) * own + max(moved, default=0) + inner

    return held(launched.schedule.structure.body, False)


def _sources(body: tuple[Node, ...], space: IterationSpace) -> set[str]:
    """Return what the products of a loop are computed from, by the statements of the loop."""
    found: set[str] = set()
    for node in reversed(body):
        if isinstance(node, Compute):
            step = space.step[node.tensor]
            if step.dtype or step.out in found:
                found |= {read.tensor for read in step.reads}
    return found
