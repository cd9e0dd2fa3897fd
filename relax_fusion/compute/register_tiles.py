"""Sums of products in register tiles, and sums and maxima of rows in vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tvm import ir, tirx

from ..estimator.families.cpu_generated.price import DOT_COLUMNS
from ..matching.expressions import int64
from ..tiling import Compute, Load, Store
from ..tiling.space import Step
from ..tiling.structure import Node
from ..tvm_ir import T
from ..workload.graph import Block
from ..workload.values import Read
from .activations import ACCUMULATE
from .reference import larger
from .tile_writer import rounded_up
from .weight_panels import PANEL, WeightPanels


class RegisterTiles(WeightPanels):
    """Writes contractions whose sums stay in registers while they go over a tile.

    What register tiles compute beyond the last row or column is never read; operands are read no
    further than they go.
    """

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
        fits = self.is_whole(step) and not rounded and self._dots_along(step) is None
        for node in body if fits else ():
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

        `last` is the last of the maps behind the product, or the product; `body` is what comes
        behind.
        """
        if not self.is_whole(step) or self._dots_along(step) is not None:
            return False
        rest = [n for n in body if not isinstance(n, Load) and n != Compute(last.out)]
        stored = any(isinstance(n, Store) and n.tensor == last.out for n in rest)
        (row, column), rows = self.sides[step.out], self.registers.rows
        exact = self._divides(row, rows) and self._divides(column, self._width(step))
        return stored and exact and not self._readers(last.out)

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
        if step.out in self.wide:
            self.widen_rows(step, block)
        outer = [n for n in step.makes.loops if n not in (row, column)]
        counts = [self.elements_of(n) for n in outer]
        counts.append(rounded_up(self.elements_of(column), width))
        with T.grid(*counts) as found:
            *places, panel = [found] if isinstance(found, ir.Var) else list(found)
            at = dict(zip(outer, places, strict=True)) | {column: panel * int64(width)}
            self.panel = []
            if self.packing == "blocks" and step.out in self.panels:
                self._pack(step, block, at)
            elif step.out in self.panels:
                number = int64(0)
                for name, trips in self._panel_trips(step).items():
                    own = panel if name == PANEL else self.number.get(name, int64(0))
                    number = number * trips + own
                self.panel = [number]
            with T.serial(rounded_up(self.elements_of(row), self.registers.rows)) as i:
                at[row] = i * int64(self.registers.rows)
                along = self._dots_along(step)
                if along is None:
                    self._tile(step, block, at, behind)
                else:
                    self._dots(step, block, at, along)

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
                self._keep_inside(made, row, rows)
                self.panel_place = [self._depth(reduced, over), c] if over else []
                yield r, c

        with elements() as (r, c):
            T.buffer_store(sums, tirx.const(0.0, ACCUMULATE), [r, c])
        with T.grid(*(self.elements_of(n) for n in reduced)) as found:
            over = [found] if isinstance(found, ir.Var) else list(found)
            with elements(over) as (r, c):
                self.packed = self._weight(step) if step.out in self.panels else None
                self.multiplies = step.out in self.wide
                value = self._value(block.value)
                self.packed, self.multiplies = None, False
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

    def _dots(self, step: Step, block: Block, first: Mapping[str, tirx.Expr], along: str) -> None:
        """Write a tile of dot products: a vector of sums for each, added up in the end."""
        row, column = self.sides[step.out]
        rows, columns, lanes = self.registers.rows, DOT_COLUMNS, self.registers.lanes
        reduced, out = sorted(step.reduced), self.tiles[step.out]
        sums = T.alloc_buffer(list(map(int64, (rows, columns, lanes))), ACCUMULATE, scope="local")

        @contextmanager
        def results(count: int, over: Sequence[tirx.Expr] = ()) -> Iterator[list[tirx.Expr]]:
            with T.unroll(int64(rows)) as r, T.unroll(int64(columns)) as c:  # noqa: SIM117
                with T.vectorized(int64(count)) as lane:
                    at = {**first, row: first[row] + r, column: first[column] + c}
                    at |= dict(zip(reduced, over, strict=False))
                    if over:
                        at[along] = at[along] * int64(lanes) + lane
                    self.set_place(step, list(at), list(at.values()))
                    self._keep_inside(step, row, rows)
                    self._keep_inside(step, column, columns)
                    yield [r, c, lane]

        with results(lanes) as place:
            T.buffer_store(sums, tirx.const(0.0, ACCUMULATE), place)
        counts = [self.elements_of(n) // int64(lanes if n == along else 1) for n in reduced]
        with T.grid(*counts) as found:
            over = [found] if isinstance(found, ir.Var) else list(found)
            with results(lanes, over) as place:
                T.buffer_store(sums, sums[tuple(place)] + self._value(block.value), place)
        for half in (lanes >> n for n in range(1, lanes.bit_length())):
            with results(half) as (r, c, lane):
                value = sums[r, c, lane] + sums[r, c, lane + int64(half)]
                T.buffer_store(sums, value, [r, c, lane])
        with results(1) as (r, c, _):
            at, value = self.place(step, step.out), sums[r, c, int64(0)]
            T.buffer_store(out, value if self.is_whole(step) else out[tuple(at)] + value, at)

    def _keep_inside(self, step: Step, loop: str, part: int) -> None:
        """Read operands no further along a loop than they go."""
        count = self.elements_of(loop)
        if isinstance(count, tirx.IntImm) and int(count) % part == 0:
            return
        last = self.start_of(loop) + count - int64(1)
        for axis, name in self.tiling.loop_of[step.out].items():
            if name == loop:
                self.axes[axis] = tirx.min(self.axes[axis], last)

    def _read(self, read: Read) -> tirx.Expr:
        """Return an element, of the panel where it was copied."""
        if read.tensor in self.summed:
            return self.summed[read.tensor]
        if self.packed is not None and self._access(read) == self.packed:
            return self.panels[self.step.out][(*self.panel, *self.panel_place)]
        if self.multiplies and self._access(read) == self._narrow_rows(self.step):
            row, _ = self.sides[self.step.out]
            return self.wide[self.step.out][self.inner[row], self.panel_place[0]]
        return super()._read(read)

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
