"""Two matmuls with a narrow tensor between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .base import Atom, Described
from .builder import GraphBuilder
from .dims import Dim, extent, renamed
from .graph import Graph
from .norm_matmul import NormMatmul, Projection, WeightLayout
from .steps import Step, epilogue
from .values import Axis


@dataclass(frozen=True)
class MatmulChain(Described):
    """``outer(inner(x @ A) @ B)``, where ``inner(x @ A)`` has few columns.

    The intermediate ``inner(x @ A)`` is rounded to `dtype`, as the tensor that it replaces.

    Parameters
    ----------
    rows : Dim
        Rows of x; of one matrix where there is a batch.
    k, r, n : int
        Features of x ``[rows, k]``, of the intermediate, and of the result.
    layouts : tuple of {"nk", "kn"}
        Of A and of B: "nk" is the transposed ``[r, k]`` and ``[n, r]``.
    inner, outer : tuple of str or float
        Steps on the intermediate (no residual) and on the result, as `Projection` has them.
    dtype, out_dtype : str
        Of x, A, B and the intermediate, and of the result.  Sums are kept in float32.
    batch : Dim, optional
        x, A, B and the result are so many matrices each.  None: they are one.
    """

    rows: Dim
    k: int
    r: int
    n: int
    layouts: tuple[WeightLayout, WeightLayout]
    inner: tuple[Step, ...]
    outer: tuple[Step, ...]
    dtype: str
    out_dtype: str
    batch: Dim | None = None

    __hash__ = Described.__hash__

    @cached_property
    def matmuls(self) -> tuple[NormMatmul, NormMatmul]:
        """The matmuls of one matrix of the batch, each with its steps."""
        a = Projection(self.r, self.layouts[0], self.inner)
        b = Projection(self.n, self.layouts[1], self.outer)
        first = NormMatmul(self.rows, self.k, (a,), None, self.dtype, self.dtype)
        return first, NormMatmul(self.rows, self.r, (b,), None, self.dtype, self.out_dtype)

    def apart(self, **sizes: int) -> list[Atom]:
        """Return both matmuls.

        No pass fuses a matmul of a batch; the rule for generic matmuls takes all steps along.
        """
        rows = extent(self.rows, sizes["rows"])
        if self.batch is None:
            return [Atom(0, part, rows) for part in self.matmuls]
        count = extent(self.batch, sizes["batch"])
        return [Atom(0, part, rows, count, "rule") for part in self.matmuls]

    def _graph(self) -> Graph:
        g = GraphBuilder()
        lead = () if self.batch is None else (Axis("b", renamed(self.batch, "batch")),)
        i, k = Axis("i", renamed(self.rows, "rows")), Axis("k", self.k)
        data = g.input("x", [a.size for a in (*lead, i, k)], self.dtype)
        sides = ((self.r, self.inner, self.dtype), (self.n, self.outer, self.out_dtype))
        for which, (n, steps, dtype) in enumerate(sides):
            j, axes = Axis(f"j{which}", n), (*lead, i)
            matrix = (j, k) if self.layouts[which] == "nk" else (k, j)
            w = g.input(f"w{which}", [a.size for a in (*lead, *matrix)], self.dtype)
            element = data[(*axes, k)] * w[(*lead, *matrix)]
            total = g.sum(f"acc{which}", (*axes, j), (k,), element)[(*axes, j)]
            value = epilogue(g, steps, (total, (*axes, j)), self.dtype, which)
            data = g.map(f"out{which}", (*axes, j), value, dtype, rounds=which == 0)
            k = j
        g.output(data)
        return g.graph()
