"""A schedule of a chain, with what a function for a CPU needs to know of it."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import LoweringError
from ..tiling import Schedule
from ..tiling.axes import loop_names
from ..tiling.space import Step
from ..workload import Dim, DynamicDim, Graph
from ..workload.roofline import Sizes


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
