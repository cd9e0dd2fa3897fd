"""Rotations of heads behind a matmul (rotary embedding)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .builder import GraphBuilder, Handle
from .dims import Dim, renamed
from .values import Axis, AxisValue


@dataclass(frozen=True)
class Rope:
    """A rotation of pairs of features by angles that depend on the row (rotary embedding).

    The features are heads of width `head_dim`, of which the first `rotary_dim` features turn::

        out[a] = x[a] * cos[row, a] - x[b] * sin[row, a]
        out[b] = x[b] * cos[row, b] + x[a] * sin[row, b]

    for each pair (a, b) of features of a head; the others stay as they are.
    """

    head_dim: int
    """Width of a head; even."""
    features: int
    """How many features, from the first on, hold heads that are rotated; a multiple of `head_dim`.
    Those behind them (the values of a merged projection) stay as they are."""
    dtype: str
    """Of the cosines and sines, two tensors ``[positions, rotary_dim]``."""
    positions: Dim | None = None
    """Rows of those tensors, where row i of the result takes row ``i % positions`` of them (the
    sequence length, for rows of several sequences).  None: as many as the result has."""
    rotary_dim: int | None = None
    """How many features of a head are rotated, from its first on; even.  None: all."""
    pairing: Literal["halves", "neighbours"] = "halves"
    """Whether feature j is paired with ``j + rotary_dim / 2``, the order of Hugging Face
    checkpoints, or 2j with 2j + 1 ("interleaved", the order of GPT-J, GLM and Cohere). `rotary_dim`
    divides `head_dim` where it is by halves."""
    period: int | None = None
    """Where heads of queries, keys and values come in turns, features from one turn to the next,
    and `features` counts within a turn.  None: the whole projection is one turn."""
    by_pair: bool = False
    """Whether the cosines and sines are ``[positions, rotary_dim / 2]``, one for each pair."""

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


def rotated(
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
