"""A block graph as loops over tiles, as a schedule of the chain engine orders them, for a CPU.

Blocks of the grid are iterations of one parallel loop.  Tiles of intermediates and sums stay in
buffers of their block, in float32; operands are read where they lie, and the last tile of an axis
has fewer elements where its size asks for it.  A sum of what is relative to a maximum that still
grows is scaled whenever the maximum does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tvm import ir, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..errors import LoweringError
from ..tiling import Compute, Load, Loop, Schedule, Store
from ..tiling.space import Step
from ..tiling.structure import Node
from ..workload import INTEGER_DTYPES, Graph
from ..workload.graph import Block
from ..workload.roofline import Sizes
from ..workload.values import Read
from .activations import ACCUMULATE
from .chain_tiling import ChainTiling
from .reference import FUNCTIONS, Writer, declare, dims_of
from .stages import as_stored

REGISTERS = (4, 32)
"""Rows and columns of a tile of sums in registers: 8 vectors of AVX-512, 16 of AVX2."""


def scheduled_chain(graph: Graph, schedule: Schedule, sizes: Sizes | None = None) -> tirx.PrimFunc:
    """Return the function that computes a graph tile by tile, as a schedule says.

    Parameters
    ----------
    graph : Graph
        What is computed.
    schedule : Schedule
        Of ``iteration_space(graph, sizes)``.
    sizes : mapping of str to int, optional
        The sizes of the dynamic dimensions that the schedule is made for.  The function takes
        others too, from 1 on.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are the operands of the graph.  It needs no further schedule.

    Raises
    ------
    LoweringError
        If a dynamic dimension has one tile, or tiles that are kept.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        params = declare(graph)
        operands = (*graph.inputs, *graph.outputs)
        buffers = {o.name: p for o, p in zip(operands, params, strict=True)}
        _TileWriter(
            graph, buffers, dims_of(graph, params), ChainTiling(graph, schedule, sizes)
        ).run()
    return builder.get()


def _int64(value: int) -> tirx.Expr:
    return tirx.IntImm("int64", value)


@contextmanager
def _only_if(conditions: Sequence[tirx.Expr]) -> Iterator[None]:
    """Open a branch that is taken if all of some conditions hold."""
    if conditions:
        with T.If(tirx.all(*conditions)), T.Then():
            yield
    else:
        yield


