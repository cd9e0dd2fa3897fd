"""A schedule of a chain on a CPU; elements of tiles: where they lie, how many, and in vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tvm import ir, tirx

from ..errors import LoweringError
from ..estimator.families.cpu_generated.price import Registers
from ..matching.expressions import int64
from ..tiling import Schedule
from ..tiling.axes import loop_names
from ..tiling.space import Step
from ..tvm_ir import IRBuilder, T
from ..workload import INTEGER_DTYPES, Dim, DynamicDim, Graph
from ..workload.roofline import Sizes
from ..workload.values import Read
from .activations import ACCUMULATE
from .reference import FUNCTIONS, Writer
from .stages import as_stored


def rounded_up(count: tirx.Expr, part: int) -> tirx.Expr:
    """Return how many parts hold so many elements."""
    if isinstance(count, tirx.IntImm):
        return int64(-(-int(count) // part))
    return (count + int64(part - 1)) // int64(part)


@contextmanager
def only_if(conditions: Sequence[tirx.Expr]) -> Iterator[None]:
    """Open a branch that is taken if all of some conditions hold."""
    if conditions:
        with T.If(tirx.all(*conditions)), T.Then():
            yield
    else:
        yield


class ChainTiling:
    """A schedule, and which loop each axis of each statement is."""

    def __init__(self, graph: Graph, schedule: Schedule, sizes: Sizes | None):
        self.schedule, self.space = schedule, schedule.space
        self.kept = dict(schedule.structure.kept)
        names, extents = loop_names(graph, sizes or {})
        self.loop_of: dict[str, dict[str, str]] = {}
        self.dims: dict[str, Dim] = dict(extents)
        for (number, axis), loop in names.items():
            block = graph.blocks[number]
            self.loop_of.setdefault(block.out, {})[axis] = loop
            size = next(a.size for a in (*block.axes, *block.reduced) if a.name == axis)
            if isinstance(size, DynamicDim):
                self.dims[loop] = size
        self._check()

    def _check(self) -> None:
        """Refuse what has no loops of this kind."""
        there = {name for _, around in self.schedule.structure.statements for name in around}
        held = {name for loops in self.kept.values() for name in loops}
        for name, dim in self.dims.items():
            if not isinstance(dim, int) and (name not in there or name in held):
                how = "has tiles that are kept" if name in held else "has one tile"
                raise LoweringError(f"{name} of the dynamic size {dim.name} {how}; must have loops")

    def growing(self, graph: Graph, step: Step) -> Iterator[tuple[Step, str]]:
        """Yield what a statement reads that is relative to a growing maximum, and the maximum."""
        for read in step.reads:
            made = self.space.step.get(read.tensor)
            if step.reduced and made is not None:
                yield from ((made, top) for top in self.partial(graph, made))

    def partial(self, graph: Graph, step: Step) -> tuple[str, ...]:
        """Return the maxima that a statement may read before they are complete."""
        makers = {b.out: b for b in graph.blocks}
        return tuple(
            dict.fromkeys(
                read.tensor
                for read in step.reads
                if read.tensor in makers and read.tensor not in step.waits
                if makers[read.tensor].combine == "max"
            )
        )


class TileWriter(Writer):
    """Knows the current element of a statement in its tile."""

    def __init__(
        self,
        graph: Graph,
        buffers: dict[str, tirx.Var],
        dims: Mapping[str, tirx.Expr],
        tiling: ChainTiling,
        registers: Registers,
    ):
        super().__init__(graph, buffers, dims)
        self.tiling, self.schedule, self.space = tiling, tiling.schedule, tiling.space
        self.registers = registers
        self.blocks = {b.out: b for b in graph.blocks}
        self.number: dict[str, tirx.Expr] = {}
        self.inner: dict[str, tirx.Expr] = {}
        self.tiles: dict[str, tirx.Var] = {}
        self.seen_maximum: dict[tuple[str, str], tirx.Var] = {}
        self.allocated = dict(self.schedule.tile)
        self.step: Step = self.space.steps[0]

    def allocate(self) -> None:
        """Allocate the tiles of what statements make, and the maxima that sums are relative to."""
        for step in self.space.steps:
            dtype = self.graph[step.out].dtype
            dtype = dtype if dtype in INTEGER_DTYPES else ACCUMULATE
            self.tiles[step.out] = self.local(step, step.out, dtype)
            for _, top in self.tiling.growing(self.graph, step):
                self.seen_maximum[step.out, top] = self.local(
                    self.space.step[top], step.out, ACCUMULATE
                )

    def local(self, step: Step, holder: str, dtype: str) -> tirx.Var:
        """Allocate tiles of the shape of one tensor, as many as are kept of another."""
        kept = self.tiling.kept.get(holder, ())
        shape = [self.schedule.trips[n] for n in kept]
        shape += [self.allocated[n] for n in step.makes.loops]
        # a buffer of the sblock would be moved into the innermost loop that all accesses share,
        # and be another in each of its iterations
        return T.alloc_buffer([int64(n) for n in shape] or [int64(1)], dtype)

    def place(self, step: Step, holder: str) -> list[tirx.Expr]:
        """Return the place of the current element in what `local` allocated."""
        kept = self.tiling.kept.get(holder, ())
        place = [self.number.get(n, int64(0)) for n in kept]
        return place + [self.inner[n] for n in step.makes.loops] or [int64(0)]

    def each(
        self, step: Step, loops: Sequence[str], write: Callable[[], None], vectors: bool = False
    ) -> None:
        """Write something for each element of a tile: for vectors of them, then for the rest.

        A statement that is not done in vectors is so if `vectors` says that what is written can be.
        """
        lanes = self.registers.lanes
        *outer, count = [self.elements_of(n) for n in loops] or [int64(1)]
        whole, rest = count // int64(lanes), count % int64(lanes)
        if not (vectors or self.in_vectors(step)) or (
            isinstance(whole, tirx.IntImm) and int(whole) == 0
        ):
            with self.elements(step, loops):
                write()
            return
        with T.grid(*outer, whole) as found:
            *places, chunk = list(found) if outer else [found]
            with T.vectorized(int64(lanes)) as lane:
                self.set_place(step, loops, [*places, chunk * int64(lanes) + lane])
                write()
        if isinstance(rest, tirx.IntImm) and int(rest) == 0:
            return
        with T.grid(*outer, rest) as found:
            *places, last = list(found) if outer else [found]
            self.set_place(step, loops, [*places, count - rest + last])
            write()

    def in_vectors(self, step: Step) -> bool:
        """Tell whether a statement is done for several elements at a time."""
        tensors = (step.out, *(read.tensor for read in step.reads))
        return {self.graph[t].dtype for t in tensors} <= {"float32", "float16", "bfloat16"}

    @contextmanager
    def elements(self, step: Step, loops: Sequence[str]) -> Iterator[None]:
        """Open loops over the elements of a tile, and set the axes of the statement."""
        counts = [self.elements_of(n) for n in loops] or [int64(1)]
        with T.grid(*counts) as found:
            found = [found] if isinstance(found, ir.Var) else list(found)
            IRBuilder.name_many([f"{n}_in" for n in loops] or ["one"], found)
            self.set_place(step, loops, found)
            yield

    def set_place(self, step: Step, loops: Sequence[str], places: Sequence[tirx.Expr]) -> None:
        """Set where in the tile the current element is, and the axes of the statement."""
        self.inner = dict(zip(loops, places, strict=False))
        self.axes = {
            axis: self.start_of(n) + self.inner[n]
            for axis, n in self.tiling.loop_of[step.out].items()
            if n in self.inner
        }

    def mapped(self, step: Step) -> tirx.Expr:
        """Return an element that is computed from others, as the tensor holds it."""
        tensor, value = self.graph[step.out], self._value(self.blocks[step.out].value)
        rounds = tensor.rounds and tensor.dtype not in INTEGER_DTYPES
        return as_stored(value, tensor.dtype) if rounds else value

    def start_of(self, name: str) -> tirx.Expr:
        """Return the first element of a loop in the current tile."""
        return self.number.get(name, int64(0)) * int64(self.schedule.tile[name])

    def elements_of(self, name: str) -> tirx.Expr:
        """Return how many elements of a loop the current tile has."""
        tile, dim = self.schedule.tile[name], self.tiling.dims[name]
        if isinstance(dim, int) and (dim % tile == 0 or name not in self.number):
            return int64(min(tile, dim))
        return tirx.min(int64(tile), self._size(dim) - self.start_of(name))

    def trips(self, name: str) -> tirx.Expr:
        """Return how many tiles a loop has."""
        dim, tile = self.tiling.dims[name], self.schedule.tile[name]
        if isinstance(dim, int):
            return int64(-(-dim // tile))
        return (self._size(dim) + int64(tile - 1)) // int64(tile)

    def _read(self, read: Read) -> tirx.Expr:
        """Return an element of an operand, or of the tile of an intermediate."""
        if read.tensor not in self.tiles:
            return super()._read(read)
        made, tensor = self.space.step[read.tensor], self.graph[read.tensor]
        value = self.tiles[read.tensor][tuple(self.place(made, read.tensor))].astype(self.dtype)
        sums = bool(made.reduced) and tensor.dtype not in INTEGER_DTYPES  # maps are rounded already
        if tensor.rounds and self.dtype == ACCUMULATE and sums:
            value = as_stored(value, tensor.dtype)
        if read.tensor not in self.tiling.partial(self.graph, self.step):
            return value  # else: nothing seen so far is no reason for a NaN
        over = self.space.step[read.tensor].reduced
        last = [self.number[n] == self.trips(n) - int64(1) for n in over if n in self.number]
        return tirx.Select(tirx.all(*last), value, FUNCTIONS["finite"](value)) if last else value
