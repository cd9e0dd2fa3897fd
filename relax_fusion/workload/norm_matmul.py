"""A norm and the matmuls that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from .base import Atom, Described, repr_without
from .builder import GraphBuilder, Handle
from .dims import PRICED_COLUMNS, Dim, extent, renamed
from .dtypes import DTYPE_BYTES, accumulator, step_dtype
from .epilogues import HeadNorm, Norm, Step, epilogue, head_normalised, normalised
from .formats import Packed
from .graph import Graph
from .roofline import Sizes
from .rope import Rope, rotated
from .values import Axis, Const, Expr, Read

if TYPE_CHECKING:
    from .gated_ffn import GatedFFN

WeightLayout = Literal["nk", "kn"]


@dataclass(frozen=True)
class Adapter:
    """A product of two narrow matrices beside a weight: ``x W + (scale x A) B`` (LoRA).

    ``scale x A`` is rounded to the dtype, as the tensor between two matmuls.

    Parameters
    ----------
    rank : int
        Columns of A, and rows of B.
    layout : {"nk", "kn"}
        Of A: "nk" is the transposed ``[rank, k]``.  B lies as the weight does.
    scale : float
        A number that multiplies.
    """

    rank: int
    layout: WeightLayout
    scale: float = 1.0


@dataclass(frozen=True)
class Projection:
    """One matmul with its weight of `n` output features and the steps after it.

    Parameters
    ----------
    n : Dim
        Output features; a number where they are rotated.
    layout : {"nk", "kn"}
        Whether the weight lies as ``[n, k]`` (rows are outputs, PyTorch's Linear) or ``[k, n]``.
    epilogue : tuple of str or float
        The steps behind it, in the order in which they are applied: ``"bias"`` adds and ``"scale"``
        multiplies by a vector along the last axis, ``"residual"`` adds a tensor, an activation is
        called by its name, a number multiplies.  ``"scale:24"`` and ``"bias:24"`` have a row for
        each 24 rows of x in turn, ``"residual:24"`` has 24 rows, which repeat.
    rope : Rope, optional
        A rotation after the epilogue, which then has no step but a bias.
    packed : Packed, optional
        How the weight is stored, where it takes fewer bits than its dtype has.
    adapter : Adapter, optional
        What is added to the product, before the steps.
    head_norm : HeadNorm, optional
        A norm of heads, after the epilogue, which then has no step but a bias, and before the
        rotation.
    """

    n: Dim
    layout: WeightLayout
    epilogue: tuple[Step, ...] = ()
    rope: Rope | None = None
    packed: Packed | None = None
    adapter: Adapter | None = None
    head_norm: HeadNorm | None = None

    def __repr__(self) -> str:
        """Return the fields, of which the last is left out if it is None: keys are made of it."""
        return repr_without(self, "head_norm")

    @property
    def columns(self) -> int:
        """Output features, or for how many it is priced."""
        return extent(self.n, PRICED_COLUMNS)

    @property
    def pairs(self) -> Rope | None:
        """The rotation of what the matmul makes; None where a norm of heads is in between."""
        return self.rope if self.head_norm is None else None

    @property
    def product(self) -> Projection:
        """The matmul without the norm of heads, and the rotation behind that."""
        return self if self.head_norm is None else replace(self, rope=None, head_norm=None)


@dataclass(frozen=True)
class NormMatmul(Described):
    """``outputs[i] = epilogue_i(norm(x) @ W_i)`` for x of shape ``[rows, k]``.

    Parameters
    ----------
    rows : Dim
        Rows of x: the product of its leading dimensions.
    k : int
        Features of x, the reduced dimension.
    outputs : tuple of Projection
        The matmuls that share the norm, in the order of the results.
    norm : Norm, optional
        None for a plain matmul with an epilogue.
    dtype, out_dtype : str
        Of x and the weights, and of the results.  Sums are kept in float32, of integers in int32.
    allow_tf32 : bool
        Whether tensor cores may multiply float32 operands as tf32, with 10 bits of mantissa.
    """

    rows: Dim
    k: int
    outputs: tuple[Projection, ...]
    norm: Norm | None
    dtype: str
    out_dtype: str
    allow_tf32: bool = False

    @property
    def n(self) -> int:
        """Output features of all projections together, or for how many they are priced."""
        return sum(p.columns for p in self.outputs)

    __hash__ = Described.__hash__

    def apart(self, **sizes: int) -> list[Atom]:
        """Return the norm, and the matmuls with what follows them; of one alone, a rotation.

        Norms of heads have one kernel behind that of all else.  A matmul alone is the rule's for
        generic matmuls then, which makes of it what a pass would.
        """
        rows = extent(self.rows, sizes["rows"])
        if self.head_columns:
            found = tuple(p.product for p in self.outputs)
            heads = rows * self.head_columns
            moved = 2 * heads * DTYPE_BYTES[self.out_dtype]
            products = Atom(0, replace(self, outputs=found), rows)
            return [products, Atom(moved, normalised=heads)]
        each, norm, rope = rows * self.k * DTYPE_BYTES[self.dtype], self.norm, self.outputs[0].rope
        if self._is_alone:
            turned = rope.turned(self.n) if rope else 0
            moved = 2 * rows * turned * DTYPE_BYTES[self.out_dtype]
            rotation = [Atom(moved)] if rope else []
            return [Atom(0, part, rows) for part in self._parts] + rotation
        first = post_norm_apart(self, rows)
        added = [Atom(3 * each)] if norm and norm.residual and norm.kind != "none" else []
        last = [Atom(2 * each, normalised=rows * self.k)] if norm and norm.kind != "none" else []
        return [*first, *added, *last, *(Atom(0, part, rows) for part in self._parts)]

    @property
    def _is_alone(self) -> bool:
        """Whether no pass is left that fuses a part of it."""
        return self.norm is None and len(self.outputs) == 1 and not self.is_adapted

    @property
    def head_columns(self) -> int:
        """Columns of the projections whose heads are normalised."""
        return sum(p.columns for p in self.outputs if p.head_norm is not None)

    @property
    def is_adapted(self) -> bool:
        """Whether a projection's weight has an adapter beside it."""
        return any(p.adapter is not None for p in self.outputs)

    @property
    def is_packed(self) -> bool:
        """Whether a projection's weight is stored as words."""
        return any(p.packed is not None for p in self.outputs)

    @cached_property
    def _parts(self) -> list[NormMatmul]:
        """What each projection comes to, an adapter's second matmul with the sum behind it."""
        found = []
        for p in self.outputs:
            whole, low = replace(p, rope=None) if self._is_alone else p, p.adapter
            found.append(replace(self, norm=None, outputs=(replace(whole, adapter=None),)))
            if low is not None:
                up = Projection(p.n, p.layout, ("residual",))
                found.append(narrow_matmuls(self, (low,)))
                found.append(replace(found[-2], k=low.rank, outputs=(up,)))
        return found

    def _at(self, count: Callable[[Graph, Sizes], Any], sizes: Sizes) -> Any:
        """Count columns that are only known at run time as many as they are priced for."""
        found = {f"columns{i}": p.columns for i, p in enumerate(self.outputs)}
        return super()._at(count, {**found, **sizes})

    def _graph(self) -> Graph:
        g = GraphBuilder()
        i, k = Axis("i", renamed(self.rows, "rows")), Axis("k", self.k)
        x = normalised(g, self.norm, (i, k), self.dtype)
        for index, projection in enumerate(self.outputs):
            self._projection(g, index, projection, (i, k, x))
        return g.graph()

    def _projection(
        self, g: GraphBuilder, index: int, projection: Projection, source: tuple[Axis, Axis, Handle]
    ) -> None:
        """Write down one matmul and its epilogue."""
        i, k, x = source
        j, out = Axis(f"j{index}", renamed(projection.n, f"columns{index}")), f"out{index}"
        weight = projection.layout, projection.packed
        value: Expr = product(g, (x, i, k, j), weight, self.dtype, str(index))
        adapter = projection.adapter
        if adapter is not None:
            r, down = Axis(f"r{index}", adapter.rank), (adapter.layout, None)
            total = product(g, (x, i, k, r), down, self.dtype, f"{index}_a")
            scaled = total * Const(adapter.scale) if adapter.scale != 1 else total
            low = g.map(f"low{index}", (i, r), scaled, self.dtype, rounds=True)
            up = projection.layout, None
            value = value + product(g, (low, i, r, j), up, self.dtype, f"{index}_b")
        steps, dtype = projection.epilogue, step_dtype(self.dtype)
        value = epilogue(g, steps, (value, (i, j)), dtype, index)
        if projection.head_norm is not None:
            value = head_normalised(g, projection.head_norm, (value, (i, j)), self.out_dtype, index)
        if projection.rope is None:
            g.output(g.map(out, (i, j), value, self.out_dtype))
            return
        unrotated = g.map(f"unrotated{index}", (i, j), value, "float32")
        result = g.tensor(out, (i.size, j.size), self.out_dtype)
        rotated(g, projection.rope, (unrotated, result), (i, projection.columns), index)


def post_norm_apart(work: NormMatmul | GatedFFN, rows: int) -> list[Atom]:
    """Return the kernel of a norm in front of the residual: with the sum, if that is projected."""
    norm, each = work.norm, rows * work.k * DTYPE_BYTES[work.dtype]
    if norm is None or norm.first is None:
        return []
    return [Atom((3 if norm.kind == "none" else 2) * each, normalised=rows * work.k)]


def narrow_matmuls(work: NormMatmul | GatedFFN, adapters: Sequence[Adapter]) -> NormMatmul:
    """Return the first matmuls of adapters of the weights of `work`: what makes ``scale x A``."""
    down = (Projection(a.rank, a.layout, (a.scale,) * (a.scale != 1)) for a in adapters)
    return NormMatmul(work.rows, work.k, tuple(down), None, work.dtype, work.dtype)


def product(
    g: GraphBuilder,
    source: tuple[Handle, Axis, Axis, Axis],
    weight: tuple[WeightLayout, Packed | None],
    dtype: str,
    index: str,
) -> Read:
    """Write down a weight and the matmul of x ``[i, k]`` by it; return an element ``[i, j]``."""
    (x, i, k, j), (layout, packed) = source, weight
    shape = (j.size, k.size) if layout == "nk" else (k.size, j.size)
    w = g.input(f"w{index}", shape, dtype, packed)
    factor = w[j, k] if layout == "nk" else w[k, j]
    return g.sum(f"acc{index}", (i, j), (k,), x[i, k] * factor, accumulator(dtype))[i, j]
