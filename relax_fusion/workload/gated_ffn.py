"""The first half of a gated feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .base import Atom, Described
from .builder import GraphBuilder
from .dims import Dim, extent, renamed
from .dtypes import DTYPE_BYTES, accumulator
from .epilogues import Norm, normalised
from .formats import Packed
from .graph import Graph
from .norm_matmul import NormMatmul, Projection, WeightLayout, post_norm_apart
from .roofline import slots_of
from .values import Axis, Expr, apply


@dataclass(frozen=True)
class GatedFFN(Described):
    """``epilogue(act(norm(x) @ Wg) * (norm(x) @ Wu))`` for x of shape ``[rows, k]``.

    Parameters
    ----------
    rows, k, norm, dtype, out_dtype, allow_tf32
        As in `NormMatmul`.
    n : int
        Features of the gate, which are those of the result.
    layout : {"nk", "kn"}
        Of the weights.
    merged : bool
        Whether gate and up are the two halves of one weight of ``2 n`` features.
    gate_first : bool
        Whether the gate is the first half (or, unmerged, simply True).
    activation : str
        One of `ACTIVATIONS`, applied to the gate.
    bias : bool
        Whether gate and up each have a bias (merged: one of ``2 n``).
    packed : Packed, optional
        How the weights are stored, as in `Projection`.
    """

    rows: Dim
    k: int
    n: int
    layout: WeightLayout
    merged: bool
    gate_first: bool
    activation: str
    norm: Norm | None
    dtype: str
    out_dtype: str
    bias: bool = False
    allow_tf32: bool = False
    packed: Packed | None = None

    __hash__ = Described.__hash__

    def apart(self, **sizes: int) -> list[Atom]:
        """Return the matmuls, with the norm if there is one, and the product of their results."""
        rows = extent(self.rows, sizes["rows"])
        slots = slots_of("multiply") + slots_of(self.activation) * self.merged
        count = rows * self.n
        product = Atom(3 * count * DTYPE_BYTES[self.out_dtype], slots=count * slots)
        first = post_norm_apart(self, rows)
        return [*first, *(Atom(0, part, rows) for part in self._parts), product]

    @cached_property
    def _parts(self) -> list[NormMatmul]:
        """What is left without the product; of two weights, the gate's takes the activation."""
        bias = ("bias",) * self.bias
        gate = Projection(self.n, self.layout, (*bias, self.activation), packed=self.packed)
        outputs: tuple[Projection, ...] = (gate, replace(gate, epilogue=bias))
        if self.merged:
            outputs = (replace(gate, n=2 * self.n, epilogue=bias),)
        dtypes = self.dtype, self.out_dtype, self.allow_tf32
        norm = self.norm and replace(self.norm, first=None)
        norm = norm if norm and norm.kind != "none" else None
        grouped = [outputs] if norm else [(p,) for p in outputs]
        return [NormMatmul(self.rows, self.k, each, norm, *dtypes) for each in grouped]

    @property
    def is_packed(self) -> bool:
        """Whether both weights are stored as words."""
        return self.packed is not None

    def _graph(self) -> Graph:
        g = GraphBuilder()
        i, k = Axis("i", renamed(self.rows, "rows")), Axis("k", self.k)
        j = Axis("j", self.n)
        x = normalised(g, self.norm, (i, k), self.dtype)
        count = 2 * self.n if self.merged else self.n
        shape = (count, self.k) if self.layout == "nk" else (self.k, count)
        tensors = 1 if self.merged else 2
        weights = [g.input(f"w{p}", shape, self.dtype, self.packed) for p in range(tensors)]
        biases = [g.input(f"bias{p}", (count,), self.dtype) for p in range(tensors * self.bias)]
        parts: list[Expr] = []
        for p in range(2):
            w = weights[p % tensors]
            column = j + (p * self.n if self.merged else 0)
            factor = w[column, k] if self.layout == "nk" else w[k, column]
            total = accumulator(self.dtype)
            part: Expr = g.sum(f"acc{p}", (i, j), (k,), x[i, k] * factor, total)[i, j]
            parts.append(part + biases[p % tensors][column] if biases else part)
        gate, up = parts if self.gate_first else parts[::-1]
        value = apply(self.activation, gate) * up
        g.output(g.map("out0", (i, j), value, self.out_dtype))
        return g.graph()
