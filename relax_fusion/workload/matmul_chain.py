"""Two matmuls with a narrow tensor between them."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Described
from .builder import GraphBuilder
from .dims import Dim, renamed
from .graph import Graph
from .norm_matmul import WeightLayout, epilogue
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
        Steps on the intermediate and on the result, in order: members of `EPILOGUE_STEPS` (inside,
        no residual), or the number that multiplies.
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
    inner: tuple[str | float, ...]
    outer: tuple[str | float, ...]
    dtype: str
    out_dtype: str
    batch: Dim | None = None

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