class _TileWriter(Writer):
    """Writes statements as loops over tiles."""

    def __init__(
        self,
        graph: Graph,
        buffers: dict[str, tirx.Var],
        dims: Mapping[str, tirx.Expr],
        tiling: ChainTiling,
    ):
        super().__init__(graph, buffers, dims)
        self.tiling, self.schedule, self.space = tiling, tiling.schedule, tiling.space
        self.blocks = {b.out: b for b in graph.blocks}
        self.number: dict[str, tirx.Expr] = {}
        self.inner: dict[str, tirx.Expr] = {}
        self.tiles: dict[str, tirx.Var] = {}
        self.seen_maximum: dict[tuple[str, str], tirx.Var] = {}
        self.step: Step = self.space.steps[0]

    def run(self) -> None:
        """Write the parallel loop over the grid, and its body."""
        grid = self.schedule.structure.grid
        trips = [self._trips(name) for name in grid]
        count = _int64(1)
        for each in trips:
            count = count * each
        with T.parallel(count) as loop:
            IRBuilder.name("block", loop)
            with T.sblock("tile"):
                block = T.axis.spatial(count, loop)
                IRBuilder.name("v_block", block)
                for name, each in reversed(list(zip(grid, trips, strict=True))):
                    self.number[name] = block % each
                    block = block // each
                self._allocate()
                self._body(self.schedule.structure.body)

    def _allocate(self) -> None:
        """Allocate the tiles of what statements make, and the maxima that sums are relative to."""
        for step in self.space.steps:
            dtype = self.graph[step.out].dtype
            dtype = dtype if dtype in INTEGER_DTYPES else ACCUMULATE
            self.tiles[step.out] = self._local(step, step.out, dtype)
            for _, top in self.tiling.growing(self.graph, step):
                self.seen_maximum[step.out, top] = self._local(
                    self.space.step[top], step.out, ACCUMULATE
                )

    def _local(self, step: Step, holder: str, dtype: str) -> tirx.Var:
        """Allocate tiles of the shape of one tensor, as many as are kept of another."""
        kept = self.tiling.kept.get(holder, ())
        shape = [self.schedule.trips[n] for n in kept]
        shape += [self.schedule.tile[n] for n in step.makes.loops]
        # a buffer of the sblock would be moved into the innermost loop that all accesses share,
        # and be another in each of its iterations
        return T.alloc_buffer([_int64(n) for n in shape] or [_int64(1)], dtype)

    def _place(self, step: Step, holder: str) -> list[tirx.Expr]:
        """Return the place of the current element in what `_local` allocated."""
        kept = self.tiling.kept.get(holder, ())
        place = [self.number.get(n, _int64(0)) for n in kept]
        return place + [self.inner[n] for n in step.makes.loops] or [_int64(0)]

    def _body(self, body: tuple[Node, ...]) -> None:
        """Write loops and statements in order."""
        for node in body:
            if isinstance(node, Loop):
                with T.serial(self._trips(node.name)) as loop:
                    IRBuilder.name(node.name, loop)
                    self.number[node.name] = loop
                    self._body(node.body)
                del self.number[node.name]
            elif isinstance(node, Compute):
                self._compute(self.space.step[node.tensor], self.blocks[node.tensor])
            elif isinstance(node, Store):
                self._store_tile(self.space.step[node.tensor])
            else:
                assert isinstance(node, Load)  # operands are read where they lie

    def _compute(self, step: Step, block: Block) -> None:
        """Write a statement for a tile."""
        tensor = self.graph[step.out]
        whole = bool(block.combine) and tensor.dtype in INTEGER_DTYPES
        self.dtype, self.step = "int32" if whole else ACCUMULATE, step
        out, spatial = self.tiles[step.out], step.makes.loops
        if not block.combine:
            with self._elements(step, spatial):
                value = self._value(block.value)
                if tensor.rounds and tensor.dtype not in INTEGER_DTYPES:
                    value = as_stored(value, tensor.dtype)
                value = value.astype(str(out.ty.dtype))
                T.buffer_store(out, value, self._place(step, step.out))
            return
        self._begin(step, block)
        self._rescale(step)
        if self._in_registers(step, block):
            self._register_tiles(step, block)
            return
        order = (*spatial, *sorted(step.reduced))
        if step.dtype and spatial:  # neighbouring columns are a vector
            order = (*spatial[:-1], *sorted(step.reduced), spatial[-1])
        with self._elements(step, order):
            value, seen = self._value(block.value), self._seen(block)
            if seen is not None:
                value = tirx.if_then_else(seen, value, self._nothing(block))
            place = self._place(step, step.out)
            total = out[tuple(place)].astype(self.dtype)
            total = total + value if block.combine == "sum" else tirx.max(total, value)
            T.buffer_store(out, total.astype(str(out.ty.dtype)), place)

    def _in_registers(self, step: Step, block: Block) -> bool:
        """Tell whether tiles of a contraction are whole register tiles, and nothing is masked."""
        if not step.dtype or self.dtype != ACCUMULATE or block.combine != "sum":
            return False
        shape = [self._elements_of(n) for n in step.makes.loops[-2:]]
        whole = all(
            isinstance(count, tirx.IntImm) and int(count) % part == 0
            for count, part in zip(shape, REGISTERS, strict=False)
        )
        return len(shape) == 2 and whole and block.band is None and block.where is None

    def _register_tiles(self, step: Step, block: Block) -> None:
        """Write a contraction whose sums stay in registers while it goes over the tile."""
        *outer, row, column = step.makes.loops
        (rows, columns), reduced = REGISTERS, sorted(step.reduced)
        counts = [self._elements_of(n) for n in (*outer, row, column)]
        counts[-2:] = [_int64(int(n) // p) for n, p in zip(counts[-2:], REGISTERS, strict=True)]
        out = self.tiles[step.out]
        with T.grid(*counts) as places:
            *first, i, j = places
            sums = T.alloc_buffer([_int64(rows), _int64(columns)], ACCUMULATE, scope="local")

            @contextmanager
            def elements(*over: tirx.Expr) -> Iterator[tuple[tirx.Expr, tirx.Expr]]:
                with T.unroll(_int64(rows)) as r, T.vectorized(_int64(columns)) as c:
                    spots = (*first, i * _int64(rows) + r, j * _int64(columns) + c, *over)
                    self._set_place(step, (*step.makes.loops, *reduced), spots)
                    yield r, c

            with elements() as (r, c):
                T.buffer_store(sums, out[tuple(self._place(step, step.out))], [r, c])
            with T.grid(*(self._elements_of(n) for n in reduced)) as found:
                over = [found] if isinstance(found, ir.Var) else list(found)
                with elements(*over) as (r, c):
                    T.buffer_store(sums, sums[r, c] + self._value(block.value), [r, c])
            with elements() as (r, c):
                T.buffer_store(out, sums[r, c], self._place(step, step.out))

    def _begin(self, step: Step, block: Block) -> None:
        """Write the start of a sum or a maximum, in the first iteration of its loops."""
        out = self.tiles[step.out]
        first = [self.number[n] == _int64(0) for n in sorted(step.reduced) if n in self.number]
        with _only_if(first), self._elements(step, step.makes.loops):
            start = self._start(block).astype(str(out.ty.dtype))
            T.buffer_store(out, start, self._place(step, step.out))
        for _, top in self.tiling.growing(self.graph, step):
            maximum = self.space.step[top]
            with _only_if(first), self._elements(step, maximum.makes.loops):
                place = self._place(maximum, step.out)
                T.buffer_store(self.seen_maximum[step.out, top], self._maximum(top), place)

    def _rescale(self, step: Step) -> None:
        """Write the scaling of a sum by how much the maxima have grown since it was added to."""
        out, growing = self.tiles[step.out], tuple(self.tiling.growing(self.graph, step))
        for made, top in growing:
            maximum = self.space.step[top]
            if {*self.tiling.kept.get(made.out, ())} & maximum.reduced:
                raise LoweringError(
                    f"{made.out} is kept while {top}, which it is relative to, grows"
                )
            before = self.seen_maximum[step.out, top]
            with self._elements(step, step.makes.loops):
                old, new = before[tuple(self._place(maximum, step.out))], self._maximum(top)
                one = tirx.const(1.0, ACCUMULATE)
                grown = tirx.Select(old == new, one, te.exp(old - new))
                place = self._place(step, step.out)
                T.buffer_store(out, out[tuple(place)] * grown, place)
        for top in dict.fromkeys(top for _, top in growing):  # two factors may go by one maximum
            maximum, before = self.space.step[top], self.seen_maximum[step.out, top]
            with self._elements(step, maximum.makes.loops):
                T.buffer_store(before, self._maximum(top), self._place(maximum, step.out))

    def _maximum(self, name: str) -> tirx.Expr:
        """Return the maximum of the current row, as far as it is known."""
        step = self.space.step[name]
        return self.tiles[name][tuple(self._place(step, name))]

    def _store_tile(self, step: Step) -> None:
        """Write a tile of a result to memory."""
        out = self.buffers[step.out]
        with self._elements(step, step.makes.loops):
            at = [self._index(c) for c in self.blocks[step.out].at]
            value = self.tiles[step.out][tuple(self._place(step, step.out))]
            T.buffer_store(out, value.astype(str(out.ty.dtype)), at)

    @contextmanager
    def _elements(self, step: Step, loops: Sequence[str]) -> Iterator[None]:
        """Open loops over the elements of a tile, and set the axes of the statement."""
        counts = [self._elements_of(n) for n in loops] or [_int64(1)]
        with T.grid(*counts) as found:
            found = [found] if isinstance(found, ir.Var) else list(found)
            IRBuilder.name_many([f"{n}_in" for n in loops] or ["one"], found)
            self._set_place(step, loops, found)
            yield

    def _set_place(self, step: Step, loops: Sequence[str], places: Sequence[tirx.Expr]) -> None:
        """Set where in the tile the current element is, and the axes of the statement."""
        self.inner = dict(zip(loops, places, strict=False))
        self.axes = {
            axis: self._start_of(n) + self.inner[n]
            for axis, n in self.tiling.loop_of[step.out].items()
            if n in self.inner
        }

    def _start_of(self, name: str) -> tirx.Expr:
        return self.number.get(name, _int64(0)) * _int64(self.schedule.tile[name])

    def _elements_of(self, name: str) -> tirx.Expr:
        """Return how many elements of a loop the current tile has."""
        tile, dim = self.schedule.tile[name], self.tiling.dims[name]
        if isinstance(dim, int) and (dim % tile == 0 or name not in self.number):
            return _int64(min(tile, dim))
        return tirx.min(_int64(tile), self._size(dim) - self._start_of(name))

    def _trips(self, name: str) -> tirx.Expr:
        dim, tile = self.tiling.dims[name], self.schedule.tile[name]
        if isinstance(dim, int):
            return _int64(-(-dim // tile))
        return (self._size(dim) + _int64(tile - 1)) // _int64(tile)

    def _read(self, read: Read) -> tirx.Expr:
        """Return an element of an operand, or of the tile of an intermediate."""
        if read.tensor not in self.tiles:
            return super()._read(read)
        made, tensor = self.space.step[read.tensor], self.graph[read.tensor]
        value = self.tiles[read.tensor][tuple(self._place(made, read.tensor))].astype(self.dtype)
        if tensor.rounds and self.dtype == ACCUMULATE and tensor.dtype not in INTEGER_DTYPES:
            value = as_stored(value, tensor.dtype)
        if read.tensor not in self.tiling.partial(self.graph, self.step):
            return value  # else: nothing seen so far is no reason for a NaN
        over = self.space.step[read.tensor].reduced
        last = [self.number[n] == self._trips(n) - _int64(1) for n in over if n in self.number]
        return tirx.Select(tirx.all(*last), value, FUNCTIONS["finite"](value)) if last else value
