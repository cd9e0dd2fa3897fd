"""Register tiles of a chain's products, and what it costs as one parallel loop over tiles on a CPU.

Cycles of statements, as often as the loops around them ask for: register tiles of products, packing
of weights, vectors of everything else.  They are spread over cores in whole blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ....hardware import DeviceSpec
from ....tiling import Compute, IterationSpace, Schedule, Store
from ....tiling.space import Access, Step
from ....workload import INTEGER_DTYPES
from ....workload.graph import Graph
from ....workload.roofline import is_contraction
from ... import cpu_cost
from ...prediction import HALF_DTYPES, Prediction, ceil_div

FLOAT_BYTES = 4

MOST_ROWS, VECTORS = 8, 2
"""A register tile has 8 rows at most, and rows of 2 vectors: 8 x 32 in float32 is as fast as 4 x
32, and faster than 6 x 32, 12 x 32 and 6 x 64 (`2026-11-24-cpu_generated.md`)."""

DOT_COLUMNS = 4
"""A row of a tile of dot products has 4 results: weights that lie along their sums are read as fast
as that, and the rows stay in registers."""

STORE_CYCLES = 3
"""A vector of sums takes 3 cycles for each tile: set to zero, added to the tile, stored.
Counted."""

PACK_CYCLES, TURN_CYCLES, GATHER_CYCLES = 2.4, 4.8, 32.0
"""Cycles to copy a vector of a weight from wherever it is cached: of neighbours; in squares that
are transposed; of elements that lie a row apart.  Fitted to tiles of 64 and of 128 rows."""

WIDEN_CYCLES = 2.0
"""A vector of rows of half precision takes 2 cycles to be copied as float32: load, convert, store.
Counted."""

MOVE_CYCLES = 1.0
"""A vector that a statement loads or stores takes 1 cycle.  Counted."""

BLOCK_CYCLES = 2000
"""A block takes 2000 cycles beside its statements: buffers are asked for, and given back.
Fitted."""


@dataclass(frozen=True)
class Registers:
    """A tile of sums in vector registers."""

    rows: int = 8
    columns: int = 32
    """Of the tile; a tensor that has fewer columns has narrower ones."""
    lanes: int = 16
    """Elements of float32 of a vector; `columns` is that times a power of two."""

    @staticmethod
    def of(dev: DeviceSpec) -> Registers:
        """Return the register tiles of a CPU: beside the sums are a row of weights and a factor."""
        lanes = dev.vector_bytes // 4
        rows = (dev.vector_registers - VECTORS - 1) // VECTORS
        return Registers(min(MOST_ROWS, rows), VECTORS * lanes, lanes)

    def width(self, columns: int) -> int:
        """Return the columns of a register tile where a tensor has so many: few are in vain."""
        widths = [self.columns >> n for n in range((self.columns // self.lanes).bit_length())]
        return min(widths, key=lambda w: -(-columns // w) * w)


def other_dtypes(graph: Graph) -> str | None:
    """Return a sentence on tensors that no kernel of a CPU takes.

    Half precision is for chains of products and maps: norms and softmaxes of it were not measured.
    """
    plain = all(is_contraction(b) for b in graph.blocks if b.combine)
    known = {"float32", *HALF_DTYPES} if plain else {"float32"}
    other = ", ".join(sorted({t.dtype for t in graph.tensors} - known))
    return f"tensors are of {other}, generated kernels of a CPU have float32" if other else None


def sides_of(graph: Graph, space: IterationSpace, step: Step) -> tuple[str, str] | None:
    """Return the loops of the rows and columns of a product's register tiles.

    None where there are none: elements are masked, or the operands are not a row and a column.
    """
    block = next(b for b in graph.blocks if b.out == step.out)
    batch = {a.name for a in space.loops if a.batch}
    loops = [n for n in step.makes.loops if n not in batch]
    masked = block.band is not None or block.where is not None
    whole = graph[step.out].dtype in INTEGER_DTYPES
    if not step.dtype or masked or whole or len(loops) < 2 or len(step.reads) != 2:
        return None
    row, column = loops[-2:]
    found = sorted((row in read.loops, column in read.loops) for read in step.reads)
    return (row, column) if found == [(False, True), (True, False)] else None


class ChainPrice:
    """The price of a schedule on a CPU.

    `packs_once`: weights are packed in front of all blocks, not by each.
    """

    def __init__(self, graph: Graph, schedule: Schedule, dev: DeviceSpec, packs_once: bool = False):
        self.graph, self.schedule, self.dev = graph, schedule, dev
        self.packs_once = packs_once
        self.registers = Registers.of(dev)
        self.tile, self.space = schedule.tile, schedule.space
        sides = {step.out: sides_of(graph, self.space, step) for step in self.space.steps}
        self.sides = {out: each for out, each in sides.items() if each is not None}
        self.behind = self._behind()
        self.l2_cycles_per_byte = cpu_cost.l2_cycles_per_byte(dev)

    def _behind(self) -> dict[str, str]:
        """Return the maps that are done in registers of a product, and what each reads of it."""
        several = {name for name, count in self.schedule.trips.items() if count > 1}
        read_by = Counter(r.tensor for s in self.space.steps for r in s.reads)
        found: dict[str, str] = {}
        for step in (s for s in self.space.steps if not s.reduced):
            for read in step.reads:
                made = self.space.step.get(read.tensor)
                if made is None or read_by[made.out] > 1 or read.loops != step.makes.loops:
                    continue
                if made.out in found or (made.out in self.sides and not made.reduced & several):
                    found[step.out] = made.out
        return found

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of the tiles of a block, with packed weights."""
        kept = [s for s in self.space.steps if s.out not in self.behind.values()]
        tiles = [prod(map(self._allocated, s.makes.loops)) for s in kept]
        packed = (self.space.step[out] for out in self.sides if not self.packs_once)
        panels = [prod(self.tile[n] for n in s.reduced) * self.registers.columns for s in packed]
        rows = [self._narrow_rows(self.space.step[out]) for out in self.sides]
        wide = [prod(map(self._allocated, read.loops)) for read in rows if read is not None]
        return FLOAT_BYTES * (sum(tiles) + sum(panels) + sum(wide))

    def _allocated(self, loop: str) -> int:
        """Return the elements of a buffer along a loop: whole register tiles."""
        part = 1
        for row, column in self.sides.values():
            part = max(part, self.registers.rows if loop == row else 1)
            part = max(part, self.registers.width(self.tile[loop]) if loop == column else 1)
        return ceil_div(self.tile[loop], part) * part

    def at(self, sizes: Mapping[str, int], distinct: float, flops: float) -> Prediction:
        """Return the price at sizes of the loops.

        `sizes`: elements of each loop.
        `distinct`: bytes of the operands.
        `flops`: of the products.
        """
        trips = {name: ceil_div(count, self.tile[name]) for name, count in sizes.items()}
        cycles = 0.0
        for statement, around in self.schedule.structure.statements:
            if isinstance(statement, Compute):
                step = self.space.step[statement.tensor]
                again = prod(trips[n] for n in around if n not in step.loops)
                cycles += again * self._compute(step, sizes, trips)
            elif isinstance(statement, Store):
                vectors = self._vectors(statement.what.loops, sizes)
                cycles += vectors * 2 * MOVE_CYCLES
        grid = self.schedule.structure.grid
        blocks = prod(trips[n] for n in grid)
        panels = self._panels(sizes) if self.packs_once else {}
        cycles += blocks * self._streamed(panels)
        whole = cycles * prod(min(1.0, self.tile[n] / sizes[n]) for n in grid)  # a block, no edge
        each = ceil_div(blocks, self.dev.sm_count)
        busiest = min(each * whole, cycles) + each * BLOCK_CYCLES
        busiest += sum(panels[step] * self._copy_cycles(step) for step in panels) / (
            self.registers.lanes * self.dev.sm_count
        )
        traffic = cpu_cost.Traffic(busiest, distinct, 0.0, 1 + len(panels), blocks)
        return cpu_cost.in_one_loop(traffic, self.dev, flops, len(self.sides))

    def _panels(self, sizes: Mapping[str, int]) -> dict[Step, int]:
        """Return the elements of each weight that is packed."""
        found = {}
        for out, (row, column) in self.sides.items():
            step = self.space.step[out]
            if self._weight(step).tensor not in self.space.step:
                outer = [n for n in step.loops if n not in (row, column)]
                width = self.registers.width(self.tile[column])
                columns = self._parts(column, width, sizes) * width
                found[step] = columns * prod(sizes[n] for n in outer)
        return found

    def _streamed(self, panels: Mapping[Step, int]) -> float:
        """Return the cycles in which a block waits for panels, once for each tile of rows."""
        total = FLOAT_BYTES * sum(panels.values())
        fits = total <= self.dev.l2_bytes
        return total * (self.l2_cycles_per_byte if fits else self.dev.l3_cycles_per_byte)

    def _vectors(self, loops: Iterable[str], sizes: Mapping[str, int]) -> float:
        return prod(sizes[n] for n in loops) / self.registers.lanes

    def _compute(self, step: Step, sizes: Mapping[str, int], trips: Mapping[str, int]) -> float:
        """Return the cycles of a statement for all of its tiles."""
        if step.out in self.sides:
            return sum(self._product(step, sizes, trips))
        slots = sum(count * self._vectors(loops, sizes) for loops, count in step.slots)
        if step.out in self.behind:
            beside = [r for r in step.reads if r.tensor not in self.space.step]
            moved = sum(self._vectors(a.loops, sizes) for a in beside)
            return cpu_cost.SLOT_CYCLES * slots + MOVE_CYCLES * moved
        moved = sum(self._vectors(a.loops, sizes) for a in (step.makes, *step.reads))
        waits = (
            cpu_cost.FMA_LATENCY_CYCLES * self._vectors(step.loops, sizes) if step.reduced else 0.0
        )
        return max(cpu_cost.SLOT_CYCLES * slots + MOVE_CYCLES * moved, waits)

    def _product(
        self, step: Step, sizes: Mapping[str, int], trips: Mapping[str, int]
    ) -> Iterator[float]:
        """Yield the cycles of register tiles, of storing them, and of packing a weight."""
        (row, column), rows, lanes = self.sides[step.out], self.registers.rows, self.registers.lanes
        width = self.registers.width(self.tile[column])
        panels = self._parts(column, width, sizes) * prod(
            sizes[n] for n in step.makes.loops if n not in (row, column)
        )
        tiles, vectors = panels * self._parts(row, rows, sizes), width // lanes
        depth, times = (prod(each[n] for n in step.reduced) for each in (sizes, trips))
        streamed = rows * FLOAT_BYTES * self.l2_cycles_per_byte if self._streams(step, row) else 0.0
        yield tiles * depth * cpu_cost.vectors_step(rows, vectors, streamed, self.dev)
        yield tiles * times * (cpu_cost.TILE_CYCLES + STORE_CYCLES * rows * vectors)
        narrow = self._narrow_rows(step)
        if narrow is not None:
            again = prod(trips[n] for n in step.makes.loops if n not in narrow.loops)
            yield again * self._vectors(narrow.loops, sizes) * WIDEN_CYCLES
        if self._weight(step).tensor not in self.space.step and not self.packs_once:
            yield panels * trips[row] * depth * vectors * self._copy_cycles(step)

    def _parts(self, loop: str, part: int, sizes: Mapping[str, int]) -> int:
        """Return into how many parts the tiles of a loop are cut, the last tile too."""
        whole, rest = divmod(sizes[loop], self.tile[loop])
        return whole * ceil_div(self.tile[loop], part) + ceil_div(rest, part)

    def _streams(self, step: Step, row: str) -> bool:
        """Tell whether rows come from L2 for each panel: they and the panel are more than L1."""
        depth = prod(self.tile[n] for n in step.reduced)
        held = depth * (self.tile[row] + self.registers.columns)
        return held * FLOAT_BYTES > self.dev.l1_bytes

    def _narrow_rows(self, step: Step) -> Access | None:
        """Return the rows of a product that are read in half precision, and copied as float32."""
        row, _ = self.sides[step.out]
        read = next(read for read in step.reads if row in read.loops)
        is_wide = read.tensor in self.space.step or self.graph[read.tensor].dtype == "float32"
        return None if is_wide else read

    def _weight(self, step: Step) -> Access:
        column = self.sides[step.out][1]
        return next(read for read in step.reads if column in read.loops)

    def _copy_cycles(self, step: Step) -> float:
        """Return the cycles to copy a vector of a weight."""
        loops = self._weight(step).loops
        if loops[-1] == self.sides[step.out][1]:
            return PACK_CYCLES
        is_square = self.tile[loops[-1]] % self.registers.lanes == 0
        return TURN_CYCLES if is_square else GATHER_CYCLES
