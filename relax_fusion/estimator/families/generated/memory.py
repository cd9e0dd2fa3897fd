"""What a block of the chain engine occupies: an estimate of what Triton's compiler decides."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ....tiling import Compute, IterationSpace, Load, Loop, Store
from ....tiling.space import Access, Step
from ....tiling.structure import Node
from ...prediction import Footprint
from .plan import Launched

GROUP_ROWS = 64
"""A warp group has 64 rows of a product (PTX ISA, wgmma)."""

MMA_DEPTH = 16
"""One instruction of a product of half precision sums 16 elements (PTX ISA, mma and wgmma)."""

GROUP_WARPS = 4
"""A group has 4 warps (the same)."""

NARROW = 64
"""A product by warp groups of 64 columns has rows of one swizzle: 128 bytes."""

LOOSE_REGISTERS = 40
"""A thread has 40 registers beside its tiles; assumed."""

REST_BYTES = 1 << 10
"""Of shared memory, for barriers of tensor maps, and for what the warps of a reduction exchange;
assumed.  With it, all 471 of 500 kernels that are let pass fit (`2026-11-23-judge_feasibility.md`).
"""

MOST_REGISTERS = 255
"""A thread has 255 registers at most (CUDA guide)."""

WARP_SIZE = 32


def block_of(launched: Launched, loop: str) -> int:
    """Return the elements of a block along a loop."""
    return launched.block[loop]


def warp_groups(launched: Launched, step: Step) -> bool:
    """Tell whether a contraction is done by warp groups, of which each has 64 rows."""
    rows = [block_of(launched, n) for n in step.makes.loops if block_of(launched, n) > 1]
    return launched.warps % GROUP_WARPS == 0 and bool(rows) and rows[0] >= GROUP_ROWS


def crosses(launched: Launched, step: Step) -> bool:
    """Tell whether the left operand of a product crosses warps where it is computed.

    It does not where each warp group has rows of its own.
    """
    rows = block_of(launched, step.reads[0].loops[-2])
    whole = rows * GROUP_WARPS >= GROUP_ROWS * launched.warps
    return not (whole and warp_groups(launched, step))


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
    """Return the most bytes of shared memory that are held at a time."""
    return REST_BYTES + _Held(launched).by(launched.schedule.structure.body, False)


class _Held:
    """What lies in shared memory while statements run.

    Tiles that a loop loads ahead for its products, by maps between too; operands of products by
    warp groups, but for left ones that are computed, which stay in registers; and what changes its
    layout between threads: operands of products by single warps, and results.
    """

    def __init__(self, launched: Launched):
        self.launched, self.space = launched, launched.schedule.space
        self.size = dict(self.space.element_bytes)
        products = [s for s in self.space.steps if s.dtype]
        self.grouped = [s for s in products if warp_groups(launched, s)]
        self.ahead = max(1, launched.stages - (len(self.grouped) < len(products)))
        computed = {s.reads[0].tensor for s in self.grouped} & self.space.step.keys()
        self.kept = {r.tensor for s in self.grouped for r in s.reads} - computed

    def by(self, body: tuple[Node, ...], inside: bool) -> int:
        """Return the most bytes that some statements hold at a time."""
        is_last = not any(isinstance(node, Loop) for node in body)
        is_ahead = inside and is_last and self.launched.stages > 1
        loads = [n for n in body if isinstance(n, Load)] if is_ahead else []
        waiting = _sources(body, self.space) & {n.tensor for n in loads}
        always = sum(self.ahead * self.tile(n) for n in loads if n.tensor in waiting)
        most, moved = 0, dict[str, int]()
        for place, node in enumerate(body):
            needed = {t for later in body[place:] for t in _read(later, self.space)}
            made = {n.tensor: n for n in body[: place + 1] if isinstance(n, Load | Compute)}
            held = sum(self.tile(made[t]) for t in made.keys() & self.kept & needed - waiting)
            now = self.moved(node, waiting)
            moved = moved | now if is_ahead else now
            inner = self.by(node.body, True) if isinstance(node, Loop) else 0
            most = max(most, held + inner + sum(moved.values()))
        return always + most

    def moved(self, node: Node, waiting: set[str]) -> dict[str, int]:
        """Return the bytes of what changes its layout for a statement."""
        if isinstance(node, Store):
            return {node.tensor: self.tile(node)}
        if not isinstance(node, Compute) or not self.space.step[node.tensor].dtype:
            return {}
        step = self.space.step[node.tensor]
        if step not in self.grouped:
            return {r.tensor: self.bytes(r) for r in step.reads if r.tensor not in waiting}
        left = step.reads[0]
        computed = left.tensor in self.space.step and left.tensor not in self.kept
        return {left.tensor: self.bytes(left)} if computed and crosses(self.launched, step) else {}

    def tile(self, node: Load | Compute | Store) -> int:
        """Return the bytes of what a statement loads, makes or stores."""
        made = self.space.step[node.tensor].makes if isinstance(node, Compute) else node.what
        return self.bytes(made)

    def bytes(self, what: Access) -> int:
        """Return the bytes of a tile."""
        return self.size[what.tensor] * prod(block_of(self.launched, n) for n in what.loops)


def _read(node: Node, space: IterationSpace) -> set[str]:
    """Return what a statement, or those of a loop, read."""
    if isinstance(node, Loop):
        return {tensor for each in node.body for tensor in _read(each, space)}
    return {r.tensor for r in space.step[node.tensor].reads} if isinstance(node, Compute) else set()


def _sources(body: tuple[Node, ...], space: IterationSpace) -> set[str]:
    """Return what the products of a loop are computed from, by the statements of the loop."""
    found: set[str] = set()
    for node in reversed(body):
        if isinstance(node, Compute):
            step = space.step[node.tensor]
            if step.dtype or step.out in found:
                found |= {read.tensor for read in step.reads}
    return found
