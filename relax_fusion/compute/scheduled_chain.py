"""A block graph as loops over tiles, as a schedule of the chain engine orders them, for a CPU.

Blocks of the grid are iterations of one parallel loop.  Tiles of intermediates and sums stay in
buffers of their block, in float32; operands are read where they lie, and the last tile of an axis
has fewer elements where its size asks for it.  A sum of what is relative to a maximum that still
grows is scaled whenever the maximum does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from tvm import te, tirx

from ..errors import LoweringError
from ..estimator.families.cpu_generated.price import Registers
from ..matching.expressions import int64
from ..tiling import Compute, Load, Loop, Schedule, Store
from ..tiling.space import Step
from ..tiling.structure import Node
from ..tvm_ir import IRBuilder, T
from ..workload import INTEGER_DTYPES, Graph, Operand
from ..workload.graph import Block
from ..workload.roofline import Sizes
from .activations import ACCUMULATE
from .reference import declare, dims_of
from .register_tiles import RegisterTiles
from .tile_writer import ChainTiling, only_if
from .weight_panels import Packing


def scheduled_chain(
    graph: Graph,
    schedule: Schedule,
    sizes: Sizes | None = None,
    registers: Registers = Registers(),  # noqa: B008 - it cannot change
    packing: Packing = "blocks",
) -> tirx.PrimFunc:
    """Return the function that computes a graph tile by tile, as a schedule says.

    Its parameters are the operands of the graph.  It needs no further schedule.

    `schedule`: of ``iteration_space(graph, sizes)``.
    `sizes`: the sizes of the dynamic dimensions that the schedule is made for.  The function takes
    others too, from 1 on.
    `registers`: the register tiles of contractions, and the lanes of vectors.
    `packing`: when weights are copied side by side.
    Raises `LoweringError` if a dynamic dimension has one tile, or tiles that are kept.
    """
    return scheduled_parts(graph, [(graph, schedule)], sizes, registers, packing)


def scheduled_parts(
    graph: Graph,
    parts: Sequence[tuple[Graph, Schedule]],
    sizes: Sizes | None,
    registers: Registers,
    packing: Packing,
) -> tirx.PrimFunc:
    """Return the function that computes parts of a graph one after the other, as `scheduled_chain`.

    What one part makes for another is in memory between.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        params = declare(graph)
        operands = (*graph.inputs, *graph.outputs)
        buffers = {o.name: p for o, p in zip(operands, params, strict=True)}
        dims = dims_of(graph, params)
        for part, schedule in parts:
            for made in part.outputs:
                if made.name not in buffers:
                    sizes_of = made.shape or ()
                    shape = [int64(d) if isinstance(d, int) else dims[d.name] for d in sizes_of]
                    buffers[made.name] = T.sblock_alloc_buffer(shape, made.dtype)
            tiling = ChainTiling(part, schedule, sizes)
            _ChainWriter(part, buffers, dims, tiling, registers, packing).run()
    return builder.get()


