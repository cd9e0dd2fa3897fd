"""Writing a block graph down, statement by statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

from .dims import Dim
from .formats import Packed
from .graph import Block, Graph, Slot, Tensor
from .values import At, Axis, Expr, Read, at, expr

Place = Axis | At | int


@dataclass(frozen=True)
class Handle:
    """A tensor that can be read: ``x[i, k]`` is an element."""

    name: str

    def __getitem__(self, places: Place | tuple[Place, ...]) -> Read:
        given = places if isinstance(places, tuple) else (places,)
        return Read(self.name, tuple(map(at, given)))


class GraphBuilder:
    """A graph that grows.

    Examples
    --------
    >>> g = GraphBuilder()
    >>> i, j, k = Axis("i", 4), Axis("j", 8), Axis("k", 16)
    >>> x, w = g.input("x", (4, 16), "float16"), g.input("w", (8, 16), "float16")
    >>> y = g.sum("y", (i, j), (k,), x[i, k] * w[j, k], "float16")
    >>> g.output(y)
    >>> print(g.graph())
    y[i, j]  float16 = sum k: x[i, k] * w[j, k]
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._blocks: list[Block] = []
        self._inputs: list[Slot] = []
        self._outputs: list[Slot] = []

    def input(
        self, name: str, shape: Sequence[Dim], dtype: str, format: Packed | None = None
    ) -> Handle:
        """Add an operand that is read."""
        self._inputs.append(Slot(name, "in"))
        return self._add(Tensor(name, tuple(shape), dtype, format))

    def scalar(self, name: str, dim: Dim) -> None:
        """Add an operand that tells a size."""
        self._inputs.append(Slot(name, "scalar", dim))

    def map(
        self, name: str, axes: Sequence[Axis], value: Expr, dtype: str, rounds: bool = False
    ) -> Handle:
        """Add a tensor with an element for each place of `axes`."""
        self._make(name, axes, dtype, rounds)
        self._blocks.append(Block(name, tuple(map(at, axes)), tuple(axes), value))
        return Handle(name)

    def reduce(
        self,
        combine: Any,
        name: str,
        axes: Sequence[Axis],
        reduced: Sequence[Axis],
        value: Expr,
        dtype: str = "float32",
        **how: Any,
    ) -> Handle:
        """Add sums or maxima over `reduced`; `how` are further fields of `Block`."""
        self._make(name, axes, dtype)
        block = Block(name, tuple(map(at, axes)), tuple(axes), value, tuple(reduced), combine)
        self._blocks.append(replace(block, **how))
        return Handle(name)

    sum = partialmethod(reduce, "sum")
    max = partialmethod(reduce, "max")

    def tensor(self, name: str, shape: Sequence[Dim], dtype: str) -> Handle:
        """Add a tensor whose parts are made by `part`."""
        return self._add(Tensor(name, tuple(shape), dtype))

    def part(self, to: Read, axes: Sequence[Axis], value: Expr) -> None:
        """Make the part of a tensor that `to` runs over."""
        self._blocks.append(Block(to.tensor, to.at, tuple(axes), expr(value)))

    def output(self, tensor: Handle) -> None:
        """Return a tensor."""
        self._outputs.append(Slot(tensor.name, "out"))

    def graph(self) -> Graph:
        """Return what was written.

        Raises `GraphError` if a name is used twice or not made, or a rank does not fit.
        """
        slots = (*self._inputs, *self._outputs)
        return Graph(tuple(self._tensors), tuple(self._blocks), slots)

    def _make(self, name: str, axes: Sequence[Axis], dtype: str, rounds: bool = False) -> None:
        self._add(Tensor(name, tuple(a.size for a in axes), dtype, rounds=rounds))

    def _add(self, tensor: Tensor) -> Handle:
        self._tensors.append(tensor)
        return Handle(tensor.name)
