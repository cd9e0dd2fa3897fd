"""Two matmuls with a narrow tensor between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from .base import Atom, Described
from .builder import GraphBuilder
from .dims import Dim, extent, renamed
from .dtypes import DTYPE_BYTES
from .graph import Graph
from .norm_matmul import NormMatmul, Projection, WeightLayout, epilogue
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

    __hash__ = Described.__hash__

    @cached_property
    def matmuls(self) -> tuple[NormMatmul, NormMatmul]:
        """The matmuls of one matrix of the batch, with all steps but the numbers."""
        a, b = (tuple(s for s in steps if isinstance(s, str)) for steps in (self.inner, self.outer))
        return self._with_steps(a, b)

    def _with_steps(
        self, inner: tuple[str, ...], outer: tuple[str, ...]
    ) -> tuple[NormMatmul, NormMatmul]:
        a, b = (
            Projection(self.r, self.layouts[0], inner),
            Projection(self.n, self.layouts[1], outer),
        )
        first = NormMatmul(self.rows, self.k, (a,), None, self.dtype, self.dtype)
        return first, NormMatmul(self.rows, self.r, (b,), None, self.dtype, self.out_dtype)

    @cached_property
    def _parts(self) -> tuple[NormMatmul, NormMatmul]:
        """The matmuls as passes fuse them: with the steps in front of the first number."""
        a, b = (takewhile(lambda s: isinstance(s, str), s) for s in (self.inner, self.outer))
        return self._with_steps(tuple(map(str, a)), tuple(map(str, b)))

    def apart(self, **sizes: int) -> list[Atom]:
        """Return both matmuls, and the steps that passes leave, which follow as kernels.

        No pass fuses a matmul of a batch; the rule for generic matmuls takes all steps along.
        """
        rows = extent(self.rows, sizes["rows"])
        if self.batch is not None:
            count = extent(self.batch, sizes["batch"])
            return [Atom(0, part, rows, count, "rule") for part in self.matmuls]
        atoms = []
        for part, steps in zip(self._parts, (self.inner, self.outer), strict=True):
            (projection,) = part.outputs
            atoms.append(Atom(0, part, rows))
            rest = steps[len(projection.epilogue) :]
            if rest:
                each = rows * projection.n * DTYPE_BYTES[part.out_dtype]
                atoms.append(Atom((2 + rest.count("residual")) * each))
        return atoms

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
