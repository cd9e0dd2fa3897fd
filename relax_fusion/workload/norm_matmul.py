"""A norm and the matmuls that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from .base import Atom, Described
from .builder import GraphBuilder, Handle
from .dims import PRICED_COLUMNS, Dim, extent, renamed
from .dtypes import DTYPE_BYTES, accumulator, step_dtype
from .epilogues import Norm, Step, epilogue, normalised
from .formats import Packed
from .graph import Graph
from .roofline import Sizes
from .values import Axis, AxisValue, Const, Expr, Read

if TYPE_CHECKING:
    from .gated_ffn import GatedFFN

WeightLayout = Literal["nk", "kn"]


@dataclass(frozen=True)
class Rope:
    """A rotation of pairs of features by angles that depend on the row (rotary embedding).

    The features are heads of width `head_dim`, of which the first `rotary_dim` features turn::

        out[a] = x[a] * cos[row, a] - x[b] * sin[row, a]
        out[b] = x[b] * cos[row, b] + x[a] * sin[row, b]

    for each pair (a, b) of features of a head; the others stay as they are.

    Parameters
    ----------
    head_dim : int
        Width of a head; even.
    features : int
        How many features, from the first on, hold heads that are rotated; a multiple of `head_dim`.
        Those behind them (the values of a merged projection) stay as they are.
    dtype : str
        Of the cosines and sines, two tensors ``[positions, rotary_dim]``.
    positions : Dim, optional
        Rows of those tensors, where row i of the result takes row ``i % positions`` of them (the
        sequence length, for rows of several sequences).  None: as many as the result has.
    rotary_dim : int, optional
        How many features of a head are rotated, from its first on; even.  None: all.
    pairing : {"halves", "neighbours"}
        Whether feature j is paired with ``j + rotary_dim / 2``, the order of Hugging Face
        checkpoints, or 2j with 2j + 1 ("interleaved", the order of GPT-J, GLM and Cohere).
        `rotary_dim` divides `head_dim` where it is by halves.
    period : int, optional
        Where heads of queries, keys and values come in turns, features from one turn to the next,
        and `features` counts within a turn.  None: the whole projection is one turn.
    by_pair : bool
        Whether the cosines and sines are ``[positions, rotary_dim / 2]``, one for each pair.
    """

    head_dim: int
    features: int
    dtype: str
    positions: Dim | None = None
    rotary_dim: int | None = None
    pairing: Literal["halves", "neighbours"] = "halves"
    period: int | None = None
    by_pair: bool = False

    @property
    def width(self) -> int:
        """How many features of a head are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def distance(self) -> int:
        """Distance between the features of a pair."""
        return self.width // 2 if self.pairing == "halves" else 1

    @property
    def columns(self) -> int:
        """Columns of the cosines and sines."""
        return self.width // 2 if self.by_pair else self.width

    def turned(self, n: int) -> int:
        """Return how many of `n` features turn."""
        return n // (self.period or n) * self.features // self.head_dim * self.width


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
    """

    n: Dim
    layout: WeightLayout
    epilogue: tuple[Step, ...] = ()
    rope: Rope | None = None
    packed: Packed | None = None
    adapter: Adapter | None = None

    @property
    def columns(self) -> int:
        """Output features, or for how many it is priced."""
        return extent(self.n, PRICED_COLUMNS)


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

        A matmul alone is the rule's for generic matmuls then, which makes of it what a pass would.
        """
        rows = extent(self.rows, sizes["rows"])
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
        if projection.rope is None:
            g.output(g.map(out, (i, j), value, self.out_dtype))
            return
        unrotated = g.map(f"unrotated{index}", (i, j), value, "float32")
        result = g.tensor(out, (i.size, j.size), self.out_dtype)
        _rotated(g, projection.rope, (unrotated, result), (i, projection.columns), index)


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


def _rotated(
    g: GraphBuilder, rope: Rope, tensors: tuple[Handle, Handle], sizes: tuple[Axis, int], index: int
) -> None:
    """Write down the rotation of some features, and the rest as it is."""
    (before, out), (i, n) = tensors, sizes
    positions = None if rope.positions is None else renamed(rope.positions, f"positions{index}")
    shape = (i.size if positions is None else positions, rope.columns)
    cos, sin = (g.input(f"{name}{index}", shape, rope.dtype) for name in ("cos", "sin"))
    row = i + 0 if positions is None else i % positions
    period = rope.period or n
    turns = [Axis("turn", n // period)] if period < n else []
    head, half = Axis("head", rope.features // rope.head_dim), Axis("half", 2)
    t = Axis("t", rope.width // 2)
    first = sum((turn * period for turn in turns), head * rope.head_dim)
    step = 1 if rope.pairing == "halves" else 2
    own = first + half * rope.distance + t * step
    other = first + half * -rope.distance + t * step + rope.distance
    lane = t + 0 if rope.by_pair else half * rope.distance + t * step
    sign = AxisValue("half") * 2.0 - 1.0
    turned = before[i, own] * cos[row, lane] + sign * before[i, other] * sin[row, lane]
    g.part(out[i, own], (i, *turns, head, half, t), turned)
    g.output(out)
    if rope.width < rope.head_dim:
        kept = Axis("kept", rope.head_dim - rope.width)
        place = first + kept + rope.width
        g.part(out[i, place], (i, *turns, head, kept), before[i, place])
    if rope.features < period:
        rest = Axis("rest", period - rope.features)
        place = sum((turn * period for turn in turns), rest + rope.features)
        g.part(out[i, place], (i, *turns, rest), before[i, place])
