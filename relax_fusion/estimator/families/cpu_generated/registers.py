"""Register tiles of the products of a chain."""

from __future__ import annotations

from dataclasses import dataclass

from ....hardware import DeviceSpec
from ....tiling import IterationSpace
from ....tiling.space import Step
from ....workload import INTEGER_DTYPES
from ....workload.graph import Graph
from ....workload.roofline import is_contraction
from ...prediction import HALF_DTYPES

MOST_ROWS, VECTORS = 8, 2
"""Rows of a register tile, and vectors along each: 8 x 32 in float32 is as fast as 4 x 32, and
faster than 6 x 32, 12 x 32 and 6 x 64 (`2026-11-24-cpu_generated.md`)."""

DOT_COLUMNS = 4
"""Results of a row of a tile of dot products: weights that lie along their sums are read as fast as
that, and the rows stay in registers."""


@dataclass(frozen=True)
class Registers:
    """A tile of sums in vector registers.

    Parameters
    ----------
    rows, columns : int
        Of the tile; a tensor that has fewer columns has narrower ones.
    lanes : int
        Elements of float32 of a vector; `columns` is that times a power of two.
    """

    rows: int = 8
    columns: int = 32
    lanes: int = 16

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