class _ChainWriter(RegisterTiles):
    """Writes statements as loops over tiles."""

    def run(self) -> None:
        """Write the parallel loop over the grid, and its body."""
        for step in self.packed_steps() if self.packing == "once" else ():
            self.pack_once(step)
        grid = self.schedule.structure.grid
        trips = [self.trips(name) for name in grid]
        count = int64(1)
        for each in trips:
            count = count * each
        with T.parallel(count) as loop:
            IRBuilder.name("block", loop)
            with T.sblock("tile"):
                block = T.axis.spatial(count, loop)
                IRBuilder.name("v_block", block)
                self._declare_accesses()
                for name, each in reversed(list(zip(grid, trips, strict=True))):
                    self.number[name] = block % each
                    block = block // each
                self.allocate()
                self._body(self.schedule.structure.body)

    def _declare_accesses(self) -> None:
        """Tell TVM what a block reads and writes: it would add the tiles of the block."""

        def whole(buffers: Iterable[tirx.Var]) -> list[tirx.BufferRegion]:
            return [b[tuple(slice(0, n) for n in b.ty.shape)] for b in buffers]

        def of(operands: Iterable[Operand]) -> list[tirx.Var]:
            return [self.buffers[o.name] for o in operands if o.shape is not None]

        T.reads(*whole([*of(self.graph.inputs), *self.panels.values()]))
        T.writes(*whole(of(self.graph.outputs)))

    def _body(self, body: tuple[Node, ...]) -> None:
        """Write loops and statements in order."""
        done, stored = set[str](), set[str]()
        for place, node in enumerate(body):
            if isinstance(node, Compute) and node.tensor in done:
                continue  # it was written where the product in front of it is
            if isinstance(node, Loop):
                with T.serial(self.trips(node.name)) as loop:
                    IRBuilder.name(node.name, loop)
                    self.number[node.name] = loop
                    self._body(node.body)
                del self.number[node.name]
            elif isinstance(node, Compute):
                step = self.space.step[node.tensor]
                behind = self.behind(step, body[place + 1 :])
                done.update(each.out for each in behind)
                last = behind[-1] if behind else step
                self.direct = step.out in self.sides and self.goes_out(
                    step, last, body[place + 1 :]
                )
                stored.update([last.out] * self.direct)
                self._compute(step, self.blocks[node.tensor], behind)
            elif isinstance(node, Store):
                if node.tensor not in stored:
                    self._store_tile(self.space.step[node.tensor])
            else:
                assert isinstance(node, Load)  # operands are read where they lie

    def _compute(self, step: Step, block: Block, behind: Sequence[Step]) -> None:
        """Write a statement for a tile, with the maps that are done in its registers."""
        tensor = self.graph[step.out]
        whole = bool(block.combine) and tensor.dtype in INTEGER_DTYPES
        self.dtype, self.step = "int32" if whole else ACCUMULATE, step
        out, spatial = self.tiles[step.out], step.makes.loops
        if not block.combine:
            self.each(step, spatial, lambda: self._map(step))
            return
        if not self.is_whole(step):
            self._begin(step, block)
            self._rescale(step)
        if step.out in self.sides:
            self.register_tiles(step, block, behind)
        elif self.is_row(step):
            self.row_in_vectors(step, block)
        else:
            order = (*spatial, *sorted(step.reduced))
            if step.dtype and spatial:  # neighbouring columns are a vector
                order = (*spatial[:-1], *sorted(step.reduced), spatial[-1])
            with self.elements(step, order):
                self.combine(block, out, self.place(step, step.out), self._combined(block))

    def _map(self, step: Step) -> None:
        """Write an element that is computed from others."""
        out = self.tiles[step.out]
        value = self.mapped(step).astype(str(out.ty.dtype))
        T.buffer_store(out, value, self.place(step, step.out))

    def _begin(self, step: Step, block: Block) -> None:
        """Write the start of a sum or a maximum, in the first iteration of its loops."""
        out = self.tiles[step.out]
        first = [self.number[n] == int64(0) for n in sorted(step.reduced) if n in self.number]

        def begin() -> None:
            start = self._start(block).astype(str(out.ty.dtype))
            T.buffer_store(out, start, self.place(step, step.out))

        with only_if(first):
            self.each(step, step.makes.loops, begin)
            for _, top in self.tiling.growing(self.graph, step):
                self._keep_maximum(step, top)

    def _keep_maximum(self, step: Step, top: str) -> None:
        """Write down the maximum that a sum is relative to."""
        maximum = self.space.step[top]
        with self.elements(step, maximum.makes.loops):
            place = self.place(maximum, step.out)
            T.buffer_store(self.seen_maximum[step.out, top], self._maximum(top), place)

    def _rescale(self, step: Step) -> None:
        """Write the scaling of a sum by how much the maxima have grown since it was added to."""
        growing = tuple(self.tiling.growing(self.graph, step))
        for made, top in growing:
            if {*self.tiling.kept.get(made.out, ())} & self.space.step[top].reduced:
                raise LoweringError(
                    f"{made.out} is kept while {top}, which it is relative to, grows"
                )
            self.each(step, step.makes.loops, partial(self._rescaled, step, top))
        for top in dict.fromkeys(top for _, top in growing):  # two factors may go by one maximum
            self._keep_maximum(step, top)

    def _rescaled(self, step: Step, top: str) -> None:
        out, before = self.tiles[step.out], self.seen_maximum[step.out, top]
        place = self.place(self.space.step[top], step.out)
        old, new = before[tuple(place)], self._maximum(top)
        grown = tirx.Select(old == new, tirx.const(1.0, ACCUMULATE), te.exp(old - new))
        at = self.place(step, step.out)
        T.buffer_store(out, out[tuple(at)] * grown, at)

    def _maximum(self, name: str) -> tirx.Expr:
        """Return the maximum of the current row, as far as it is known."""
        step = self.space.step[name]
        return self.tiles[name][tuple(self.place(step, name))]

    def _store_tile(self, step: Step) -> None:
        """Write a tile of a result to memory."""
        self.step, self.dtype = step, ACCUMULATE
        self.each(step, step.makes.loops, lambda: self._store_element(step))

    def _store_element(self, step: Step) -> None:
        out = self.buffers[step.out]
        at = [self._index(c) for c in self.blocks[step.out].at]
        value = self.tiles[step.out][tuple(self.place(step, step.out))]
        T.buffer_store(out, value.astype(str(out.ty.dtype)), at)
