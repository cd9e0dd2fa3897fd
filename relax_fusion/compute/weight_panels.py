"""Operands of the products of a chain: weights in panels of columns, or as they lie; wide rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from operator import mul
from typing import Literal, TypeAlias

from tvm import ir, tirx

from ..estimator.families.cpu_generated.price import DOT_COLUMNS, Registers, sides_of
from ..matching.expressions import int64
from ..tiling.space import Access, Step, access
from ..tvm_ir import T
from ..workload import Graph
from ..workload.graph import Block
from ..workload.values import At, Read, reads
from .activations import ACCUMULATE
from .tile_writer import ChainTiling, TileWriter, only_if

TURNED = "turned"
"""Name of the blocks that copy a square of a weight which is to be transposed on the way."""

PANEL = "panel"
"""This name stands for a loop over the panels of a tile of columns."""

Packing: TypeAlias = Literal["blocks", "once", "none"]
"""When weights are copied side by side: by each block, once in front of all blocks, or never."""

Copy: TypeAlias = Callable[[Sequence[tirx.Expr], tirx.Expr], None]
"""A function that writes the copy of an element of a weight, given its place in the sum and its
column in a panel."""


class WeightPanels(TileWriter):
    """Knows where the weights of products lie, and writes their copies.

    Tiles are allocated in whole register tiles.
    """

    def __init__(
        self,
        graph: Graph,
        buffers: dict[str, tirx.Var],
        dims: Mapping[str, tirx.Expr],
        tiling: ChainTiling,
        registers: Registers,
        packing: Packing = "blocks",
    ):
        super().__init__(graph, buffers, dims, tiling, registers)
        self.packing = packing
        self.panels: dict[str, tirx.Var] = {}
        self.wide: dict[str, tirx.Var] = {}
        self.panel: list[tirx.Expr] = []
        self.packed: Access | None = None
        self.multiplies = False
        self.direct = False
        self.summed: dict[str, tirx.Expr] = {}
        self.panel_place: list[tirx.Expr] = []
        every = {step.out: sides_of(graph, self.space, step) for step in self.space.steps}
        self.sides = {out: sides for out, sides in every.items() if sides is not None}
        for out, (row, column) in self.sides.items():
            self._widen(row, registers.rows)
            self._widen(column, self._width(self.space.step[out]))

    def _widen(self, loop: str, part: int) -> None:
        whole = -(-self.schedule.tile[loop] // part) * part
        self.allocated[loop] = max(self.allocated[loop], whole)

    def allocate(self) -> None:
        """Allocate, for each contraction, columns of its weight that are read side by side too."""
        super().allocate()
        for step in self.packed_steps() if self.packing == "blocks" else ():
            self.panels[step.out] = T.alloc_buffer(self._panel_shape(step), ACCUMULATE)

        for step in self.space.steps:
            if self.packing != "none" and self._narrow_rows(step) is not None:
                shape = [self.allocated[self.sides[step.out][0]], self._depth_of(step)]
                self.wide[step.out] = T.alloc_buffer(list(map(int64, shape)), ACCUMULATE)

    def _depth_of(self, step: Step) -> int:
        return prod(self.schedule.tile[n] for n in step.reduced)

    def _narrow_rows(self, step: Step) -> Access | None:
        """Return the operand from memory that has the rows of a contraction in half precision."""
        row, _ = self.sides.get(step.out, ("", ""))
        found = (read for read in step.reads if row in read.loops)
        read = next((read for read in found if read.tensor not in self.space.step), None)
        return None if read is None or self.graph[read.tensor].dtype == ACCUMULATE else read

    def widen_rows(self, step: Step, block: Block) -> None:
        """Copy the rows that a contraction reads again for each panel, as float32."""
        rows, wide, reduced = self._narrow_rows(step), self.wide[step.out], sorted(step.reduced)
        assert rows is not None, "there are copies of these only"
        read = next(r for r in reads(block.value) if self._access(r) == rows)
        row, column = self.sides[step.out]
        along = rows.loops[-1] if rows.loops[-1] in reduced else reduced[-1]
        loops = [n for n in (*step.makes.loops, *reduced) if n not in (column, along)]

        def write() -> None:
            depth = self._depth(reduced, [self.inner[n] for n in reduced])
            T.buffer_store(wide, self._read(read), [self.inner[row], depth])

        self.each(step, [*loops, along], write, vectors=along == rows.loops[-1])

    def packed_steps(self) -> list[Step]:
        """Return the contractions whose weights come from memory, and are copied."""
        some = self.space.steps if self.packing != "none" else ()
        return [step for step in some if self._weight(step) is not None]

    def pack_once(self, step: Step) -> None:
        """Write a parallel loop that copies all panels of a weight."""
        self.step, self.dtype = step, ACCUMULATE
        shape, trips = self._panel_shape(step), self._panel_trips(step)
        count = reduce(mul, trips.values(), int64(1))
        self.panels[step.out] = T.sblock_alloc_buffer([count, *shape], ACCUMULATE)
        with T.parallel(count) as loop, T.sblock("pack"):
            place = T.axis.spatial(count, loop)
            self.panel = [place]
            for name, each in reversed(trips.items()):
                self.number[name], place = place % each, place // each
            column = self.sides[step.out][1]
            first = {n: int64(0) for n in self._weight_loops(step) if n not in step.reduced}
            first[column] = self.number.pop(PANEL) * int64(self._width(step))
            with only_if([first[column] < self.elements_of(column)]):
                self._pack(step, self.blocks[step.out], first)
        self.number.clear()

    def _panel_shape(self, step: Step) -> list[tirx.Expr]:
        """Return the elements of a panel along the sum, and its columns."""
        return [int64(self._depth_of(step)), int64(self._width(step))]

    def _panel_trips(self, step: Step) -> dict[str, tirx.Expr]:
        """Return the tiles of each loop of a weight, and the panels of a tile of columns."""
        trips = {n: self.trips(n) for n in self._weight_loops(step)}
        column = self.schedule.tile[self.sides[step.out][1]]
        return trips | {PANEL: int64(-(-column // self._width(step)))}

    def _weight_loops(self, step: Step) -> list[str]:
        weight = self._weight(step)
        return sorted(weight.loops) if weight is not None else []

    def _weight(self, step: Step) -> Access | None:
        """Return the operand from memory that has the columns of a contraction, and no rows.

        Both operands may be of one tensor: places tell them apart.
        """
        _, column = self.sides.get(step.out, ("", ""))
        found = (read for read in step.reads if column in read.loops)
        return next((read for read in found if read.tensor not in self.space.step), None)

    def _width(self, step: Step) -> int:
        """Return the columns of a register tile."""
        if self._dots_along(step) is not None:
            return DOT_COLUMNS
        return self.registers.width(self.schedule.tile[self.sides[step.out][1]])

    def _dots_along(self, step: Step) -> str | None:
        """Return the loop that a product of few rows has a vector along for each result, if any."""
        weight = self._weight(step) if self.packing == "none" else None
        return None if weight is None else self._along(step, weight)

    def _pack(self, step: Step, block: Block, first: Mapping[str, tirx.Expr]) -> None:
        """Copy the columns of a panel: what lies beyond the last one is never read."""
        (_, column), width = self.sides[step.out], self._width(step)
        weight, panel, reduced = self._weight(step), self.panels[step.out], sorted(step.reduced)
        assert weight is not None, "there are panels of weights only"
        read = next(r for r in reads(block.value) if self._access(r) == weight)
        left = self.elements_of(column) - first[column]

        def copy(over: Sequence[tirx.Expr], c: tirx.Expr) -> None:
            at = {**first, **dict(zip(reduced, over, strict=True)), column: first[column] + c}
            self.set_place(step, list(at), list(at.values()))
            place = [*self.panel, self._depth(reduced, over), c]
            T.buffer_store(panel, self._read(read), place)

        along = self._along(step, weight)
        if along is not None:
            with only_if([left >= int64(width)]):
                self._turn(step, along, copy)
        with T.grid(*(self.elements_of(n) for n in reduced)) as found:
            over = [found] if isinstance(found, ir.Var) else list(found)
            if along is None:
                with only_if([left >= int64(width)]), T.vectorized(int64(width)) as c:
                    copy(over, c)
            with only_if([left < int64(width)]), T.serial(left) as c:
                copy(over, c)

    def _turn(self, step: Step, along: str, copy: Copy) -> None:
        """Copy a panel in squares, of which each is transposed: `along` lies side by side."""
        reduced, lanes = sorted(step.reduced), self.registers.lanes
        counts = [self.elements_of(n) // int64(lanes if n == along else 1) for n in reduced]
        with T.grid(*counts, int64(self._width(step) // lanes)) as found:
            *over, square = found
            with T.sblock(TURNED), T.grid(int64(lanes), int64(lanes)) as inside:  # noqa: SIM117
                with T.sblock(f"{TURNED}_element"):
                    r, c = T.axis.remap("SS", list(inside))
                    place = reduced.index(along)
                    over[place] = over[place] * int64(lanes) + r
                    copy(over, square * int64(lanes) + c)

    def _along(self, step: Step, weight: Access) -> str | None:
        """Return the loop of the sum along which a weight lies, if squares of it can be turned."""
        last = weight.loops[-1]
        along = [at for at in weight.at if last in dict(at.terms)]
        neighbours = along == [At(((last, 1),))] and weight.at[-1] == along[0]
        found = neighbours and last in step.reduced and self._divides(last, self.registers.lanes)
        return last if found else None

    def _divides(self, loop: str, part: int) -> bool:
        count = self.elements_of(loop)
        return isinstance(count, tirx.IntImm) and int(count) % part == 0

    def _depth(self, reduced: Sequence[str], over: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return the row of a panel of an element of the sum."""
        found = int64(0)
        for name, place in zip(reduced, over, strict=True):
            found = found * int64(self.schedule.tile[name]) + place
        return found

    def _access(self, read: Read) -> Access:
        """Return an element that the current statement reads, in loops."""
        return access(read.tensor, read.at, self.tiling.loop_of[self.step.out])
