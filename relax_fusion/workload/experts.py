"""A matmul of rows by the weights of experts that each row was given to."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Atom, Described, repr_without
from .builder import GraphBuilder
from .dims import Dim, extent, renamed
from .dtypes import DTYPE_BYTES, accumulator
from .expert_load import likelihoods
from .formats import Packed
from .graph import Graph
from .norm_matmul import NormMatmul, Projection, WeightLayout
from .roofline import slots_of
from .values import At, Axis, Expr, Lookup, Read, apply

Bounds = tuple[float, float]
"""The least and the most that an element may be."""


@dataclass(frozen=True)
class Gate:
    """``act(gate) * (up + offset)`` of the columns of one product.

    Parameters
    ----------
    activation : str
        One of `ACTIVATIONS`, applied to the gate.
    interleaved : bool
        Whether gate and up take turns column by column; else each is a half of the columns.
    gate_first : bool
        Whether the gate is the first half, or the columns from the first on.
    sharpness : float, optional
        Where there is one, the gate is ``gate * sigmoid(sharpness * gate)``, without `activation`.
    gate_bounds, up_bounds : (float, float), optional
        What gate and up are clipped to first.
    offset : float
        What is added to the up.
    """

    activation: str = "silu"
    interleaved: bool = False
    gate_first: bool = True
    sharpness: float | None = None
    gate_bounds: Bounds | None = None
    up_bounds: Bounds | None = None
    offset: float = 0.0

    def value(self, gate: Expr, up: Expr) -> Expr:
        """Return an element."""
        gate, up = _clipped(gate, self.gate_bounds), _clipped(up, self.up_bounds)
        up = up + self.offset if self.offset else up
        if self.sharpness is None:
            return apply(self.activation, gate) * up
        return gate * apply("sigmoid", gate * self.sharpness) * up


def _clipped(value: Expr, bounds: Bounds | None) -> Expr:
    if bounds is None:
        return value
    return apply("maximum", apply("minimum", value, bounds[1]), bounds[0])


@dataclass(frozen=True)
class ExpertMatmul(Described):
    """``step(x[row] @ W[ids[row, e]])`` for each of the experts that a row was given to.

    Where there are shares, the results of a row are added, each times its share.

    Parameters
    ----------
    rows : Dim
        Rows that were given to experts: tokens.
    experts, chosen : int
        How many experts there are, and how many each row goes to.
    k, n : int
        Features of x, and of the result; with a gate, the weight has ``2 n`` columns.
    layout : {"nk", "kn"}
        Of an expert's weight.  Those of all experts lie one after the other, ``[experts * n, k]``.
    dtype, out_dtype : str
        Of x and the weights, and of the result.
    each : bool
        Whether each pair of a row and an expert has an x of its own: ``[rows, chosen, k]``.
    ids_dtype : str
        Of the numbers of experts; one of no expert counts as that of the nearest.
    bias : bool
        Whether each expert has a bias.
    activation : str
        One of `ACTIVATIONS` behind the product, without a gate; empty for none.
    gate : Gate, optional
        What the columns of the product become.
    share : str
        The dtype of the shares; empty where results stay apart: ``[rows, chosen, n]``.
    residual : bool
        Whether a tensor is added to the sum of a row.
    packed : Packed, optional
        How the weights are stored.
    skew : float
        How unevenly rows go to experts, by `likelihoods`: 0 if each is as likely as another.
    """

    rows: Dim
    experts: int
    chosen: int
    k: int
    n: int
    layout: WeightLayout
    dtype: str
    out_dtype: str
    each: bool = False
    ids_dtype: str = "int64"
    bias: bool = False
    activation: str = ""
    gate: Gate | None = None
    share: str = ""
    residual: bool = False
    packed: Packed | None = None
    skew: float = 0.0

    __hash__ = Described.__hash__

    def __repr__(self) -> str:
        """Return the fields, of which some are left out if they are empty: keys are made of it."""
        return repr_without(self, "packed", "skew")

    @property
    def ranged(self) -> dict[str, Dim]:
        """The rows."""
        return {"rows": renamed(self.rows, "rows")}

    @property
    def columns(self) -> int:
        """Columns of an expert's weight."""
        return self.n * (1 if self.gate is None else 2)

    @property
    def is_packed(self) -> bool:
        """Whether the weights are stored as words."""
        return self.packed is not None

    @property
    def shares(self) -> tuple[float, ...]:
        """How likely a row goes to each expert."""
        return likelihoods(self.experts, self.chosen, self.skew)

    def touched(self, rows: int) -> float:
        """Return how many experts some rows go to."""
        if self.skew:
            return sum(1 - (1 - share) ** rows for share in self.shares)
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)

    def bytes(self, **sizes: int) -> dict[str, int]:
        """Return the bytes of every operand; of weights, of the experts that rows go to."""
        found = super().bytes(**sizes)
        part = self.touched(extent(self.rows, sizes.get("rows", 1))) / self.experts
        return {n: round(b * part) if n in ("w0", "bias0") else b for n, b in found.items()}

    def apart(self, **sizes: int) -> list[Atom]:
        """Return the gather of weights, a matmul for each pair, and what follows it."""
        rows = extent(self.rows, sizes.get("rows", 1))
        pairs, width = rows * self.chosen, DTYPE_BYTES[self.dtype]
        weight = Projection(self.columns, self.layout)
        one = NormMatmul(1, self.k, (weight,), None, self.dtype, self.dtype)
        gathered = Atom(2 * pairs * self.columns * self.k * width)
        atoms = [gathered, Atom(0, one, 1, matrices=pairs, maker="tvm")]
        slots = slots_of(self.activation) if self.activation else 0
        slots += slots_of(self.gate.activation) if self.gate is not None else 0
        if slots or self.bias or self.share:
            moved = pairs * (self.columns + self.n) * width
            atoms.append(Atom(moved, slots=pairs * self.n * slots))
        if self.residual:
            atoms.append(Atom(3 * rows * self.n * width))
        return atoms

    def _graph(self) -> Graph:
        g = GraphBuilder()
        i, e, k = Axis("i", renamed(self.rows, "rows")), Axis("e", self.chosen), Axis("k", self.k)
        j = Axis("j", self.n)
        each = (i, e) if self.each else (i,)
        x = g.input("x", tuple(a.size for a in (*each, k)), self.dtype)
        ids = g.input("ids", (i.size, self.chosen), self.ids_dtype)
        size = (self.columns, self.k) if self.layout == "nk" else (self.k, self.columns)
        g.input("w0", (self.experts * size[0], size[1]), self.dtype, self.packed)
        bias = g.input("bias0", (self.experts, self.columns), self.dtype) if self.bias else None

        def product(index: int, column: At) -> Expr:
            row, other = (column, _K) if self.layout == "nk" else (_K, column)
            place = Lookup(row.terms, row.start, 1, None, ids[i, e], self.experts, size[0])
            value = x[(*each, k)] * Read("w0", (place, other))
            acc = g.sum(f"acc{index}", (i, e, j), (k,), value, accumulator(self.dtype))[i, e, j]
            if bias is None:
                return acc
            return acc + Read("bias0", (Lookup(number=ids[i, e], count=self.experts), column))

        if self.gate is None:
            value = product(0, _J)
            value = apply(self.activation, value) if self.activation else value
        else:
            parts = [product(p, self._column(p)) for p in range(2)]
            value = self.gate.value(*(parts if self.gate.gate_first else parts[::-1]))
        if not self.share:
            g.output(g.map("out0", (i, e, j), value, self.out_dtype))
            return g.graph()
        share = g.input("share", (i.size, self.chosen), self.share)
        total: Expr = g.sum("total", (i, j), (e,), value * share[i, e])[i, j]
        if self.residual:
            total = total + g.input("residual", (i.size, self.n), self.dtype)[i, j]
        g.output(g.map("out0", (i, j), total, self.out_dtype))
        return g.graph()

    def _column(self, part: int) -> At:
        """Return where an element of the gate or the up is in the weight."""
        assert self.gate is not None, "a product of one part has no such columns"
        return At((("j", 2),), part) if self.gate.interleaved else At((("j", 1),), part * self.n)


_J, _K = At((("j", 1),)), At((("k", 1),))
