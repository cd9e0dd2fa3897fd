"""Sums of products in register tiles, and sums and maxima of rows in vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TypeAlias

from tvm import ir, tirx

from ..estimator.families.cpu_generated.registers import Registers, sides_of
from ..tiling import Compute, Load, Store
from ..tiling.space import Access, Step, access
from ..tiling.structure import Node
from ..tvm_ir import T
from ..workload import Graph
from ..workload.graph import Block
from ..workload.values import At, Read, reads
from .activations import ACCUMULATE
from .chain_tiling import ChainTiling
from .reference import larger
from .tile_writer import TileWriter, int64, only_if, rounded_up

TURNED = "turned"
"""Name of the blocks that copy a square of a weight which is to be transposed on the way."""


Copy: TypeAlias = Callable[[Sequence[tirx.Expr], tirx.Expr], None]
"""Writes the copy of an element of a weight: its place in the sum, and its column in a panel."""


class RegisterTiles(TileWriter):
    """Writes contractions whose sums stay in registers while they go over a tile.

    Tiles are allocated in whole register tiles.  What these compute beyond the last row or column
    is never read; operands are read no further than they go.
    """

    def __init__(
        self,
        graph: Graph,
        buffers: dict[str, tirx.Var],
        dims: Mapping[str, tirx.Expr],
        tiling: ChainTiling,
        registers: Registers,
    ):
        super().__init__(graph, buffers, dims, tiling, registers)
        self.panels: dict[str, tirx.Var] = {}
        self.packed: Access | None = None
        self.direct = False
        self.summed: dict[str, tirx.Expr] = {}
        self.panel_place: list[tirx.Expr] = []
        every = {step.out: sides_of(graph, self.space, step) for step in self.space.steps}
        self.sides = {out: sides for out, sides in every.items() if sides is not None}
        for row, column in self.sides.values():
            self._widen(row, registers.rows)
            self._widen(column, registers.width(self.schedule.tile[column]))

    def _widen(self, loop: str, part: int) -> None:
        whole = -(-self.schedule.tile[loop] // part) * part
        self.allocated[loop] = max(self.allocated[loop], whole)

    def allocate(self) -> None:
        """Allocate, for each contraction, columns of its weight that are read side by side too."""
        super().allocate()
        for step in self.space.steps:
            if self._weight(step) is not None:
                width = self._width(step)
                depth = prod(self.schedule.tile[n] for n in step.reduced)
                self.panels[step.out] = T.alloc_buffer([int64(depth), int64(width)], ACCUMULATE)

    def _weight(self, step: Step) -> Access | None:
        """Return the operand from memory that has the columns of a contraction, and no rows.

        Both operands may be of one tensor: places tell them apart.
        """
        _, column = self.sides.get(step.out, ("", ""))
        found = (read for read in step.reads if column in read.loops)
        return next((read for read in found if read.tensor not in self.space.step), None)

    def _width(self, step: Step) -> int:
        return self.registers.width(self.schedule.tile[self.sides[step.out][1]])

    def is_whole(self, step: Step) -> bool:
        """Tell whether a product is done in one go, from nothing."""
        again = {*step.reduced} & self.number.keys()
        begun = self.blocks[step.out].start is not None
        return step.out in self.sides and not again and not begun

    def behind(self, step: Step, body: Sequence[Node]) -> list[Step]:
        """Return the maps behind a product that can be done in its registers, one after another."""
        found: list[Step] = []
        last = step.out
        rounded = self.graph[last].rounds and self.graph[last].dtype != ACCUMULATE
        for node in body if self.is_whole(step) and not rounded else ():
            if isinstance(node, Load):
                continue
            if not isinstance(node, Compute) or last in self.space.results:
                break
            made = self.space.step[node.tensor]
            if self._readers(last) != [made.out] or not self._follows(made, step):
                break
            found.append(made)
            last = made.out
        return found

    def _readers(self, tensor: str) -> list[str]:
        return [s.out for s in self.space.steps if tensor in {r.tensor for r in s.reads}]

    def goes_out(self, step: Step, last: Step, body: Sequence[Node]) -> bool:
        """Tell whether register tiles of a product are stored as they are, and nothing reads them.

        Parameters
        ----------
        last : Step
            The last of the maps behind the product, or the product.
        body : sequence of Node
            What comes behind the product.
        """
        if not self.is_whole(step):
            return False
        rest = [n for n in body if not isinstance(n, Load) and n != Compute(last.out)]
        stored = any(isinstance(n, Store) and n.tensor == last.out for n in rest)
        (row, column), rows = self.sides[step.out], self.registers.rows
        exact = self._divides(row, rows) and self._divides(column, self._width(step))
        return stored and exact and not self._readers(last.out)

    def _divides(self, loop: str, part: int) -> bool:
        count = self.elements_of(loop)
        return isinstance(count, tirx.IntImm) and int(count) % part == 0

    def _follows(self, made: Step, step: Step) -> bool:
        """Tell whether a statement is a map of the elements of a product, in the same order."""
        column = self.sides[step.out][1]
        loops, exact = made.makes.loops, self._divides(column, self._width(step))
        beside = [r for r in made.reads if r.tensor not in self.space.step]
        ends = exact or not any(column in r.loops for r in beside)
        same = {*loops} == {*step.makes.loops} and loops[-1] == column
        return not made.reduced and same and ends and self.in_vectors(made)

    def register_tiles(self, step: Step, block: Block, behind: Sequence[Step]) -> None:
        """Write a contraction: for each panel of columns, its weight side by side, then rows."""
        (row, column), width = self.sides[step.out], self._width(step)
        outer = [n for n in step.makes.loops if n not in (row, column)]
        counts = [self.elements_of(n) for n in outer]
        counts.append(rounded_up(self.elements_of(column), width))
        with T.grid(*counts) as found:
            *places, panel = [found] if isinstance(found, ir.Var) else list(found)
            at = dict(zip(outer, places, strict=True)) | {column: panel * int64(width)}
            if step.out in self.panels:
                self._pack(step, block, at)
            with T.serial(rounded_up(self.elements_of(row), self.registers.rows)) as i:
                at[row] = i * int64(self.registers.rows)
                self._tile(step, block, at, behind)

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
            T.buffer_store(panel, self._read(read), [self._depth(reduced, over), c])

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
        apart = [at for at in weight.at if last in dict(at.terms)]
        neighbours = apart == [At(((last, 1),))] and weight.at[-1] == apart[0]
        found = neighbours and last in step.reduced and self._divides(last, self.registers.lanes)
        return last if found else None

    def _depth(self, reduced: Sequence[str], over: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return the row of a panel of an element of the sum."""
        found = int64(0)
        for name, place in zip(reduced, over, strict=True):
            found = found * int64(self.schedule.tile[name]) + place
        return found

    def _tile(
        self, step: Step, block: Block, first: Mapping[str, tirx.Expr], behind: Sequence[Step]
    ) -> None:
        """Write the sums of one register tile, which are added to the tile in the end."""
        (row, column), width, rows = self.sides[step.out], self._width(step), self.registers.rows
        reduced = sorted(step.reduced)
        sums = T.alloc_buffer([int64(rows), int64(width)], ACCUMULATE, scope="local")

        @contextmanager
        def elements(
            over: Sequence[tirx.Expr] = (), made: Step = step
        ) -> Iterator[tuple[tirx.Expr, tirx.Expr]]:
            with T.unroll(int64(rows)) as r, T.vectorized(int64(width)) as c:
                at = {**first, row: first[row] + r, column: first[column] + c}
                at |= dict(zip(reduced, over, strict=False))
                self.set_place(made, list(at), list(at.values()))
                self._keep_inside(made, row)
                self.panel_place = [self._depth(reduced, over), c] if over else []
                yield r, c

        with elements() as (r, c):
            T.buffer_store(sums, tirx.const(0.0, ACCUMULATE), [r, c])
        with T.grid(*(self.elements_of(n) for n in reduced)) as found:
            over = [found] if isinstance(found, ir.Var) else list(found)
            with elements(over) as (r, c):
                self.packed = self._weight(step)
                value = self._value(block.value)
                self.packed = None
                T.buffer_store(sums, sums[r, c] + value, [r, c])
        last = step
        for made in behind:
            with elements((), made) as (r, c):
                self.step, self.summed = made, {last.out: sums[r, c]}
                T.buffer_store(sums, self.mapped(made), [r, c])
            last, self.summed = made, {}
        out = self.buffers[last.out] if self.direct else self.tiles[last.out]
        with elements((), last) as (r, c):
            at = tuple(self.place(last, last.out))
            if self.direct:
                at = tuple(self._index(n) for n in self.blocks[last.out].at)
            value = sums[r, c] if self.is_whole(step) else out[at] + sums[r, c]
            T.buffer_store(out, value, list(at))
        self.step = step

    def _keep_inside(self, step: Step, row: str) -> None:
        """Read rows of operands no further than they go."""
        count = self.elements_of(row)
        if isinstance(count, tirx.IntImm) and int(count) % self.registers.rows == 0:
            return
        last = self.start_of(row) + count - int64(1)
        for axis, name in self.tiling.loop_of[step.out].items():
            if name == row:
                self.axes[axis] = tirx.min(self.axes[axis], last)

    def _read(self, read: Read) -> tirx.Expr:
        """Return an element, of the panel where it was copied."""
        if read.tensor in self.summed:
            return self.summed[read.tensor]
        if self.packed is not None and self._access(read) == self.packed:
            return self.panels[self.step.out][tuple(self.panel_place)]
        return super()._read(read)

    def _access(self, read: Read) -> Access:
        """Return an element that the current statement reads, in loops."""
        return access(read.tensor, read.at, self.tiling.loop_of[self.step.out])

    def is_row(self, step: Step) -> bool:
        """Tell whether a statement combines neighbours along one loop."""
        return len(step.reduced) == 1 and bool(step.makes.loops) and self.in_vectors(step)

    def row_in_vectors(self, step: Step, block: Block) -> None:
        """Write a sum or a maximum of neighbours: of every so many of them, then of these."""
        (loop,), lanes, spatial = step.reduced, self.registers.lanes, step.makes.loops
        count, some = self.elements_of(loop), [self.elements_of(n) for n in spatial]
        rest = count % int64(lanes)
        with T.grid(*some) as found:
            places = list(found) if len(some) > 1 else [found]
            parts = T.alloc_buffer([int64(lanes)], ACCUMULATE, scope="local")

            def add(place: tirx.Expr, at: tirx.Expr) -> None:
                self.set_place(step, (*spatial, loop), (*places, at))
                self.combine(block, parts, [place], self._combined(block))

            with T.vectorized(int64(lanes)) as c:
                T.buffer_store(parts, self._nothing(block), [c])
            with T.serial(count // int64(lanes)) as chunk, T.vectorized(int64(lanes)) as c:
                add(c, chunk * int64(lanes) + c)
            with T.serial(rest) as last:
                add(int64(0), count - rest + last)
            for half in (lanes >> n for n in range(1, lanes.bit_length())):
                with T.vectorized(int64(half)) as c:
                    self.combine(block, parts, [c], parts[c + int64(half)])
            self.set_place(step, spatial, places)
            self.combine(block, self.tiles[step.out], self.place(step, step.out), parts[int64(0)])

    def _combined(self, block: Block) -> tirx.Expr:
        """Return what is combined for an element: nothing where it is masked."""
        value, seen = self._value(block.value), self._seen(block)
        return value if seen is None else tirx.if_then_else(seen, value, self._nothing(block))

    def combine(
        self, block: Block, out: tirx.Var, at: Sequence[tirx.Expr], value: tirx.Expr
    ) -> None:
        """Add a value to an element of a sum, or make it the maximum of both."""
        total = out[tuple(at)].astype(self.dtype)
        total = total + value if block.combine == "sum" else larger(total, value)
        T.buffer_store(out, total.astype(str(out.ty.dtype)), list(at))
