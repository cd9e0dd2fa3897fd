"""Two matmuls with steps after each, as a chain."""

from __future__ import annotations

from dataclasses import dataclass

from relax_fusion.workload import Chain, Dim
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.dims import renamed
from relax_fusion.workload.epilogues import Step, epilogue
from relax_fusion.workload.norm_matmul import WeightLayout
from relax_fusion.workload.values import Axis


@dataclass(frozen=True)
class TwoMatmuls:
    """``outer(inner(x @ A) @ B)``, x of ``[rows, k]``, with an intermediate of r columns.

    Layouts are of A and of B; the intermediate is rounded to `dtype`, as x, A and B have it.
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

    @property
    def chain(self) -> Chain:
        """The workload."""
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
        return Chain(g.graph())
